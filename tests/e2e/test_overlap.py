"""An overlapped pair that a user's handler runs has the bits of the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.job.job import Job
from engine.core.ownership import Grid, fresh
from engine.core.program.build import build_program
from engine.core.program.schedules import pairs_of
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.plain_loop import PlainLoop
from tests.e2e.recorded import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]


def test_a_handler_changes_the_order_and_no_bit(tmp_path: Path, server: ForkServer) -> None:
    job = Job(
        model="tests.e2e.overlapping_model:line",
        data="synthetic",
        schedule="dualpipev-overlapped",
        stages=4,
        stages_per_worker=2,
        microbatches=4,
        microbatch_size=2,
        steps=2,
        validate_every=0,
    )
    events = tmp_path / "events.jsonl"
    ending = run_session(job, events, tmp_path, server=server)
    assert ending.error is None, ending.error
    loop = PlainLoop(job)
    assert [row.texts() for row in ending.view.run_state.rows] == [row for step in (0, 1) for row in loop.step(step)]
    program = build_program(job.schedule, fresh(Grid(4, 4), 2, "v"))
    done = events_of(events)
    for worker, actions in program.items():
        texts = [each["action"] for each in done if each["event"] == "action" and each["worker"] == worker]
        firsts = [position for position, _ in pairs_of(actions)]
        assert firsts
        for first in firsts:
            pair = str(actions[first + 1]), str(actions[first])
            assert texts[first : first + 2] == [*pair]
