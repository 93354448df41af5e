"""Verification: is the program of a whole step complete, well ordered and free of deadlock, before anything runs.

The happens-before rule itself stands in `requires`. Here stand only completeness (each action exactly once, on the
worker that must run it), the order of transfers between two workers, and what may no longer be done to a replica:
healing is about the step boundary, and what is logged is the last word on the buffers. A shadow may run forwards of its
slot, as many as it likes from the first on; it need not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.dry_run import dry_run
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program import Program
from engine.core.requires import Held, Value, carried, makes, needs

_Whole = Mapping[int, Mapping[Action, None]]  # worker -> its actions of a step, in no useful order
_AT_THE_OWNER_ALONE = frozenset({Op.F, Op.B, Op.I, Op.W, *SEND_OPS, *RECEIVE_OPS, Op.REDUCE_GRAD})


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


def verify(program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> tuple[Violation, ...]:
    """Returns every rule that the program of a step breaks; an empty tuple means that it runs to its end.

    `healing` are the shadows, as (worker, slot), that get the state of their slot during the step.
    """
    whole = _whole_step(program, ownership, healing)
    violations = _wrong_actions(program, ownership, whole, healing)
    if violations:
        return tuple(violations)
    stuck: ScheduleError | None = None
    try:
        dry_run(program, ownership)
    except ScheduleError as error:
        stuck = error
    missing = _missing_actions(program, whole)
    if stuck:
        violations = missing + _wrong_order(program, ownership, name_gaps=not missing)
    violations = violations or missing or _crossed_transfers(program) + _too_late(program)
    if stuck and not violations:
        assert isinstance(stuck, DeadlockError), stuck  # every gap is a violation
        violations = [_of_deadlock(program, stuck)]
    return tuple(violations)


def _of_deadlock(program: Program, error: DeadlockError) -> Violation:
    worker, action = error.cycle[0]
    position = [str(each) for each in program[worker]].index(action)
    return Violation(worker, position, action, str(error))


def _whole_step(program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]]) -> _Whole:
    """Returns every action that a step must have, by the worker that must run it.

    Of a backward it has the whole, or both parts where the owner has one of them and not the whole.
    """
    whole: dict[int, dict[Action, None]] = {worker: {} for worker in ownership.workers()}
    for pipeline, stage in ownership.grid.slots():
        owner = ownership.owner(pipeline, stage)
        mine = whole[owner]
        for op in _per_microbatch(pipeline, stage, ownership):
            mine |= {Action(stage, op, each, pipeline): None for each in range(ownership.grid.microbatches)}
        if ownership.pipelines_of(owner, stage)[0] == pipeline:
            mine[Action(stage, Op.REDUCE_GRAD, pipeline=pipeline)] = None
        for replica in ownership.replicas(pipeline, stage):
            for op in (Op.LOG, Op.COMMIT, Op.STEP):
                whole[replica][Action(stage, op, pipeline=pipeline)] = None
    for worker, (pipeline, stage) in sorted(healing):
        for each in (worker, ownership.owner(pipeline, stage)):
            whole[each][Action(stage, Op.HEAL, pipeline=pipeline)] = None
    for worker, actions in program.items():
        _split(whole.get(worker, {}), actions)
    return whole


def _split(mine: dict[Action, None], actions: tuple[Action, ...]) -> None:
    present = frozenset(actions)
    for action in actions:
        if action.op in (Op.I, Op.W):
            back = action._replace(op=Op.B)
            if back in mine and back not in present:
                del mine[back]
                mine |= {back._replace(op=op): None for op in (Op.I, Op.W)}


def _per_microbatch(pipeline: int, stage: int, ownership: Ownership) -> Iterator[Op]:
    yield from (Op.F, Op.B)
    owner = ownership.owner(pipeline, stage)
    if stage > 0 and ownership.owner(pipeline, stage - 1) != owner:
        yield from (Op.RECV_F, Op.SEND_B)
    if stage < ownership.grid.stages - 1 and ownership.owner(pipeline, stage + 1) != owner:
        yield from (Op.SEND_F, Op.RECV_B)


def _wrong_actions(
    program: Program, ownership: Ownership, whole: _Whole, healing: Collection[tuple[int, Slot]]
) -> list[Violation]:
    violations = []
    for worker, actions in program.items():
        known, seen = whole.get(worker, {}), set()
        for position, action in enumerate(actions):
            rule = "" if action in known else _why_unknown(action, worker, ownership, healing)
            if not rule and action in seen:
                rule = "stands twice"
            if rule:
                violations.append(Violation(worker, position, str(action), rule))
            seen.add(action)
    return violations


def _why_unknown(action: Action, worker: int, ownership: Ownership, healing: Collection[tuple[int, Slot]]) -> str:
    """Returns what is wrong with an action that a step need not have there; nothing for a shadow's forward."""
    stage, op, _, pipeline = action
    grid = ownership.grid
    if not _is_inside(action, grid):
        return f"outside the grid of {grid.pipelines} x {grid.stages} slots and {grid.microbatches} microbatches"
    if op is Op.REDO_F:
        return "no part of a whole step"
    owner = ownership.owner(pipeline, stage)
    shadows = ownership.shadows_of(pipeline, stage)
    if op is Op.F and worker in shadows:
        return "has no whole replica of its slot yet" if (worker, (pipeline, stage)) in healing else ""
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


def _is_inside(action: Action, grid: Grid) -> bool:
    return action.stage < grid.stages and action.pipeline < grid.pipelines and action.microbatch < grid.microbatches


def _missing_actions(program: Program, whole: _Whole) -> list[Violation]:
    present = {worker: set(program.get(worker, ())) for worker in whole}
    return [
        Violation(worker, -1, str(action), "is missing")
        for worker, actions in whole.items()
        for action in actions
        if action not in present[worker]
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


def _crossed_transfers(program: Program) -> list[Violation]:
    """A worker takes what another sent it in the order of sending: two transfers of one pair must not cross."""
    sent: dict[Value, tuple[int, int]] = {
        carried(action): (worker, position)
        for worker, actions in program.items()
        for position, action in enumerate(actions)
        if action.op in SEND_OPS
    }
    violations = []
    for worker, actions in program.items():
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            if action.op not in RECEIVE_OPS:
                continue
            sender, sent_at = sent[carried(action)]
            if sent_at < last.get(sender, -1):
                violations.append(
                    Violation(worker, position, str(action), f"crosses an earlier send of worker {sender}")
                )
            last[sender] = sent_at
    return violations


# Whatever a worker does of this with one replica, it does in this order.
_RANKS = {Op.HEAL: 0, Op.F: 1, Op.LOG: 2}


def _too_late(program: Program) -> list[Violation]:
    violations = []
    for worker, actions in program.items():
        behind: dict[Slot, Action] = {}
        for position, action in enumerate(actions):
            if action.op in _RANKS:
                before = behind.setdefault((action.pipeline, action.stage), action)
                if _RANKS[before.op] > _RANKS[action.op]:
                    violations.append(Violation(worker, position, str(action), f"comes too late behind {before}"))
                else:
                    behind[action.pipeline, action.stage] = action
    return violations
