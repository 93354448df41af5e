"""Verification: is the program of a whole step complete, well ordered and free of deadlock, before anything runs.

The happens-before rule itself stands in `requires`. Here stand only completeness (each action exactly once, on the
worker that must run it), the order of transfers between two workers, and what may no longer be done to a replica:
healing is about the step boundary, and what is logged is the last word on the buffers. A shadow may run forwards of its
slot, as many as it likes from the first on; it need not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.core.action import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, SHARD_OPS, Action, Op
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Ownership, Slot
from engine.core.program.build import Program
from engine.core.program.dependencies import WIRE, Held, carried, makes, needs
from engine.core.program.dependency_index import Numbers
from engine.core.program.dry_run import refuse_stuck
from engine.core.program.expected_actions import Whole, is_inside, whole_step

_AT_THE_OWNER_ALONE = frozenset({Op.F, Op.B, Op.I, Op.W, *SEND_OPS, *RECEIVE_OPS, *SHARD_OPS, Op.REDUCE_GRAD})


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, and where."""

    worker: int
    position: int
    action: str
    rule: str

    def __str__(self) -> str:
        place = f", position {self.position}" if self.position >= 0 else ""
        return f"worker {self.worker}{place}: {self.action}: {self.rule}"


def verify(
    program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]] = (), blocking: bool = False
) -> tuple[Violation, ...]:
    """Returns every rule that the program of a step breaks; an empty tuple means that it runs to its end.

    `healing` are the shadows, as (worker, slot), that get the state of their slot during the step. With `blocking` a
    SEND ends only when its receive has begun.
    """
    whole = whole_step(program, ownership, healing)
    violations = _wrong_actions(program, ownership, whole, healing)  # ticks off those that are right
    if violations:
        return tuple(violations)
    stuck: ScheduleError | None = None
    try:
        refuse_stuck(program, ownership, blocking=blocking)
    except ScheduleError as error:
        stuck = error
    missing = _missing_actions(whole)
    if stuck:
        violations = missing + _wrong_order(program, ownership, name_gaps=not missing)
    ops = frozenset(action.op for actions in program.values() for action in actions)
    violations = violations or missing or _crossed_transfers(program, ownership) + _too_late(program)
    if not violations and Op.STREAM in ops:
        violations = _overtaken(program)
    if not violations and ops & SHARD_OPS:
        violations = _in_shards(program)
    if stuck and not violations:
        assert isinstance(stuck, DeadlockError), stuck  # every gap is a violation
        violations = [_of_deadlock(program, stuck)]
    return tuple(violations)


def _of_deadlock(program: Program, error: DeadlockError) -> Violation:
    worker, action = error.cycle[0]
    position = [str(each) for each in program[worker]].index(action)
    return Violation(worker, position, action, str(error))


def _wrong_actions(
    program: Program, ownership: Ownership, whole: Whole, healing: Collection[tuple[int, Slot]]
) -> list[Violation]:
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
            rule = "stands twice" if stands else _why_unknown(action, worker, ownership, healing)
            if rule:
                violations.append(Violation(worker, position, str(action), rule))
            elif op not in SHARD_OPS:  # which come again and again
                mine.setdefault((stage, op, pipeline), {})[microbatch] = True
    return violations


def _why_unknown(action: Action, worker: int, ownership: Ownership, healing: Collection[tuple[int, Slot]]) -> str:
    """Returns what is wrong with an action that a step need not have there; nothing for a shadow's forward."""
    stage, op, _, pipeline = action
    grid = ownership.grid
    if not is_inside(action, grid):
        return f"outside the grid of {grid.pipelines} x {grid.stages} slots and {grid.microbatches} microbatches"
    if op is Op.REDO_F:
        return "no part of a whole step"
    owner = ownership.owner(pipeline, stage)
    shadows = ownership.shadows_of(pipeline, stage)
    if op in (Op.F, Op.STREAM) and (worker, (pipeline, stage)) in healing:
        return "has no whole replica of its slot yet"
    if (op is Op.F and worker in shadows) or (op in SHARD_OPS and worker == owner):
        return ""
    if worker != owner and (worker not in shadows or op in _AT_THE_OWNER_ALONE):
        return f"belongs to worker {owner}, the owner of its slot"
    return _WHY_NOT_AT_THE_OWNER.get(op, "there is no other worker at the other end")


