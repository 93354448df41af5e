"""The agent has the workers prepare for a commit, and takes the short way only when all of them have."""

from __future__ import annotations

from dataclasses import replace

from engine.core.ownership import Grid, Ownership
from engine.core.program.inventory import PreparedMessage, PrepareMessage
from engine.core.protocol import orders
from engine.core.protocol.coordinator_state import Preparation
from engine.core.protocol.events import Event, ExitSeen, Notice, StepCommitted, WantedOwners
from engine.core.protocol.state import Phase, State
from tests.core.membership_cases import S, running, told

GRID = Grid(3, 4)
NOW_NS = 1000 * S


class Prepared:
    """A preparation, and its orders so far."""

    def __init__(self, grace_ns: int = 120 * S, elastic: bool = False):
        self.orders: list[PrepareMessage] = []
        self.of = orders.noticed(Preparation(NOW_NS, elastic=elastic), 2, NOW_NS + grace_ns)

    def look(self, state: State) -> None:
        """Looks at a state, with the shadows that it has."""
        ownership = Ownership(GRID, state.owners, state.shadows)
        self.of, order = orders.looked(self.of, state, ownership, NOW_NS)
        self.orders += [order] if order else []

    def answered(self, worker: int, number: int, digest: str, epoch: int = 2) -> None:
        """Takes the answer of a worker."""
        self.of = orders.answered(self.of, worker, PreparedMessage(epoch, number, digest))

    def commit(self, state: State) -> tuple[Event, ...]:
        """Returns the events that are decided with the commit of the open step."""
        event = StepCommitted(NOW_NS + 1, state.epoch, state.committed + 1, state.shadows)
        ownership = Ownership(GRID, state.owners, state.shadows)
        self.of, events = orders.at_commit(self.of, event, state, ownership)
        return events


LEAVING = told(running(), Notice(5, 2, 120 * S))


def test_when_all_have_prepared_the_commit_brings_the_epoch_and_its_start() -> None:
    prepared = Prepared()
    prepared.look(running())
    prepared.look(LEAVING)
    prepared.look(LEAVING)
    ((number, plan),) = ((each.number, each.plan) for each in prepared.orders)
    assert (plan.epoch, plan.committed) == (2, 0)
    for worker in range(3):
        prepared.answered(worker, number, "plan")
    state = told(LEAVING, *prepared.commit(LEAVING))
    assert (state.phase, state.epoch, state.committed) == (Phase.RUNNING, 2, 0)
    assert state.digests == dict.fromkeys(range(3), "plan")


def test_an_answer_for_a_coordinator_of_before_does_not_count() -> None:
    """Its number is that of the first order of the next coordinator too, but its epoch is not."""
    prepared = Prepared()
    prepared.look(LEAVING)
    (order,) = prepared.orders
    for worker in range(3):
        prepared.answered(worker, order.number, "plan of before", epoch=order.plan.epoch - 1)
    assert prepared.of.digests == {}


def test_two_plans_are_found_out_on_the_short_way_too() -> None:
    prepared = Prepared()
    prepared.look(LEAVING)
    for worker in range(3):
        prepared.answered(worker, 0, f"plan {worker}")
    assert told(LEAVING, *prepared.commit(LEAVING)).phase is Phase.HALTED


def test_an_answer_to_an_earlier_order_counts_for_nothing() -> None:
    prepared = Prepared(grace_ns=0)
    prepared.look(LEAVING)
    for worker in (0, 1):
        prepared.answered(worker, 0, "plan")
    dead = told(LEAVING._replace(shadows=((2,), (0,), (1, 0))), ExitSeen(6, 1, -9))
    failed_over = dead._replace(phase=Phase.RUNNING)
    prepared.look(failed_over)
    assert [(each.number, each.plan.epoch) for each in prepared.orders] == [(0, 2), (1, 3)]
    prepared.answered(0, 1, "plan")
    prepared.answered(2, 0, "plan")  # it had not heard of the death
    (commit,) = prepared.commit(failed_over)
    assert isinstance(commit, StepCommitted) and not commit.waits


