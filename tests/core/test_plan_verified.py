"""Plans of recoveries pass the verification of programs, and a spoiled plan does not."""

from __future__ import annotations

from functools import lru_cache

from engine.core.action import STASH_OPS
from engine.core.ownership import Grid, Ownership
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.planner import PlanInput, healing_in, held_at_start, make_plan
from engine.core.program.verify import verify
from engine.core.value import Kind, Value
from tests.core.corruptions import CORRUPTIONS
from tests.core.drawing import program_of
from tests.core.recovery_cases import Failure, Job, hand_overs, random_history, random_job, seeded, single_kills
from tests.looped import looped

# In a plan these may be harmless: what is logged or sent may have been held at the start; `f` leaves no trace.
_MAY_DO_NO_HARM = {"LOG behind COMMIT", "COMMIT at the front", "f in a whole step", "RECV_B at the front"}
# A plan has no stream and no copy to the host; and no W but behind an I that was run before the failure.
_OF_PLANS = sorted(
    kind
    for kind in CORRUPTIONS.keys() - _MAY_DO_NO_HARM
    if not {"STREAM", *STASH_OPS} & {*kind.split()} and kind not in ("F behind I", "I behind W", "RECV_B behind I")
)
_ONE_LEFT = Ownership(Grid(2, 2), (0, 0))
_HELD = Inventory(0, 5, ((0, 0), (0, 1)), {(0, 0): 2}, {(0, 0): 1}, values=ValueRuns((Value(Kind.RESIDUAL, 0, 0, 1),)))
_GIVEN = PlanInput(2, 4, _ONE_LEFT, (_HELD,))
_END = "0REDUCE_GRAD 1REDUCE_GRAD 0LOG 1LOG 0COMMIT 1COMMIT 0STEP 1STEP"
_PLAN = f"0f0 1F0 1B0 0f1 1F1 1B1 0B1 {_END}"


@lru_cache
def _failures() -> list[Failure]:
    """Returns failures of random histories and of schedules with backwards in parts; their plans have been verified."""
    found = list(single_kills(Job(Grid(3, 4), "zb1p")))
    found += [*hand_overs(Job(Grid(3, 2))), *hand_overs(Job(Grid(3, 2), residuals="ship"))]
    for number in range(60):
        order = seeded(number)
        history = random_history(random_job(order), order)
        found += history[1] if history else []
    return found


@looped("kind", _OF_PLANS)
def test_a_spoiled_plan_is_refused(kind: str) -> None:
    order, num_spoiled = seeded(3), 0
    for failure in _failures():
        lines = {worker: list(actions) for worker, actions in failure.plan.program.items()}
        if not any(lines.values()) or not CORRUPTIONS[kind](lines, failure.given.ownership, order):
            continue
        spoiled = {worker: tuple(line) for worker, line in lines.items()}
        if spoiled != dict(failure.plan.program):
            num_spoiled += 1
            given = failure.given
            assert verify(spoiled, given.ownership, healing_in(given), held=held_at_start(given)), (kind, spoiled)
        if num_spoiled == 10:
            break
    assert num_spoiled, f"no plan could be spoiled by {kind}"


def _rules(drawing: str) -> list[str]:
    return [str(each) for each in verify(program_of(f"0: {drawing}"), _ONE_LEFT, held=held_at_start(_GIVEN))]


def test_the_plan_of_the_cases_below_is_right() -> None:
    assert make_plan(_GIVEN).program == program_of(f"0: {_PLAN}")
    assert _rules(_PLAN) == []


@looped(
    ("right", "wrong", "violation"),
    [
        ("0f0", "0F0", "worker 0, position 0: 0F0: counts a microbatch that has been counted"),
        (
            "0B1",
            "0I0 0B0 0B1",
            "worker 0, position 7: 0B0: adds a microbatch that has been added, "
            "or stands beside a backward in another form",
        ),
        ("1F0", "1f0 1F0", "worker 0, position 1: 1f0: runs a forward again that has not been counted"),
        ("1F0 ", "", "worker 0, position -1: 1F0: is missing"),
        ("0f0 ", "0f0 0SEND_F0 ", "worker 0, position 1: 0SEND_F0: there is no other worker at the other end"),
        ("1STEP", "1STEP 0STREAM0", "worker 0, position 15: 0STREAM0: is not part of the rest of the step"),
        ("0f0 ", "", "worker 0, position 0: 1F0: requires activation of stage 0 microbatch 0, which nobody makes"),
    ],
)
def test_a_wrong_plan_names_the_rule(right: str, wrong: str, violation: str) -> None:
    assert violation.replace(", position -1", "") in _rules(_PLAN.replace(right, wrong, 1))


def test_a_value_has_one_sender() -> None:
    both = Ownership(Grid(2, 1), (0, 2))
    activation = Value(Kind.ACTIVATION, 0, 0, 0)
    held = tuple((worker, activation) for worker in (0, 1))
    end = "{0}REDUCE_GRAD {0}LOG {0}COMMIT {0}STEP"
    program = program_of(
        f"""
        0: 0f0 0SEND_F0 0RECV_B0 0B0 {end.format(0)}
        1: 0SEND_F0
        2: 1RECV_F0 1F0 1B0 1SEND_B0 {end.format(1)}
        """
    )
    violations = verify(program, both, held=(*held, (0, Value(Kind.COUNTED, 0, 0, 0))))
    assert [str(each) for each in violations] == ["worker 1, position 0: 0SEND_F0: is sent by worker 0 too"]
