"""A real job of two processes that dies and resumes: honest, it equals its twin; cheating, each cheat is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.checks.external_verdict import JobReports, judge
from engine.external.progress import ReportedSteps, reported_states
from tests.external.small_job import EVERY, LOST, REPEATED

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def _reports(folder: Path) -> JobReports:
    source = ReportedSteps(folder / "progress")
    states, _ = reported_states(folder / "progress")
    return JobReports([*source.read()], states, 0, source.unread)


def test_a_resumed_job_equals_its_twin_and_a_cheating_one_does_not(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.external.small_job", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "0 1 0 0\n", done.stderr
    twin = _reports(tmp_path / "twin")
    honest = judge(_reports(tmp_path / "honest"), twin)
    assert {each.status for each in honest.parts} == {"same"}, honest.parts
    assert {*honest.repeated} <= {4, 5} and 4 in honest.repeated

    verdict = judge(_reports(tmp_path / "cheat"), twin)
    assert verdict.lost_samples == (LOST,) and REPEATED in verdict.repeated
    texts = {each.part: each.text for each in verdict.parts}
    assert texts["samples"] == f"sample {LOST} (step {LOST // 4}) lost"
    assert f"{REPEATED} executed twice" in texts["steps"]
    assert texts["weights"].startswith(f"from step {EVERY - 1} on")
    assert "'0.weight' and '2.weight' are swapped" in texts["weights"]
