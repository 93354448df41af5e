"""The program that stands beside the hang matrix, on the CPU: it notices a killed rank, and no rank that sleeps."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.gpu_session import ROOT


def told_by(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.stock_pair", "--backend=gloo", *options]
    return dict(json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout))


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stop", ["sleep", "stop"])
def test_a_rank_that_stops_is_not_noticed_before_the_cut_off(stop: str) -> None:
    assert told_by(f"--stop={stop}", "--cut=1") == {"noticed_s": None, "how": "not within 1 s"}


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [("--stop=kill",), ("--stop=sleep", "--timeout=2")], ids=["kill", "timeout"])
def test_a_rank_that_is_killed_or_too_late_is_noticed(options: tuple[str, ...]) -> None:
    told = told_by(*options, "--cut=20")
    assert 0 < told["noticed_s"] < 20
    assert told["how"].startswith("raised ")
