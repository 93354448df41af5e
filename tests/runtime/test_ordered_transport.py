"""What real workers send and post in program order needs no tags: in whole jobs, with kills, heals and streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership, Redundancy, directions_of
from engine.core.program.schedules import SCHEDULES
from engine.runtime.stage import gradient_log
from engine.runtime.transport.transport import ProgramPurpose, program_key
from engine.runtime.worker import thread_worker
from engine.runtime.worker.step_end import StepEnd
from tests.doubles.ordered_transport import OrderedBackend, PairOrders
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

SMALL: dict[str, Any] = {
    **{"model": "mlp", "steps": 3, "microbatches": 4, "validate_every": 2, "seed": 3},
    "check_pure": False,
}
TIED: dict[str, Any] = {**SMALL, "model": "gpt", "model_args": {"depth": 2, "width": 16, "tied": True}, "steps": 2}


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> PairOrders:
    """Puts the ordered double in place of the transport of each worker in this process."""
    orders = PairOrders()
    monkeypatch.setattr(thread_worker, "ThreadBackend", partial(OrderedBackend, orders))
    return orders


def run(job: Job, kills: list[str], ownership: Ownership | None = None) -> None:
    ending = run_in_threads(job, parse_kills(kills, job), ownership)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.state for worker in ending.view.workers].count("dead") == len(kills)


def in_turn() -> Iterator[Any]:
    """Yields each schedule with one kind of redundancy; the soak has it with every kind."""
    kinds: tuple[tuple[int, Redundancy], ...] = ((1, "lazy"), (1, "eager"), (2, "reroute"))
    for number, name in enumerate(SCHEDULES):
        for kind, (pipelines, redundancy) in enumerate(kinds):
            marks = [] if kind == number % len(kinds) else [pytest.mark.soak]
            yield pytest.param(name, pipelines, redundancy, marks=marks)


@pytest.mark.parametrize(("name", "pipelines", "redundancy"), [*in_turn()])
def test_every_schedule_with_a_kill_and_a_heal(
    orders: PairOrders, name: str, pipelines: int, redundancy: Redundancy
) -> None:
    schedule = SCHEDULES[name]
    v = max(1, schedule.stages_per_worker[0])
    pipelines = max(pipelines, directions_of(name))
    layout = {"schedule": name, "stages": 4, "stages_per_worker": v, "pipelines": pipelines, "redundancy": redundancy}
    run(Job(**{**SMALL, **layout, "log_every": int(redundancy == "lazy")}), [f"1:{4 // v - 1}:F:2"])
    assert orders.crossed == []
    assert orders.num_met > 20


# Worker 0 sends worker 1 the gradient of the tied stage 0, and then reduces stage 2 with it.
CROSSING = Ownership(Grid(4, 2, 2, ((0, 3),)), (0, 1, 0, 1, 2, 2, 1, 2))


def test_tied_gradients_come_before_later_reductions(orders: PairOrders) -> None:
    run(Job(**{**TIED, "stages": 4, "pipelines": 2, "microbatches": 2, "redundancy": "none"}), [], CROSSING)
    assert orders.crossed == []


def test_planted_receives_at_the_log_cross(orders: PairOrders, monkeypatch: pytest.MonkeyPatch) -> None:
    post = StepEnd._post_tied
    monkeypatch.setattr(StepEnd, "_post_tied", lambda self, below: post(self, below) if below == 4 else None)
    run(Job(**{**TIED, "stages": 4, "pipelines": 2, "microbatches": 2, "redundancy": "none"}), [], CROSSING)
    assert "purpose=<ProgramPurpose.ENDING" in orders.crossed[0].partition("was posted")[0]


def test_planted_message_aside_in_program_order_is_found(orders: PairOrders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams as messages in order: their receives are posted ahead, and their sender sends others first."""
    enter = gradient_log.GradientStreams.enter

    def enters(self: Any, plane: Any, *rest: Any) -> None:
        enter(self, plane, *rest)
        self._channel = plane.in_order

    monkeypatch.setattr(gradient_log.GradientStreams, "enter", enters)
    monkeypatch.setattr(
        gradient_log, "aside_key", lambda grid, purpose, *of: program_key(grid, ProgramPurpose.TIE, *of)
    )
    run(Job(**{**SMALL, "schedule": "1f1b", "stages": 4, "log_every": 1, "steps": 2}), [])
    assert orders.crossed
