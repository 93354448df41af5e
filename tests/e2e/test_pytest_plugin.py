"""The pytest plugin, in a pytest of its own: the test passes or fails with its scenario."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TESTS = """\
def test_good(bamboo_scenario):
    result = bamboo_scenario("kill-middle-stage")
    assert result.result == "passed"

def test_bad(bamboo_scenario):
    bamboo_scenario("cascade-during-recovery", "redundancy_level=1")

def test_other():
    pass
"""


def test_scenarios_as_tests(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "bamboo_cli.pytest_plugin", "-rf", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "cascade-during-recovery: failed (no_recovery): outcome: state-lost" in done.stdout
