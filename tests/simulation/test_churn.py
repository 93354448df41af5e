"""Churn in the simulation: no promise is broken, each kind of change happens, and planted bugs are caught."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from engine.core.messages import WaitingMessage
from engine.core.program import ballot
from engine.core.protocol import transitions, verdicts
from engine.core.protocol.events import WorkerWord
from engine.core.protocol.failure_detector import alive
from engine.core.protocol.state import Phase, State
from tests.simulation import actions, provenance
from tests.simulation.case import from_text
from tests.simulation.churn import STRIKES, churn_case
from tests.simulation.compiled import NOTHING, REDO
from tests.simulation.executor import Executor
from tests.simulation.judge import INSIDE, MOVED, WAITS_ON
from tests.simulation.planting import Bug, all_well, caught, planted_in
from tests.simulation.test_membership_rules import patch_rule
from tests.simulation.world import ASKED

pytestmark = pytest.mark.timeout(300)

Patch = pytest.MonkeyPatch
HISTORIES = 80
TAKEN_IN, HANDED = "waiting worker becomes a member", "prepared hand-over is taken"
TAKEN, HEALED = "another coordinator takes over", "shadow is healed"


def test_churn() -> None:
    """Blocks move, workers come and go, and coordinators too, in any order; `make soak-churn` has 25,000 of them."""
    cases = [churn_case(number) for number in range(HISTORIES)]
    histories = all_well(cases)
    count, turns = len(cases), Counter(turn for history in histories for turn in history.turns)
    assert sum(history.phase is Phase.FINISHED for history in histories) > 0.7 * count
    assert sum(history.epoch > 3 for history in histories) > 0.2 * count
    assert min(turns[turn] for turn in (TAKEN_IN, HANDED, HEALED, ASKED)) > 0.2 * count, turns
    assert min(turns[MOVED], turns[TAKEN]) > 0.1 * count, turns
    assert min(turns[INSIDE], turns[WAITS_ON]) > 0.02 * count, turns
    waiters = Counter(
        (fault.kind, fault.point in ("welcome", "waiting"))
        for history in histories
        for fault in history.struck
        if fault.worker >= history.case.num_workers
    )
    assert waiters["kill", True] > 0.02 * count, "workers die while they wait"
    assert waiters["kill", False] > 0.02 * count, "and after that, while they are healed or later"


def test_every_kind_of_strike_is_drawn() -> None:
    cases = [churn_case(number) for number in range(2 * HISTORIES)]
    drawn = {(f.kind, f.point, f.worker >= case.num_workers) for case in cases for f in case.faults}
    for each in STRIKES:
        assert {(each.kind, point, each.waiting) for point in each.points} & drawn
    assert {case.blocks for case in cases} == {1, 2, 4}
    assert {case.redundancy for case in cases} == {"none", "lazy", "eager", "reroute"}
    assert all(from_text(case.text()) == case for case in cases)


# Planted bugs

PLANTED: dict[str, tuple[Bug, str]] = {}
planted = partial(planted_in, PLANTED)


@planted("the loss or the clip factor of step . differs|has received another")
def pipelines_are_renumbered(patch: Patch) -> None:
    """Where one worker owns the first slots of two pipelines, it numbers pipelines by their workers."""
    right, numbers = provenance.data, dict[int, int]()

    def data(step: int, pipeline: int, microbatch: int) -> int:
        return right(step, numbers.get(pipeline, pipeline), microbatch)

    def forward(worker: Executor, action: tuple[Any, ...]) -> bool:
        _, (pipeline, stage), _, source, *_ = action
        if source == NOTHING and worker.number in worker.ownership.owners_of(stage):
            numbers[pipeline] = worker.ownership.owners_of(stage).index(worker.number)
        is_done = usual(worker, action)
        numbers.clear()
        return is_done

    usual = actions._forward
    patch.setattr(provenance, "data", data)
    patch.setattr(actions, "_DO", (*[forward] * (REDO + 1), *actions._DO[REDO + 1 :]))


@planted("in an open step|stands twice")
def a_block_moves_in_an_open_step(patch: Patch) -> None:
    real = verdicts.heirs
    patch.setattr(verdicts, "heirs", lambda state, dead, hand_over=False: real(state, dead, True))


@planted("is no member, and its loss makes an epoch")
def the_death_of_a_waiting_worker_makes_an_epoch(patch: Patch) -> None:
    patch.setattr(transitions, "loses", lambda state, gone: verdicts.new_epoch(state, state.moved_ns, gone))


@planted("is used twice")
def a_number_is_used_twice(patch: Patch) -> None:
    def waits(state: State, event: WorkerWord[WaitingMessage]) -> State:
        if event.worker in (*state.members, *state.waiting):
            return state
        new = alive(state, event.worker, event.now_ns)
        return new._replace(waiting=(*state.waiting, event.worker), nodes={**state.nodes, event.worker: event.node})

    patch_rule(patch, WaitingMessage, waits)


@planted("without a whole replica|no whole replica|cannot adopt|has no replica|which it does not hold|indeed")
def a_half_healed_replica_inherits(patch: Patch) -> None:
    def believes(state: State) -> State:
        slots = tuple(range(len(state.owners)))
        return verdicts.all_inventoried(state._replace(copies=dict.fromkeys(state.members, slots)))

    patch.setattr(transitions, "all_inventoried", believes)


@planted("without worker .'s vote")
def a_commit_does_not_wait_for_a_replica_that_is_healed(patch: Patch) -> None:
    voters = ballot._voters

    def without_the_last(ownership: Any) -> Any:
        last = max(ownership.workers())
        return frozenset(each for each in voters(ownership) if each[0] != last or ownership.owner(*each[1]) == last)

    patch.setattr(ballot, "_voters", without_the_last)


@planted("became members without memory")
def a_verdict_takes_a_cramped_worker_in(patch: Patch) -> None:
    patch.setattr(State, "able_to_join", property(lambda state: state.waiting))


@planted("has other owners than those of epoch")
def a_worker_has_other_owners(patch: Patch) -> None:
    enters = Executor.enter

    def astray(self: Executor, share: Any) -> None:
        if self.number == 1 and self.epoch > 1:
            self.ownership = self.world.ownership
        enters(self, share)

    patch.setattr(Executor, "enter", astray)


@pytest.mark.usefixtures("fresh_answers")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: Patch) -> None:
    plant, words = PLANTED[bug]
    plant(monkeypatch)
    caught((churn_case(number) for number in range(1000)), words)
