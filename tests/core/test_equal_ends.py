"""Exceptions and equal ends: which are deaths like any other, and which come from the user's code."""

from __future__ import annotations

import pytest

from engine.codec.documents import documents, resume
from engine.core.errors import WorkerException
from engine.core.messages import RaisedMessage
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.inputs_outputs import Place, ProcessExit, Stop
from engine.core.protocol.orders import survives
from tests.core.coordinator_cases import answers, given, training
from tests.looped import looped

SHADOWED, ALONE = training(), training(redundant=False)


def words(error: str = "RuntimeError: planted", step: int = 3) -> RaisedMessage:
    return RaisedMessage(7, step, WorkerException(error, "layer 2 (fc2)", "mine.py", 31, "forward"))


def test_a_worker_that_raises_is_dead_if_another_can_take_over() -> None:
    assert survives(SHADOWED, 1, words())[1]
    assert not survives(ALONE, 1, words())[1]


def test_no_exception_ends_a_run_that_has_committed_every_step() -> None:
    """A mistake in the validation after the last step made a failed run of a finished one."""
    over = ALONE._replace(membership=ALONE.membership._replace(committed=ALONE.membership.last_step))
    over, goes_on = survives(over, 1, words())
    assert goes_on
    assert survives(over, 0, words())[1]


def test_the_same_error_in_the_same_step_is_the_models_own() -> None:
    state, _ = survives(SHADOWED, 1, words())
    assert survives(state, 0, words(step=4))[1]
    assert survives(state, 0, words("RuntimeError: another"))[1]
    assert not survives(state, 0, words())[1]


def of_gpu(gpu: str, error: str = "RuntimeError: x") -> RaisedMessage:
    return RaisedMessage(7, 3, WorkerException(error, gpu=gpu))


def inherits(state: CoordinatorState, heir: int, slot: int) -> CoordinatorState:
    """Returns the state after the verdict that gives a slot to an heir."""
    owners = tuple(heir if each == slot else owner for each, owner in enumerate(state.membership.owners))
    return state._replace(membership=state.membership._replace(owners=owners))


def test_an_error_of_a_gpu_is_a_loss_like_any_death() -> None:
    lost = of_gpu("GPU error: device-side assert triggered")
    state, goes_on = survives(ALONE, 1, lost)
    assert goes_on
    assert state.raised[1].words == "ended with GPU error: device-side assert triggered"
    assert not survives(inherits(state, 0, 1), 0, lost)[1], "the same one of an heir comes from a kernel of the model"
    assert survives(inherits(state, 0, 1), 0, of_gpu("GPU error: invalid argument"))[1]


@pytest.mark.parametrize("trouble", ["GPU error: unspecified launch failure", "GPU out of memory: tried to allocate"])
def test_several_gpus_that_fail_alike_in_one_step_are_no_mistake_of_the_users_code(trouble: str) -> None:
    """A switch, a driver or a neighbour on the host takes several GPUs at once; none of them inherits from another."""
    state, _ = survives(SHADOWED, 2, of_gpu(trouble, "a"))
    assert survives(state, 0, of_gpu(trouble, "b"))[1]
    kept = resume(state.job, documents(state), 0)
    assert kept.raised == state.raised
    assert not survives(inherits(kept, 1, 2), 1, of_gpu(trouble, "b"))[1], "an heir that fails with the same slot"


def test_a_fault_that_is_injected_into_several_gpus_is_never_the_users_code() -> None:
    planted = of_gpu("GPU error, injected by fault 'gpu': device-side assert triggered")
    state, _ = survives(SHADOWED, 2, planted)
    assert survives(inherits(state, 1, 2), 1, planted)[1]


def test_a_job_that_does_not_fit_into_its_gpus_ends_with_the_second_of_them() -> None:
    """Each heir would hold more, and run out of memory in its turn; the sizes differ."""
    assert not survives(ALONE, 1, of_gpu("GPU out of memory: tried to allocate 2.00 GiB"))[1]
    state, goes_on = survives(SHADOWED, 1, of_gpu("GPU out of memory: tried to allocate 2.00 GiB", "a"))
    assert goes_on
    assert not survives(inherits(state, 0, 1), 0, of_gpu("GPU out of memory: tried to allocate 512.00 MiB", "b"))[1]


def end_of_two(code: int, first: Place, second: Place) -> Stop | None:
    """Returns the end of the run after two workers have exited, one after the recovery from the other."""
    state, _ = given(SHADOWED, ProcessExit(7, 0, code, first))
    state, _ = given(state, *answers(state))
    _, outputs = given(state, ProcessExit(9, 1, code, second))
    return next((each for each in outputs if isinstance(each, Stop)), None)


def test_two_equal_ends_in_one_action_come_from_the_users_code() -> None:
    stop = end_of_two(3, Place(0, "1F2"), Place(0, "1F2"))
    assert stop is not None
    assert (stop.stage, stop.exit_code) == (1, None)
    assert stop.text.startswith("worker 1 exited with code 3 in 1F2 of step 0, as worker 0 did: it comes from")


@looped(
    ("code", "first", "second"),
    [
        (-9, Place(0, "1F2"), Place(0, "1F2")),
        (3, Place(0, "1F2"), Place(0, "1F3")),
        (3, Place(0, "1F2"), Place(1, "1F2")),
        (3, Place(0, "1SEND_F2"), Place(0, "1SEND_F2")),
        (3, Place(0, ""), Place(0, "")),
        (3, Place(0, "1F2", is_struck=True), Place(0, "1F2")),
    ],
)
def test_other_ends_do_not(code: int, first: Place, second: Place) -> None:
    stop = end_of_two(code, first, second)
    assert stop is None or "user's code" not in stop.text
