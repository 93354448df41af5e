"""A model of a real size, made small: bfloat16 and fused attention have the same bits after a death, and recomputed."""

from __future__ import annotations

from typing import Any

from engine.core.checks.trajectory import trajectory_hash
from engine.core.job.job import Job
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

SMALL: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2}
JOB: dict[str, Any] = {"model": "gpt-100m", "model_args": SMALL, "dtype": "bfloat16", "stages": 2, "steps": 3}


def trajectory(*kills: str, **fields: Any) -> str:
    job = Job(**JOB, **fields, microbatches=2, validate_every=0)
    ending = run_in_threads(job, parse_kills(kills, job))
    assert (ending.outcome, ending.error) == ("finished", None)
    return trajectory_hash(ending.view.run_state.rows)


def test_neither_a_death_nor_recomputing_changes_a_bit() -> None:
    expected = trajectory()
    assert trajectory("1:1:B:1") == expected
    assert trajectory("1:0:B:0", activation_checkpoint=1) == expected
