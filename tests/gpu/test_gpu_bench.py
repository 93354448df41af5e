"""The benchmarks on a GPU: `make bench-gpu` runs them, within ten minutes, and writes a page with every figure.

Elsewhere they are skipped with the reason. Nothing here has been run on a GPU yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from engine.files.host_facts import host_facts
from tests.gpu.gpu_session import FACTS, ROOT, WHY
from tests.gpu.hardware_page import figure_of, page

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY), pytest.mark.timeout(600)]


def test_every_figure_of_the_benchmarks_is_on_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bamboo_cli", "bench", "gpu", "--json", "--results", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=590, check=False)
    assert ended.returncode == 0
    facts, figures = host_facts(ROOT), [figure_of(row) for row in json.loads(ended.stdout)]
    assert figures
    name, text = page(date.today(), {each: facts[each] for each in FACTS}, figures, "make bench-gpu")
    (ROOT / "docs" / "hardware" / name).write_text(text)