def test_what_was_prepared_for_something_else_is_not_taken() -> None:
    prepared = Prepared(grace_ns=0)
    prepared.look(LEAVING)
    for worker in range(3):
        prepared.answered(worker, 0, "plan")
    healed_elsewhere = LEAVING._replace(shadows=((1,), (0,), (0,)))
    assert [type(event) for event in prepared.commit(healed_elsewhere)] == [StepCommitted]


def test_who_has_time_stays_for_one_more_step_and_no_longer() -> None:
    prepared = Prepared()
    prepared.look(LEAVING)
    (commit,) = prepared.commit(LEAVING)
    assert isinstance(commit, StepCommitted) and commit.waits
    later = told(LEAVING, commit)
    assert (later.phase, later.epoch) == (Phase.RUNNING, 1)
    prepared.look(later)
    assert [each.plan.committed for each in prepared.orders] == [0, 1]
    (commit,) = prepared.commit(later)
    assert isinstance(commit, StepCommitted) and not commit.waits


def test_who_has_no_time_does_not_stay() -> None:
    prepared = Prepared(grace_ns=1)
    prepared.look(LEAVING)
    (commit,) = prepared.commit(LEAVING)
    assert isinstance(commit, StepCommitted) and not commit.waits


def test_a_commit_that_changes_nothing_is_decided_alone() -> None:
    prepared, state = Prepared(), running()
    prepared.look(state)
    assert prepared.orders == []
    assert [type(event) for event in prepared.commit(state)] == [StepCommitted]


MUCH = 60 * S  # for steps of a second
STEPPED = LEAVING._replace(steps_ns=(S,))
SHIFTED = ((2, 1), (0, 2), (1, 0))  # worker 0 holds stage 2 as well


def owners_after(prepared: Prepared, state: State) -> tuple[int, ...]:
    """Returns the owners of the epoch that is prepared for the commit of the open step; the present ones if none is."""
    prepared.look(state)
    event = prepared.commit(state)[0]
    assert isinstance(event, StepCommitted)
    return told(state, replace(event, waits=False)).owners


def test_a_leaver_with_much_time_keeps_its_slots_until_the_wanted_owners_are_whole() -> None:
    wanted = told(STEPPED, WantedOwners(5, (0, 1, 0), "a test"))
    assert owners_after(Prepared(MUCH, elastic=True), wanted) == (0, 1, 2), "worker 0 has no replica of its slot yet"
    healed = wanted._replace(shadows=SHIFTED)
    assert owners_after(Prepared(MUCH, elastic=True), healed) == (0, 1, 0)
    assert owners_after(Prepared(MUCH, elastic=True), STEPPED) == (0, 1, 2), "the policy has not been asked yet"


def test_a_leaver_with_little_time_or_no_policy_hands_over_to_its_shadow() -> None:
    wanted = told(STEPPED, WantedOwners(5, (0, 1, 0), "a test"))
    assert owners_after(Prepared(9 * S, elastic=True), wanted) == (0, 1, 1)
    assert owners_after(Prepared(MUCH), wanted) == (0, 1, 1)
    assert owners_after(Prepared(MUCH, elastic=True), wanted._replace(steps_ns=(S, 7 * S))) == (0, 1, 1)
    assert owners_after(Prepared(MUCH, elastic=True), wanted._replace(steps_ns=())) == (0, 1, 1), (
        "steps of unknown time"
    )


def test_no_leaver_is_patient_for_ever() -> None:
    def committed(step: int) -> State:
        return STEPPED._replace(committed=step)

    owners = [owners_after(Prepared(MUCH, elastic=True), committed(step)) for step in range(-1, 6)]
    assert owners == [(0, 1, 2)] * 5 + [(0, 1, 1)] * 2
