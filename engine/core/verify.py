"""Verification: is a program whole, well ordered and free of deadlock, before anything runs.

The happens-before rule itself stands in `requires`; here stand only completeness (each action exactly once, on its
owner) and the order of transfers between two workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.dry_run import dry_run
from engine.core.errors import DeadlockError
from engine.core.ownership import Ownership
from engine.core.program import Program
from engine.core.requires import requires


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


def verify(program: Program, ownership: Ownership) -> tuple[Violation, ...]:
    """Returns every rule that the program of a step breaks; an empty tuple means that it runs to its end."""
    whole = _whole_step(ownership)
    violations = _wrong_actions(program, ownership, whole)
    if not violations:
        violations = _missing_actions(program, whole) + _wrong_order(program, ownership)
    if not violations:
        violations = _crossed_transfers(program, ownership)
    if not violations:
        try:
            dry_run(program, ownership)
        except DeadlockError as error:
            violations = [_of_deadlock(program, error)]
    return tuple(violations)


def _of_deadlock(program: Program, error: DeadlockError) -> Violation:
    worker, action = error.cycle[0]
    position = [str(each) for each in program[worker]].index(action)
    return Violation(worker, position, action, str(error))


def _whole_step(ownership: Ownership) -> dict[int, list[Action]]:
    """Returns every action that a step has, by the worker that must run it."""
    grid = ownership.grid
    whole: dict[int, list[Action]] = {worker: [] for worker in ownership.workers()}
    for pipeline, stage in grid.slots():
        worker = ownership.owner(pipeline, stage)
        per_microbatch = [Op.F, Op.B]
        if stage > 0 and ownership.owner(pipeline, stage - 1) != worker:
            per_microbatch += [Op.RECV_F, Op.SEND_B]
        if stage < grid.stages - 1 and ownership.owner(pipeline, stage + 1) != worker:
            per_microbatch += [Op.SEND_F, Op.RECV_B]
        whole[worker] += [
            Action(stage, op, each, pipeline) for op in per_microbatch for each in range(grid.microbatches)
        ]
        whole[worker] += [Action(stage, op, pipeline=pipeline) for op in (Op.REDUCE_GRAD, Op.COMMIT, Op.STEP)]
    return whole


def _wrong_actions(program: Program, ownership: Ownership, whole: Mapping[int, list[Action]]) -> list[Violation]:
    grid = ownership.grid
    violations = []
    for worker, actions in program.items():
        known, seen = set(whole.get(worker, ())), set()
        for position, action in enumerate(actions):
            rule = ""
            if (
                action.stage >= grid.stages
                or action.pipeline >= grid.pipelines
                or action.microbatch >= grid.microbatches
            ):
                rule = (
                    f"outside the grid of {grid.pipelines} x {grid.stages} slots and {grid.microbatches} microbatches"
                )
            elif ownership.owner(action.pipeline, action.stage) != worker:
                rule = f"belongs to worker {ownership.owner(action.pipeline, action.stage)}, the owner of its slot"
            elif action not in known:
                rule = "there is no other worker at the other end"
            elif action in seen:
                rule = "stands twice"
            if rule:
                violations.append(Violation(worker, position, str(action), rule))
            seen.add(action)
    return violations


def _missing_actions(program: Program, whole: Mapping[int, list[Action]]) -> list[Violation]:
    present = {worker: set(program.get(worker, ())) for worker in whole}
    return [
        Violation(worker, -1, str(action), "is missing")
        for worker, actions in whole.items()
        for action in actions
        if action not in present[worker]
    ]


def _wrong_order(program: Program, ownership: Ownership) -> list[Violation]:
    violations = []
    for worker, actions in program.items():
        place = {action: position for position, action in enumerate(actions)}
        for position, action in enumerate(actions):
            for where, need in requires(action, worker, ownership):
                if where == worker and place.get(need, -1) > position:
                    violations.append(
                        Violation(worker, position, str(action), f"stands before {need}, which it requires")
                    )
    return violations


def _crossed_transfers(program: Program, ownership: Ownership) -> list[Violation]:
    """A worker takes what another sent it in the order of sending: two transfers of one pair must not cross."""
    sent: dict[int, dict[Action, int]] = {
        worker: {action: position for position, action in enumerate(actions) if action.op in SEND_OPS}
        for worker, actions in program.items()
    }
    violations = []
    for worker, actions in program.items():
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            if action.op not in RECEIVE_OPS:
                continue
            ((sender, send),) = requires(action, worker, ownership)
            sent_at = sent[sender][send]
            if sent_at < last.get(sender, -1):
                violations.append(
                    Violation(worker, position, str(action), f"crosses an earlier send of worker {sender}")
                )
            last[sender] = sent_at
    return violations
