"""What came of the failures of a run: words, exit codes, and what may be claimed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bamboo_cli.aftermath import Aftermath, aftermath_of
from bamboo_cli.options.faults import faults_of, grace_seconds
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.twin import Comparison
from engine.core.config.job import Job
from engine.core.errors import BambooError, ExitCode, UserError
from engine.core.exclusion import Cause, excluded
from engine.core.faults.kill_text import parse_kill
from engine.files.run_folder import RunFolder, create_run_folder
from engine.harness.run_driver import lines_only
from engine.runtime.agent.run_state import Account
from engine.runtime.agent.session import Ending, View

JOB = Job(stages=3, steps=9)
FAULT = parse_kill("5:2:B:3", JOB)
RECOVERY = Recovery(
    1,
    5,
    "",
    (excluded(2, Cause.DEATH, "died"),),
    {2: None},
    (),
    (FAULT.id,),
    0,
    {"detect": 0, "replay": 120_000_000},
    1,
)


def aftermath(comparison: Comparison | None = None, fired: bool = True, **more: Any) -> Aftermath:
    return Aftermath((FAULT,), frozenset({FAULT.id} if fired else ()), [RECOVERY], comparison, **more)


def test_weights_are_called_identical_only_when_they_were_compared() -> None:
    text = "worker 2 died; recovered in 0.12 s, 0 steps lost"
    assert aftermath().lines(8) == [text]
    assert aftermath(Comparison(9, 8, None)).lines(8) == [f"{text}, weights identical"]
    assert aftermath(Comparison(8, 7, None)).lines(8) == [f"{text}, weights identical up to step 7"]
    assert aftermath(Comparison(0, -1, None)).lines(8) == [text]
    assert aftermath(Comparison(9, 8, "step 5, layer 1: state differs")).lines(8) == [text]


def test_who_dies_after_the_last_commit_needs_no_recovery() -> None:
    late = replace(RECOVERY, points_ns={"detect": 0}, resume_ns=None, after_end=True)
    found = replace(aftermath(Comparison(9, 8, None)), recoveries=[late])
    assert found.lines(8) == [
        "worker 2 died; that was after the last commit, no step was left to recover, weights identical"
    ]


def test_half_a_backward_that_did_not_strike_after_a_failure_says_why() -> None:
    job = Job(stages=3, steps=9, schedule="zb1p")
    faults = (parse_kill("5:1", job), parse_kill("5:2:I:3", job))
    error = Aftermath(faults, frozenset({"5:1"}), [RECOVERY]).error()
    assert error is not None
    assert str(error).endswith("of step 5) (once a worker is lost, backwards are whole: B instead of I and W)")
    error = Aftermath(faults, frozenset(), []).error()
    assert error is not None
    assert str(error).endswith("of step 5)")


def test_a_run_passes_when_its_fault_struck_and_no_bit_differs() -> None:
    assert aftermath(Comparison(9, 8, None)).error() is None
    assert aftermath().error() is None


def test_a_difference_fails_the_run_and_says_where() -> None:
    error = aftermath(Comparison(9, 8, "step 5, layer 1: state differs")).error()
    assert error is not None
    assert error.exit_code is ExitCode.EXPECTATION_FAILED
    assert str(error).endswith("twin: step 5, layer 1: state differs")


def test_a_fault_that_did_not_strike_makes_the_case_invalid() -> None:
    error = aftermath(Comparison(9, 8, None), fired=False).error()
    assert error is not None
    assert error.exit_code is ExitCode.INVALID_CASE
    assert str(error).endswith("did not strike: --kill 5:2:B:3 (kill before 2B3 of step 5)")


def test_a_twin_that_failed_fails_the_comparison() -> None:
    error = BambooError("the twin")
    assert aftermath(twin_error=error).error() is error
    assert aftermath(twin_error=error).as_dict()["twin"] == {"error": "the twin"}


def test_the_summary_has_plain_values() -> None:
    said = aftermath(Comparison(9, 8, None)).as_dict()
    assert json.loads(json.dumps(said))["faults"] == [{"fault": "5:2:B:3", "fired": True}]
    assert said["twin"] == {"steps_compared": 9, "difference": None}
    assert said["recoveries"][0]["pause_ms"] == 120.0
    assert aftermath().as_dict()["twin"] is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120", 120.0), ("120s", 120.0), (" 0.5s ", 0.5), ("2m", 120.0), ("250ms", 0.25), ("1.5", 1.5)],
)
def test_a_grace_in_seconds(text: str, seconds: float) -> None:
    assert grace_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "2d", "0", "0s", "-1", "nan", "inf"])
def test_no_grace(text: str) -> None:
    with pytest.raises(
        UserError, match="--grace: expected a duration such as 250ms, 5s or 2m, or seconds, above 0, found"
    ):
        grace_seconds(text)


def test_a_comparison_needs_hashes() -> None:
    with pytest.raises(UserError, match="audit: expected 1 or more with --kill, found 0"):
        faults_of(["5:2"], Job(audit=0), with_twin=True)
    assert [each.id for each in faults_of(["5:2"], Job(audit=0), with_twin=False)] == ["5:2"]
    assert faults_of([], Job(audit=0), with_twin=True) == ()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path, "x", datetime(2026, 1, 1), "abcd")


EVENTS: list[dict[str, Any]] = [
    {"event": "job", "stages": 3},
    *({"event": "started", "of": worker, "slots": [[0, worker]]} for worker in range(3)),
    {"event": "go", "epoch": 0, "at_ns": 0},
    {"event": "commit", "step": 0, "at_ns": 1},
    {"event": "action", "worker": 2, "step": 1, "action": "2B0", "start_ns": 2, "end_ns": 3},
    {"event": "fault", "fault": FAULT.id, "of": 2, "at_ns": 3},
    *({"event": "exit", "of": worker, "code": -9, "expected": False, "seen_ns": 4, "at_ns": 5} for worker in (1, 2)),
]


def ending(code: int) -> Ending:
    return Ending("failed", code, None, View(Account(JOB, losses=[0.5]), ()), 0, 0)


def write(folder: RunFolder, events: list[dict[str, Any]]) -> None:
    folder.events.write_text("".join(json.dumps(each) + "\n" for each in events))


def test_what_fired_is_read_off_the_events_also_when_the_run_failed(folder: RunFolder) -> None:
    write(folder, EVENTS)
    found = aftermath_of(JOB, folder, ending(3), [FAULT], None, lines_only(print), with_twin=True)
    assert (found.missed, found.comparison, found.recoveries) == ([], None, [])
    write(folder, EVENTS[:5])
    assert aftermath_of(JOB, folder, ending(0), [FAULT], None, lines_only(print), with_twin=True).missed == [FAULT]


def test_of_shards_nobody_is_called_the_heir(folder: RunFolder) -> None:
    verdict = {"epoch": 1, "owners": [0, 1, 1], "verdict": [[2, "died"]], "reason": "", "at_ns": 6}
    write(folder, [*EVENTS[:-2], {"event": "epoch", **verdict}])
    for job, heirs in ((JOB, "; worker 1 was to take over stage 2"), (replace(JOB, pipelines=2, fsdp=1), "")):
        found = aftermath_of(job, folder, ending(80), [FAULT], None, lines_only(print), with_twin=True)
        assert found.lines(0) == [f"worker 2 died after 2B0 of step 1{heirs}; not recovered"]