_IN_ANOTHER_FORM = "stands beside a backward of this microbatch in another form"
_WHY_NOT_AT_THE_OWNER = {
    Op.B: _IN_ANOTHER_FORM,
    Op.I: _IN_ANOTHER_FORM,
    Op.W: _IN_ANOTHER_FORM,
    Op.REDUCE_GRAD: "the worker reduces this stage with the first of its pipelines",
    Op.HEAL: "heals nobody",
}


def _missing_actions(whole: Whole) -> list[Violation]:
    return [
        Violation(worker, -1, str(Action(stage, op, microbatch, pipeline)), "is missing")
        for worker, mine in whole.items()
        for (stage, op, pipeline), line in mine.items()
        for microbatch, stands in line.items()
        if not stands
    ]


def _wrong_order(program: Program, ownership: Ownership, name_gaps: bool) -> list[Violation]:
    """An action stands behind what it needs at its own worker; with `name_gaps`, somebody makes what it needs."""
    first: dict[Held, tuple[int, int, Action]] = {}  # (position, worker, action) that makes it
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for made in makes(action, worker, ownership):
                first.setdefault(made, (position, worker, action))
    violations = []
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for need in needs(action, worker, ownership):
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
    """A worker takes what another sent it in the order of sending: two transfers of one pair must not cross."""
    numbers = Numbers(program, ownership)
    longest = max(map(len, program.values()))
    sent: dict[int, int] = {}  # number of what is carried -> sender and position, in one
    received: dict[int, dict[int, int]] = {worker: {} for worker in program}  # worker -> the same number -> position
    for worker, actions in program.items():
        ends = {Op.SEND_F: (sent, worker * longest), Op.SEND_B: (sent, worker * longest)}
        ends |= {Op.RECV_F: (received[worker], 0), Op.RECV_B: (received[worker], 0)}
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


# A worker does this with a replica before what is logged of it.
_BEFORE_LOG = (Op.HEAL, Op.F, Op.STREAM)


def _too_late(program: Program) -> list[Violation]:
    violations = []
    for worker, actions in program.items():
        logged: dict[Slot, Action] = {}
        for position, action in enumerate(actions):
            slot = (action.pipeline, action.stage)
            if action.op is Op.LOG:
                logged[slot] = action
            elif slot in logged and action.op in _BEFORE_LOG:
                violations.append(Violation(worker, position, str(action), f"comes too late behind {logged[slot]}"))
    return violations


def _overtaken(program: Program) -> list[Violation]:
    """What is streamed holds just the microbatches so far, and brings a replica to where it then is."""
    violations = []
    for worker, actions in program.items():
        past: dict[Slot, tuple[int, Action]] = {}  # the last microbatch that has gone by, and what took it along
        for position, action in enumerate(actions):
            slot = (action.pipeline, action.stage)
            reached, by = past.get(slot, (-1, action))
            if action.op in (Op.F, Op.STREAM) and action.microbatch <= reached:
                violations.append(Violation(worker, position, str(action), f"comes too late behind {by}"))
            if action.op is Op.STREAM:
                past[slot] = (action.microbatch, action)
            elif action.op in (Op.B, Op.W):
                past[slot] = (max(reached, action.microbatch - 1), action)
    return violations


def _in_shards(program: Program) -> list[Violation]:
    """Where stages are in shards, a compute action finds its own whole, and an optimizer step finds it in shards."""
    violations = []
    for worker, actions in program.items():
        whole: set[Slot] = set()
        for position, action in enumerate(actions):
            slot = (action.pipeline, action.stage)
            rule = ""
            if action.op in (Op.UNSHARD, Op.STEP) and slot in whole:
                rule = "finds its stage whole"
            elif action.op in COMPUTE_OPS | {Op.RESHARD} and slot not in whole:
                rule = "finds its stage in shards"
            if rule:
                violations.append(Violation(worker, position, str(action), rule))
            if action.op in SHARD_OPS:
                (whole.add if action.op is Op.UNSHARD else whole.discard)(slot)
    return violations
