"""Every sample counted once: by the worker whose gradient was committed, whatever others did before they died."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import OP_TABLE, Op
from engine.core.checks import samples
from engine.core.checks.samples import SampleEffect
from engine.core.errors import InvariantError
from engine.core.job.job import Job
from tests.core.made_records import made_history

JOB = Job(stages=2, pipelines=1, microbatches=2, steps=2)
Event = dict[str, Any]


def miscounted(events: Iterable[Event], job: Job) -> list[str]:
    return samples.miscounted(made_history(events), job)


def did(worker: int, step: int, *actions: str, from_ns: int = 0, epoch: int = 1) -> list[Event]:
    words = {"event": "action", "worker": worker, "step": step, "epoch": epoch}
    return [words | {"action": action, "end_ns": from_ns + number} for number, action in enumerate(actions)]


def whole(worker: int, step: int, stage: int, from_ns: int = 0) -> list[Event]:
    """Everything that the owner of a stage does in a step."""
    actions = [f"{stage}{op}{microbatch}" for op in "FB" for microbatch in range(2)]
    return did(worker, step, *actions, f"{stage}LOG", f"{stage}STEP", from_ns=from_ns)


def commit(step: int) -> Event:
    return {"event": "commit", "step": step}


def out(worker: int, at_ns: int) -> Event:
    return {"event": "epoch", "verdict": [[worker, "died"]], "at_ns": at_ns}


def steps(*events: Event) -> Iterator[Event]:
    """Stage 0 as it should be, and stage 1 as given, in step 0."""
    yield from whole(0, 0, 0)
    yield from events
    yield commit(0)


def test_a_step_without_failures_counts_everything_once() -> None:
    assert miscounted(steps(*whole(1, 0, 1)), JOB) == []


def test_what_was_not_committed_is_not_looked_at() -> None:
    assert miscounted([*steps(*whole(1, 0, 1)), *did(0, 1, "0F0", "0F0")], JOB) == []


def test_the_owner_before_does_not_count() -> None:
    assert miscounted(steps(*did(1, 0, "1F0", "1B0"), out(1, 10), *whole(0, 0, 1, from_ns=20)), JOB) == []


def test_the_dead_count_where_their_gradient_had_been_logged() -> None:
    assert miscounted(steps(*whole(1, 0, 1), out(1, 10), *did(0, 0, "1LOG", "1STEP", from_ns=20)), JOB) == []


def test_forwards_of_the_shadow_before_it_took_over_count_once() -> None:
    eager = did(0, 0, "1F0", from_ns=1)
    heir = did(0, 0, "1f0", "1B0", "1F1", "1B1", from_ns=20)
    assert miscounted(steps(*did(1, 0, "1F0"), *eager, out(1, 10), *heir), JOB) == []


def test_backwards_for_the_input_only_do_not_count() -> None:
    extra = did(0, 0, "1I0", "1I0", from_ns=50)
    assert miscounted(steps(*whole(0, 0, 1), *extra), JOB) == []


def test_twice_and_never_are_found() -> None:
    assert miscounted(steps(*whole(1, 0, 1), *did(1, 0, "1B0", from_ns=30)), JOB) == [
        "step 0: worker 1 counted the backward of microbatch 0 of stage 1 2 times"
    ]
    assert miscounted(steps(*did(1, 0, "1F0", "1F1", "1F1", "1B0")), JOB) == [
        "step 0: worker 1 counted the forward of microbatch 1 of stage 1 2 times",
        "step 0: worker 1 counted the backward of microbatch 1 of stage 1 0 times",
    ]
    assert miscounted(steps(), JOB) == ["step 0: no worker ran a backward of stage 1"]


def test_an_heir_that_goes_on_where_the_dead_were_is_found() -> None:
    """The accumulator of the dead is gone: whoever only adds the rest commits half a gradient."""
    rest = did(0, 0, "1F1", "1B1", from_ns=20)
    found = miscounted(steps(*did(1, 0, "1F0", "1B0"), out(1, 10), *rest), JOB)
    assert "step 0: worker 0 counted the backward of microbatch 0 of stage 1 0 times" in found


def test_a_zombie_counts_nothing_after_its_verdict() -> None:
    zombie = did(1, 0, "1B0", "1B1", from_ns=90)
    assert miscounted(steps(out(1, 10), *whole(0, 0, 1, from_ns=20), *zombie), JOB) == []
    assert miscounted(steps(*whole(0, 0, 1, from_ns=20), *zombie), JOB) != []


def test_what_came_with_a_stream_counts_once() -> None:
    streaming = replace(JOB, log_every=1)
    dead, rest = did(1, 0, "1F0", "1B0"), did(0, 0, "1F1", "1B1", from_ns=20)
    assert miscounted(steps(*dead, out(1, 10), *rest), streaming) == []
    early = did(0, 0, "1F0", from_ns=1)  # of an eager shadow
    assert miscounted(steps(*dead, *early, out(1, 10), *rest), streaming) == []
    never = miscounted(steps(*did(1, 0, "1F0"), out(1, 10), *rest), streaming)
    assert never[0] == "step 0: worker 0 counted the forward of microbatch 0 of stage 1 0 times"
    three = replace(JOB, log_every=2, microbatches=3)  # nothing is streamed behind the first
    zero = did(0, 0, "0F2", "0B2", from_ns=40)
    assert miscounted([*zero, *steps(*dead, out(1, 10), *rest, *did(0, 0, "1F2", "1B2", from_ns=50))], three) != []


GAVE = did(1, 0, "1F0", "1F1", "1B0")  # the leaver of a hand-over inside the step


def taken(*actions: str, from_ns: int = 20) -> list[Event]:
    """What the next owner does in the epoch of a hand-over."""
    return did(0, 0, *actions, from_ns=from_ns, epoch=2)


def given(*actions: str, from_ns: int = 15) -> list[Event]:
    return did(1, 0, *actions, from_ns=from_ns, epoch=2)


def test_what_was_handed_over_inside_a_step_counts_once() -> None:
    """Before, this correct step was told as `worker 0 counted the forward of microbatch 0 of stage 1 0 times`."""
    rest = taken("1HAND0", "1F1", "1B1")
    assert miscounted(steps(*GAVE, *given("1HAND0"), *rest), JOB) == []
    assert miscounted(steps(*GAVE, *given("1HAND0", from_ns=50), *rest, out(1, 60)), JOB) == []
    assert miscounted(steps(*GAVE, *given("1B1", "1HAND1"), *taken("1HAND1")), JOB) == []


def test_what_the_fence_took_has_no_record_of_its_own() -> None:
    rest = did(0, 0, "1F1", "1B1", from_ns=20, epoch=3)
    assert miscounted(steps(*GAVE, *given("1HAND0"), *rest), JOB) == []
    assert miscounted(steps(*GAVE, *rest), JOB) != [], "nothing was sent"


def test_a_hand_over_that_is_handed_on_counts_once() -> None:
    job = replace(JOB, microbatches=3, stages=1)
    first, second = did(0, 0, "0F0", "0B0"), did(1, 0, "0HAND0", "0F1", "0B1", from_ns=20, epoch=2)
    last = did(2, 0, "0HAND1", "0F2", "0B2", from_ns=30, epoch=3)
    assert miscounted([*first, *did(0, 0, "0HAND0", epoch=2), *second, *last, commit(0)], job) == []
    assert len(miscounted([*first, *last, commit(0)], job)) == 4


def test_what_was_handed_over_and_is_run_again_is_found() -> None:
    again = taken("1HAND0", "1F0", "1B0", "1F1", "1B1")
    assert miscounted(steps(*GAVE, *given("1HAND0"), *again), JOB) == [
        "step 0: worker 0 counted the forward of microbatch 0 of stage 1 2 times",
        "step 0: worker 0 counted the backward of microbatch 0 of stage 1 2 times",
    ]


def test_a_backward_that_was_not_handed_over_is_found() -> None:
    """The next owner goes on behind a microbatch that the sum of the leaver has not, or has twice."""
    lost = miscounted(steps(*did(1, 0, "1F0", "1F1"), *given("1HAND0"), *taken("1HAND0", "1F1", "1B1")), JOB)
    assert "step 0: worker 0 counted the backward of microbatch 0 of stage 1 0 times" in lost
    twice = miscounted(steps(*GAVE, *did(1, 0, "1B0", from_ns=4), *taken("1HAND0", "1F1", "1B1")), JOB)
    assert "step 0: worker 0 counted the backward of microbatch 0 of stage 1 0 times" in twice


def test_a_forward_whose_residual_is_sent_counts_where_it_arrives() -> None:
    sent = given("1HAND0", "1SHIP1")
    assert miscounted(steps(*did(1, 0, "1F0", "1F1", "1B0"), *sent, *taken("1HAND0", "1SHIP1", "1B1")), JOB) == []
    missing = miscounted(steps(*did(1, 0, "1F0", "1B0"), *sent, *taken("1HAND0", "1SHIP1", "1B1")), JOB)
    assert missing == ["step 0: worker 0 counted the forward of microbatch 1 of stage 1 0 times"]


def test_every_op_of_the_table_has_its_rule() -> None:
    """An op that makes sums is to be named here; one that makes them in a new way has no rule, and cannot be loaded."""
    carriers = {Op.STREAM: SampleEffect.CARRIES, Op.HAND: SampleEffect.CARRIES, Op.SHIP: SampleEffect.BRINGS}
    expected = carriers | {Op.F: SampleEffect.COUNTS, Op.B: SampleEffect.ADDS, Op.W: SampleEffect.ADDS}
    assert samples.EFFECTS == dict.fromkeys(OP_TABLE, SampleEffect.NONE) | expected
    both = replace(OP_TABLE[Op.F], makes=(*OP_TABLE[Op.F].makes, *OP_TABLE[Op.B].makes))
    with pytest.raises(InvariantError, match="no rule counts the samples of an op like 'forward'"):
        samples.effect_of(both)
