"""Verification of a program before it runs: complete, well ordered, and free of deadlock.

The happens-before rule stands in the table of ops, and the expected actions in `expected_actions`. This module compares
a program with both, and adds the order of transfers: each pair of workers receives in the order of its sends. A shadow
may run forwards of its slot, any number of them from the first on.

The plan of a recovery is verified in the same way. It is the rest of a step and begins with values that workers hold:

    whole step   0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
    plan         0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP               held: residual 0, counter 0 of stage 0
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.action import OP_TABLE, RECEIVE_OPS, SEND_OPS, SHARD_OPS, Action, Op, Program
from engine.core.errors import DeadlockError, InvariantError, ScheduleError
from engine.core.op_row import ALL, WeightForm
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import carried, makes, needs
from engine.core.program.dependency_index import DependencyIndex
from engine.core.program.dry_run import refuse_stuck
from engine.core.program.expected_actions import NO_PEER, Duties, ExpectedActions, expected_actions
from engine.core.value import WIRE, Held, Value


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, and its place."""

    worker: int
    position: int
    action: str
    rule: str

    def __str__(self) -> str:
        place = f", position {self.position}" if self.position >= 0 else ""
        return f"worker {self.worker}{place}: {self.action}: {self.rule}"


def verify(
    program: Program,
    ownership: Ownership,
    healing: Collection[tuple[int, Slot]] = (),
    held: Collection[Held] | None = None,
) -> tuple[Violation, ...]:
    """Returns every rule that the program of a step breaks; an empty tuple means that it runs to its end.

    `healing` are the shadows, as (worker, slot), that get the state of their slot during the step. `held` are the
    values at the start of a plan, which is the rest of a step (of a counter the last index); None for a whole step.
    """
    whole = expected_actions(program, ownership, healing, held)  # the next line ticks off the right ones
    violations = _wrong_actions(program, ownership, whole, Duties(program, ownership, healing, held))
    if not violations and held is not None:
        violations = _unpaired_sends(program)
    if violations:
        return tuple(violations)
    stuck: ScheduleError | None = None
    try:
        refuse_stuck(program, ownership, held or ())
    except ScheduleError as error:
        stuck = error
    missing = _missing_actions(whole)
    if stuck:
        violations = missing + _wrong_order(program, ownership, frozenset(held or ()), name_gaps=not missing)
    violations = violations or missing or _crossed_transfers(program, ownership) + _taken_away(program)
    if stuck and not violations:
        if not isinstance(stuck, DeadlockError):  # every gap is a violation
            raise InvariantError(str(stuck))
        violations = [_of_deadlock(program, stuck)]
    return tuple(violations)


def _of_deadlock(program: Program, error: DeadlockError) -> Violation:
    worker, action = error.cycle[0]
    position = [str(each) for each in program[worker]].index(action)
    return Violation(worker, position, action, str(error))


def _wrong_actions(program: Program, ownership: Ownership, whole: ExpectedActions, duties: Duties) -> list[Violation]:
    violations = []
    for worker, actions in program.items():
        mine = whole.get(worker, {})
        for position, action in enumerate(actions):
            stage, op, microbatch, pipeline = action
            line = mine.get((stage, op, pipeline), {})
            stands = line.get(microbatch)
            if stands is False:
                line[microbatch] = True
                continue
            rule = "stands twice" if stands else duties.why_not(action, worker)
            if rule:
                violations.append(Violation(worker, position, str(action), rule))
            elif op not in SHARD_OPS:  # a step may repeat them
                mine.setdefault((stage, op, pipeline), {})[microbatch] = True
    return violations


def _unpaired_sends(program: Program) -> list[Violation]:
    """In a plan, each value that is sent has one sender and a taker."""
    taken = {carried(action) for actions in program.values() for action in actions if action.op in RECEIVE_OPS}
    sender: dict[Value, int] = {}
    violations = []
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            if action.op in SEND_OPS:
                value = carried(action)
                first = sender.setdefault(value, worker)
                rule = f"is sent by worker {first} too" if first != worker else "" if value in taken else NO_PEER
                if rule:
                    violations.append(Violation(worker, position, str(action), rule))
    return violations


