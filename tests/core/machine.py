"""A machine that executes programs by what actions do, not by what they require: values, channels and barriers.

It knows nothing of the engine's happens-before rule, so that the two can disagree. A send never blocks; a receive
blocks until its transfer is there; a reduction blocks until the same stage of every pipeline has come to it; a commit
blocks until the gradients of tied stages are reduced, an optimizer step until every slot has committed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from engine.core.action import Action, Op
from engine.core.dry_run import Span
from engine.core.ownership import Ownership
from engine.core.program import Program

State = Literal["ready", "blocked", "illegal"]
Value = tuple[str, int, int, int]  # what it is, pipeline, stage, microbatch
# op -> what it makes, and the stage of the worker at the other end, counted from its own
_TRANSFERS = {
    Op.SEND_F: ("activation", 1),
    Op.RECV_F: ("activation", -1),
    Op.SEND_B: ("gradient", -1),
    Op.RECV_B: ("gradient", 1),
}


def drawn_by(seed: int) -> random.Random:
    """Returns what draws the order of things in a test, the same for the same seed."""
    return random.Random(seed)  # noqa: S311 - nothing here is secret


def no_cost(action: Action) -> int:
    """Costs nothing."""
    return 0


class Machine:
    """Executes one step. With `in_order` a channel hands out transfers in the order of sending, else by their name."""

    def __init__(self, ownership: Ownership, cost: Callable[[Action], int] = no_cost, in_order: bool = True):
        self.ownership = ownership
        self.grid = ownership.grid
        self.cost = cost
        self.in_order = in_order
        self.free_at = dict.fromkeys(ownership.workers(), 0)
        self.held: dict[int, set[Value]] = {worker: set() for worker in ownership.workers()}
        self.channels: dict[tuple[int, int], list[tuple[Value, int]]] = {}
        self.counted: dict[tuple[int, int], int] = dict.fromkeys(self.grid.slots(), 0)
        self.at_barrier: dict[int, dict[int, int]] = {stage: {} for stage in range(self.grid.stages)}
        self.reduced_at: dict[tuple[int, int], int] = {}
        self.committed_at: dict[tuple[int, int], int] = {}
        self.spans: list[Span] = []

    def run(self, program: Program, order: random.Random) -> bool:
        """Executes a program, always going on with a worker drawn by `order`; returns whether it came to its end."""
        cursor = dict.fromkeys(program, 0)
        waiting: set[int] = set()
        while True:
            able = [w for w in program if cursor[w] < len(program[w]) and w not in waiting]
            if not able:
                return not waiting
            worker = order.choice(able)
            action = program[worker][cursor[worker]]
            if action.op is Op.REDUCE_GRAD and action.pipeline not in self.at_barrier[action.stage]:
                self.at_barrier[action.stage][action.pipeline] = self.free_at[worker]
                waiting.clear()
            state = self.state(worker, action)
            if state == "illegal":
                return False
            if state == "blocked":
                waiting.add(worker)
                continue
            self.do(worker, action)
            cursor[worker] += 1
            waiting.clear()

    def state(self, worker: int, action: Action) -> State:
        """Returns whether `worker` may execute the action now, must wait, or lacks what it must itself have made."""
        if action.op in (Op.RECV_F, Op.RECV_B):
            return self._state_of_receive(worker, action)
        legal, ready = self._conditions(worker, action)
        return "illegal" if not legal else "ready" if ready else "blocked"

    def _conditions(self, worker: int, action: Action) -> tuple[bool, bool]:
        held, slot = self.held[worker], (action.pipeline, action.stage)
        last = self.grid.stages - 1
        match action.op:
            case Op.F:
                return action.stage == 0 or _value("activation", action, -1) in held, True
            case Op.B:
                fed = action.stage == last or _value("gradient", action, 1) in held
                return fed and _value("residual", action) in held and self.counted[slot] == action.microbatch, True
            case Op.SEND_F | Op.SEND_B:
                return _value(_TRANSFERS[action.op][0], action) in held, True
            case Op.REDUCE_GRAD:
                complete = len(self.at_barrier[action.stage]) == self.grid.pipelines
                return self.counted[slot] == self.grid.microbatches, complete
            case Op.COMMIT:
                return slot in self.reduced_at, all(each in self.reduced_at for each in self._tied(action))
        return slot in self.committed_at, len(self.committed_at) == len(self.grid.slots())

    def _state_of_receive(self, worker: int, action: Action) -> State:
        what, to = _TRANSFERS[action.op]
        wanted = _value(what, action, to)
        waiting = [value for value, _ in self._channel(self._other_end(action), worker)]
        if self.in_order and waiting and waiting[0] != wanted:
            return "illegal"
        return "ready" if wanted in waiting else "blocked"

    def do(self, worker: int, action: Action) -> None:
        """Executes one action that is ready, and records when it ran."""
        slot = (action.pipeline, action.stage)
        start = max(self.free_at[worker], *self._awaited(worker, action), 0)
        end = start + self.cost(action)
        self.free_at[worker] = end
        self.spans.append(Span(start, end, worker, action))
        match action.op:
            case Op.F:
                self.held[worker] |= {_value("activation", action), _value("residual", action)}
            case Op.B:
                self.held[worker].add(_value("gradient", action))
                self.counted[slot] += 1
            case Op.SEND_F | Op.SEND_B:
                transfer = (_value(_TRANSFERS[action.op][0], action), end)
                self._channel(worker, self._other_end(action)).append(transfer)
            case Op.REDUCE_GRAD:
                self.reduced_at[slot] = end
            case Op.COMMIT:
                self.committed_at[slot] = end

    def _awaited(self, worker: int, action: Action) -> list[int]:
        """Returns the times of what comes from elsewhere; takes a received transfer out of its channel."""
        match action.op:
            case Op.RECV_F | Op.RECV_B:
                what, to = _TRANSFERS[action.op]
                channel = self._channel(self._other_end(action), worker)
                (transfer,) = (each for each in channel if each[0] == _value(what, action, to))
                channel.remove(transfer)
                self.held[worker].add(transfer[0])
                return [transfer[1]]
            case Op.REDUCE_GRAD:
                return list(self.at_barrier[action.stage].values())
            case Op.COMMIT:
                return [self.reduced_at[each] for each in self._tied(action)]
            case Op.STEP:
                return list(self.committed_at.values())
        return []

    def _tied(self, action: Action) -> list[tuple[int, int]]:
        groups = [group for group in self.grid.ties if action.stage in group]
        return [(action.pipeline, stage) for group in groups for stage in group]

    def _other_end(self, action: Action) -> int:
        return self.ownership.owner(action.pipeline, action.stage + _TRANSFERS[action.op][1])

    def _channel(self, source: int, target: int) -> list[tuple[Value, int]]:
        return self.channels.setdefault((source, target), [])


def _value(what: str, action: Action, to: int = 0) -> Value:
    return (what, action.pipeline, action.stage + to, action.microbatch)


def actions_of_step(ownership: Ownership) -> dict[int, list[Action]]:
    """Returns all that each worker must do in a step, in no useful order."""
    grid = ownership.grid
    actions: dict[int, list[Action]] = {worker: [] for worker in ownership.workers()}
    for pipeline, stage in grid.slots():
        worker = ownership.owner(pipeline, stage)
        ops = [Op.F, Op.B]
        for op, (_, to) in _TRANSFERS.items():
            if 0 <= stage + to < grid.stages and ownership.owner(pipeline, stage + to) != worker:
                ops.append(op)
        actions[worker] += [Action(stage, op, each, pipeline) for op in ops for each in range(grid.microbatches)]
        actions[worker] += [Action(stage, op, pipeline=pipeline) for op in (Op.REDUCE_GRAD, Op.COMMIT, Op.STEP)]
    return actions


def random_program(ownership: Ownership, order: random.Random) -> Program:
    """Returns a program of one step whose order is drawn by `order`, made by executing it action by action."""
    machine = Machine(ownership)
    left = actions_of_step(ownership)
    program: dict[int, list[Action]] = {worker: [] for worker in left}
    while any(left.values()):
        worker = order.choice([each for each in left if left[each]])
        # Each barrier is met by all at once: nobody adds anything between coming to it and leaving it.
        drawn = order.sample(left[worker], len(left[worker]))
        action = next((a for a in drawn if _all_come(machine, a) or machine.state(worker, a) == "ready"), None)
        if action is None:
            continue
        together = [(worker, action)]
        if action.op is Op.REDUCE_GRAD:
            pipelines = range(ownership.grid.pipelines)
            together = [
                (ownership.owner(each, action.stage), Action(action.stage, Op.REDUCE_GRAD, pipeline=each))
                for each in pipelines
            ]
            machine.at_barrier[action.stage] = dict.fromkeys(pipelines, 0)
        for owner, each in together:
            machine.do(owner, each)
            program[owner].append(each)
            left[owner].remove(each)
    return {worker: tuple(actions) for worker, actions in program.items()}


def _all_come(machine: Machine, action: Action) -> bool:
    if action.op is not Op.REDUCE_GRAD:
        return False
    counted = [machine.counted[each, action.stage] for each in range(machine.grid.pipelines)]
    return min(counted) == machine.grid.microbatches
