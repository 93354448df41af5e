"""What all tests on a GPU share: the reason to skip them, their time, and commands of bamboo.

The time is ten minutes, or the seconds of the variable GPU_TESTS_S: a machine may be lent for less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.core.job.job import Job
from engine.files.accelerators import accelerators, lacks
from tests.gpu.hardware_page import Figure

ROOT = Path(__file__).resolve().parents[2]
FACTS = ("gpus", "driver", "torch", "torch_cuda", "python", "kernel", "cpu", "git_commit")
WHY = lacks(Job(share_gpu=True), accelerators())
BAMBOO = [sys.executable, "-m", "bamboo_cli"]
LEAST_S = 20.0  # for a test that begins
_BUDGET_S = float(os.environ.get("GPU_TESTS_S", "580"))
_BEGUN_S = time.monotonic()


def left_s() -> float:
    """Returns how many seconds are left."""
    return _BEGUN_S + _BUDGET_S - time.monotonic()


def run(folder: Path, *options: str, command: str = "run") -> dict[str, Any]:
    """Returns the result of a command that must end with code 0, within the time that is left."""
    command_line = [*BAMBOO, command, "--json", *options]
    command_line += ["--results", str(folder)] if command == "run" else ["--set", f"results={folder}"]
    limit_s = min(280.0, left_s())
    ended = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def note(figures: list[Figure], what: str, found: str, since_s: float) -> None:
    """Adds a result, which took from `since_s` up to now."""
    figures.append(Figure(what, found, time.monotonic() - since_s))