def _missing_actions(whole: ExpectedActions) -> list[Violation]:
    return [
        Violation(worker, -1, str(Action(stage, op, microbatch, pipeline)), "is missing")
        for worker, mine in whole.items()
        for (stage, op, pipeline), line in mine.items()
        for microbatch, stands in line.items()
        if not stands
    ]


def _wrong_order(program: Program, ownership: Ownership, held: Collection[Held], name_gaps: bool) -> list[Violation]:
    """An action stands behind the maker of a value that it needs; with `name_gaps`, every value has a maker."""
    first: dict[Held, tuple[int, int, Action]] = {}  # (position, worker, action) that makes it
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for made in makes(action, worker, ownership):
                first.setdefault(made, (position, worker, action))
    violations = []
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for need in needs(action, worker, ownership):
                if need in held:
                    continue
                made_at, maker, made_by = first.get(need, (-1, worker, action))
                rule = ""
                if made_at >= position and maker == worker:
                    rule = f"stands before {made_by}, which it requires"
                elif need not in first and name_gaps:
                    rule = f"requires {need[1]}, which nobody makes"
                if rule:
                    violations.append(Violation(worker, position, str(action), rule))
    return violations


def _crossed_transfers(program: Program, ownership: Ownership) -> list[Violation]:
    """A worker receives from another in the order of the sends: two transfers of one pair must not cross."""
    numbers = DependencyIndex(program, ownership)
    longest = max(map(len, program.values()))
    sent: dict[int, int] = {}  # number of the value -> sender and position, in one
    received: dict[int, dict[int, int]] = {worker: {} for worker in program}  # worker -> the same number -> position
    for worker, actions in program.items():
        ends = dict.fromkeys(SEND_OPS, (sent, worker * longest)) | dict.fromkeys(RECEIVE_OPS, (received[worker], 0))
        lines: dict[tuple[int, Op, int], tuple[dict[int, int], int, int]] = {}
        for position, (stage, op, microbatch, pipeline) in enumerate(actions):
            if op in ends:
                line = lines.get((stage, op, pipeline))
                if line is None:
                    number = numbers.of((WIRE, carried(actions[position]))) - microbatch
                    line = lines[stage, op, pipeline] = (*ends[op], number)
                places, first, number = line
                places[number + microbatch] = first + position
    violations = []
    for worker, places in received.items():
        last: dict[int, int] = {}
        for number, position in places.items():
            at = sent[number]
            sender = at // longest
            if at < last.get(sender, -1):
                rule = f"crosses an earlier send of worker {sender}"
                violations.append(Violation(worker, position, str(program[worker][position]), rule))
            last[sender] = at
    return violations


# op -> the columns of the table about the place of an action in its worker's list
_PLACES = {
    op: (row.touches, row.closes, WeightForm.WHOLE if row.work else row.finds, row.leaves)
    for op, row in OP_TABLE.items()
    if row.touches or row.closes is not None or row.finds or row.work
}
_AS_READ = {WeightForm.WHOLE: "whole", WeightForm.IN_SHARDS: "in shards"}


def _taken_away(program: Program) -> list[Violation]:
    """An action comes before its replica is closed for it, and finds the weights of its stage in the right form."""
    ops = {action.op for actions in program.values() for action in actions}
    first = WeightForm.IN_SHARDS if ops & SHARD_OPS else None
    violations = []
    for worker, actions in program.items():
        closed: dict[Slot, tuple[int, Action]] = {}  # up to which microbatch, and by which action
        forms: dict[int, WeightForm] = {}  # by stage: a worker gathers one for all pipelines in which it owns it
        for position, action in enumerate(actions):
            stage, op, microbatch, pipeline = action
            place = _PLACES.get(op)
            if place is None:
                continue
            touches, closes, finds, leaves = place
            slot = (pipeline, stage)
            reached = closed[slot][0] if slot in closed else -1
            if touches and reached >= (ALL if microbatch < 0 else microbatch):
                rule = f"comes too late behind {closed[slot][1]}"
                violations.append(Violation(worker, position, str(action), rule))
            if closes is not None and (limit := closes if closes == ALL else microbatch + closes) > reached:
                closed[slot] = (limit, action)
            if first and finds and forms.get(stage, first) is not finds:
                rule = f"finds its stage {_AS_READ[forms.get(stage, first)]}"
                violations.append(Violation(worker, position, str(action), rule))
            if leaves:
                forms[stage] = leaves
    return violations
