"""The verdict of `bamboo inject` on the terminal: what decides comes first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_cli.inject import _print_case
from engine.core.checks.expectations import Check

LOADED: Any = SimpleNamespace(scenario=SimpleNamespace(name="mine"))


def lines(capsys: pytest.CaptureFixture[str], *checks: Check) -> list[str]:
    """Returns what is printed about a case with these checks."""
    case: Any = SimpleNamespace(verdict_word=checks[0].result, checks=checks, recoveries=(), folder=Path("runs/a"))
    _print_case(LOADED, case, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_the_reason_comes_first_and_alone_if_the_job_could_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    """It was in line two, among checks such as "culprit evicted: nobody: passed"."""
    why = "the run ended with exit code 2: in the factory mine:net: NameError"
    noise = (Check("faults", "invalid", "first did not strike"), Check("culprit", "passed", "nobody"))
    assert lines(capsys, Check("outcome", "invalid", why), *noise) == [f"mine: invalid: {why}", "runs/a"]
    first, *rows, _ = lines(capsys, Check("outcome", "failed", "not recovered"), *noise)
    assert first == "mine: failed" and len(rows) == 3
