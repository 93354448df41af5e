"""Short notices in the simulation: a worker hands over inside a step, at every point of it, also while others die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.action import Op
from engine.core.checks.samples import EFFECTS, SampleEffect
from engine.core.protocol.state import Phase
from tests.simulation import plans
from tests.simulation.case import SHORT, Case, Fault
from tests.simulation.judge import INSIDE
from tests.simulation.planting import SMALL, all_well, caught
from tests.simulation.replica import Replica, Stream
from tests.simulation.run import run
from tests.simulation.schedules import LEFT_INSIDE, first_step, inside_case, parting_case, short_notices, take_overs
from tests.simulation.world import World
from tests.soaked import soaked

HISTORIES = 120
TAKEN = "residual is taken"


@pytest.mark.parametrize("stride", [11, soaked(1)])
@pytest.mark.parametrize("shape", LEFT_INSIDE, ids=Case.text)
def test_no_backward_is_run_again_wherever_a_worker_is_told(shape: Case, stride: int) -> None:
    for case in short_notices(shape, stride):
        world = World(case)
        world.run()
        world.judge.end()
        assert INSIDE in world.turns, case.text()
        assert max(world.judge.backwards.values()) == 1, case.text()
        (told,) = case.faults
        assert world.membership.phase is Phase.FINISHED
        assert told.worker not in world.membership.owners
        assert {each.cause for each in world.membership.out.values()} <= {"left"}, "it is not killed"


@pytest.fixture
def _time_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in virtual time is too short for a grace that ends in it and leaves time to send."""
    monkeypatch.setattr("engine.core.protocol.orders.left_ns", lambda workers, *_: dict.fromkeys(workers, 10**9))


@pytest.mark.usefixtures("_time_to_send")
@pytest.mark.parametrize("stride", [11, soaked(1)])
@pytest.mark.parametrize("shape", [*LEFT_INSIDE, Case(2, 3, 2, fsdp=1, schedule="gpipe")], ids=Case.text)
def test_no_forward_is_run_again_wherever_a_worker_is_told_that_sends_its_residuals(shape: Case, stride: int) -> None:
    count = 0
    for case in short_notices(replace(shape, residuals="ship"), stride):
        world = World(case)
        world.run()
        world.judge.end()
        count += TAKEN in world.turns
        assert max(world.judge.backwards.values()) == 1, case.text()
        assert "forward is redone" not in world.turns, case.text()
        assert world.membership.phase is Phase.FINISHED
    assert count


def with_a_death(stride: int, residuals: str = "recompute") -> Iterator[Case]:
    """Yields short notices, each with a death of the leaver, of its heir or of another at every `stride`-th moment."""
    case = replace(SMALL, level=2, residuals=residuals)
    told = replace(case, faults=(Fault(1, "moment", first_step(case, run(case).moments[1]).stop + 5, SHORT),))
    for worker, moments in enumerate(run(told).moments):
        for moment in range(told.faults[0].at // 2, moments + 1, stride):
            yield replace(told, seed=moment % 4, faults=(*told.faults, Fault(worker, "moment", moment)))


def test_every_death_beside_a_hand_over_inside_a_step() -> None:
    histories = all_well(with_a_death(2))
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert sum(INSIDE in history.turns for history in histories) > len(histories) * 0.5


@pytest.mark.usefixtures("_time_to_send")
def test_every_death_while_residuals_are_sent() -> None:
    histories = all_well(with_a_death(3, "ship"))
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert sum(TAKEN in history.turns for history in histories) > len(histories) * 0.2


def test_a_coordinator_that_dies_is_replaced() -> None:
    (told, *_) = short_notices(SMALL, 7)
    histories = all_well(take_overs(told, 2))
    assert sum(INSIDE in history.turns for history in histories) > len(histories) * 0.5


def test_random_histories() -> None:
    histories = all_well(map(parting_case, range(HISTORIES)))
    turns = Counter(turn for history in histories for turn in history.turns)
    assert turns[INSIDE] > HISTORIES * 0.3, turns


def test_random_notices_in_the_second_step() -> None:
    histories = all_well(map(inside_case, range(HISTORIES // 2)))
    assert sum(INSIDE in history.turns for history in histories) > len(histories) * 0.8


@pytest.mark.soak
def test_many_random_histories() -> None:
    all_well(map(parting_case, range(HISTORIES, 25_000)))


# Planted bugs


@pytest.mark.usefixtures("fresh_answers")
def test_accumulators_that_are_sent_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Replica.take_stream

    def take_stream(self: Replica, stream: Stream) -> None:
        take(self, stream)
        self.added, self.backwards = 0, []

    monkeypatch.setattr(Replica, "take_stream", take_stream)
    caught(short_notices(SMALL, 5), "backward . of slot .* after 0 have been added|has counted .* and added")


@pytest.mark.usefixtures("fresh_answers")
def test_accumulators_that_are_planned_as_if_they_were_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.program.planner.held_after", lambda held, hands: held)
    caught(short_notices(SMALL, 5), "more and nothing less than it must")


@pytest.mark.usefixtures("fresh_answers")
def test_a_check_of_samples_that_knows_no_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFECTS, Op.HAND, SampleEffect.NONE)
    caught(short_notices(SMALL, 5), "samples: step .: worker . counted the .* 0 times")


@pytest.mark.usefixtures("fresh_answers")
def test_accumulators_that_are_sent_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes a sum and starts anew has the right bits; its records say that it counted samples twice."""
    monkeypatch.setattr("engine.core.program.planner.held_after", lambda held, hands: held)
    monkeypatch.setattr(plans, "check_plan", lambda given, plan: None)
    monkeypatch.setattr(Replica, "take_stream", lambda self, stream: None)
    caught(short_notices(SMALL, 5), "samples: step .: worker . counted the .* 2 times")


@pytest.mark.usefixtures("fresh_answers", "_time_to_send")
def test_residuals_whose_forwards_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "take_forward", lambda self, microbatch, after: None)
    caught(short_notices(replace(SMALL, residuals="ship"), 5), "have been counted|has counted")
