"""The records of a run that resumed from a checkpoint: each step once, the lost ones told with their recovery."""

from __future__ import annotations

from engine.core.checks.recoveries import recoveries
from engine.core.history.run_history import history_of
from tests.core.made_records import records_of

BEGIN = [
    {"event": "job", "steps": 6, "stages": 2},
    {"event": "epoch", "at_ns": 1, "epoch": 1, "owners": [0, 1], "shadows": [[1], [0]], "members": [0, 1]},
    {"event": "go", "at_ns": 2, "epoch": 1},
]
LIFE = [{"event": "commit", "at_ns": 10 + step, "step": step, "loss": step / 2} for step in range(5)]
LOSS = [
    {"event": "exit", "at_ns": 20, "of": 0, "expected": False, "seen_ns": 20},
    {"event": "epoch", "at_ns": 21, "epoch": 2, "verdict": [[0, "died"]], "owners": [1, 1], "members": [1]},
    {"event": "failed", "at_ns": 22, "error": "the state of stage 0 is lost"},
    {"event": "resumed", "at_ns": 23, "step": 2, "lost": 2},
    {"event": "epoch", "at_ns": 24, "epoch": 3, "owners": [0, 1], "members": [0, 1]},
    {"event": "go", "at_ns": 25, "epoch": 3},
]
AGAIN = [{"event": "commit", "at_ns": 30 + step, "step": step, "loss": step / 2} for step in range(3, 6)]


def test_lost_steps_count_once_and_the_failure_is_made_up_for() -> None:
    history = history_of(records_of([*BEGIN, *LIFE, *LOSS, *AGAIN]))
    assert list(history.commits.steps) == [0, 1, 2, 3, 4, 5]
    assert [each.at_ns for each in history.commits] == [10, 11, 12, 33, 34, 35]
    assert (history.committed, history.error) == (5, "")


def test_before_the_first_commit_the_last_step_is_that_of_the_checkpoint() -> None:
    history = history_of(records_of([BEGIN[0], {"event": "resumed", "at_ns": 1, "step": 7, "lost": 0}]))
    assert history.committed == 7


def test_the_recovery_names_the_checkpoint_and_the_lost_steps() -> None:
    records = records_of([*BEGIN, *LIFE, *LOSS, *AGAIN])
    for found in (recoveries(records), recoveries(history_of(records).records)):
        (recovery,) = found
        assert (recovery.rung, recovery.lost_steps, recovery.step) == ("checkpoint", 2, 3)
        assert recovery.resume_ns == 33
        assert "resumed from a checkpoint" in str(recovery)
        assert str(recovery).endswith("2 steps lost")
