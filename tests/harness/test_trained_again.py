"""Steps that are trained again after a checkpoint must have the hashes that they had: else the run ends with 70."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.checkpoint_rules import Ladder
from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.core.messages import CommitMessage
from engine.harness.state_lost import Restarts
from engine.runtime.agent.run_state import Ending, RunState
from engine.runtime.worker.executor import Executor
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

JOB = Job(model="mlp", stages=4, steps=9, microbatches=4, validate_every=0, checkpoint_every="2")
KILLS = ("7:1", "7:2:F:0")  # neighbours: stage 2 is lost; of the checkpoints two at most are not written yet


@pytest.fixture(name="run")
def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], Ending]:
    """Returns a function that runs the job; after the restart every replica takes a share of its gradient."""
    lives = []
    again, take_step = RunState.again, Executor.take_step

    def begins_again(state: RunState, committed: int) -> RunState:
        lives.append(committed)
        return again(state, committed)

    def run(share: float) -> Ending:
        def takes_a_share(executor: Executor, commit: CommitMessage) -> None:
            factor = commit.clip_factor * (share if lives else 1.0)
            take_step(executor, replace(commit, clip_factor=factor))

        monkeypatch.setattr(RunState, "again", begins_again)
        monkeypatch.setattr(Executor, "take_step", takes_a_share)
        restarts = Restarts(Ladder(1), str(tmp_path), "", lambda line: None)
        job = replace(JOB, checkpoints=str(tmp_path))
        ending = run_in_threads(job, parse_kills(KILLS, job), revive=restarts.revive)
        assert len(lives) == 1
        assert lives[0] in (1, 3, 5)
        return ending

    return run


def test_a_run_that_trains_a_step_again_with_the_same_hashes_finishes(run: Callable[[float], Ending]) -> None:
    ending = run(1.0)
    assert (ending.outcome, ending.error) == ("finished", None)
    rows = run_in_threads(JOB).view.run_state.rows
    assert [row.texts() for row in ending.view.run_state.rows] == [row.texts() for row in rows]


def test_other_hashes_of_a_step_that_is_trained_again_end_the_run(run: Callable[[float], Ending]) -> None:
    ending = run(0.5)
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.INTERNAL)
    expected = r"step [246], trained again after a checkpoint: layer 0 has other weights than before"
    assert re.match(expected, str(ending.error))


def test_planted_no_comparison_with_the_hashes_before(
    run: Callable[[float], Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: Any = property(lambda self: {}, lambda self, before: None)
    monkeypatch.setattr(RunState, "_before", forgotten)
    assert run(0.5).outcome == "finished", "nothing else notices it"
