"""What a commit will bring is known before it: the same as comes when everybody is asked."""

from __future__ import annotations

from engine.core.ownership import Grid, Ownership
from engine.core.program.inventory import from_json
from engine.core.protocol.events import Notice, StepCommitted
from engine.core.protocol.membership import plan_document, step
from engine.core.protocol.orders import PreparedEpoch, held_at_boundary, prepare_epoch
from engine.core.protocol.state import Phase, State
from engine.core.protocol.verdicts import leavers
from tests.core.membership_cases import S, committed, in_phase, recovered, running, told
from tests.looped import looped

GRID = Grid(3, 4)


def prepared_in(state: State, shadows: tuple[tuple[int, ...], ...] = ()) -> PreparedEpoch | None:
    """Returns what is foreseen in a state, while these shadows vote, or those of the state."""
    return prepare_epoch(state, Ownership(GRID, state.owners, shadows or state.shadows), 7)


def test_a_hand_over_is_foreseen_as_it_comes() -> None:
    state = told(running(), Notice(5, 2, 120 * S))
    prepared = prepared_in(state)
    assert prepared is not None
    assert prepared.events[0] == StepCommitted(7, 1, 0, state.shadows)
    new = step(state, StepCommitted(7, 1, 0))
    assert new.phase is Phase.RECONFIGURING
    new = told(new, *prepared.events[1:])
    assert plan_document(new) == prepared.document
    assert (prepared.document.owners, prepared.document.leaving) == (new.owners, (2,))


def test_everybody_holds_whole_replicas_and_nothing_else() -> None:
    prepared = prepared_in(told(running(), Notice(5, 2, 120 * S)))
    assert prepared is not None
    held = [from_json(text) for _, text in prepared.document.inventories]
    assert [(each.worker, each.step, each.whole) for each in held] == [
        (0, 1, ((0, 0), (0, 1))),
        (1, 1, ((0, 1), (0, 2))),
        (2, 1, ((0, 0), (0, 2))),
    ]
    assert not any((list(each.values), each.logged, any(each.counted.values())) != ([], (), False) for each in held)


def test_that_somebody_leaves_is_foreseen_once_its_replicas_have_healed() -> None:
    state = recovered(committed(told(running(), Notice(5, 2, 120 * S))))
    assert prepared_in(state) is None, "it is the only shadow of stages 0 and 2"
    healed = ((1,), (0,), (0,))
    prepared = prepared_in(state, healed)
    assert prepared is not None
    assert (prepared.document.members, prepared.document.epoch) == ((0, 1), 3)
    assert [worker for worker, _ in prepared.document.inventories] == [0, 1]


@looped("phase", Phase)
def test_nothing_is_foreseen_where_nobody_leaves(phase: Phase) -> None:
    state = in_phase(phase)._replace(leaving=())
    assert prepared_in(state) is None


def test_nothing_is_foreseen_of_the_last_step() -> None:
    assert prepared_in(told(running(last_step=0), Notice(5, 2, 120 * S))) is None


def test_who_may_stay_hands_over_one_step_later() -> None:
    state = told(running(), Notice(5, 2, 120 * S))
    state = step(state, StepCommitted(6, 1, 0, waits=True))
    assert (state.phase, state.epoch, state.committed, leavers(state)) == (Phase.RUNNING, 1, 0, (2,))
    assert committed(state).phase is Phase.RECONFIGURING


def test_a_worker_without_a_slot_holds_nothing() -> None:
    assert held_at_boundary(3, 1, Ownership(GRID, (0, 1, 2))).whole == ()
