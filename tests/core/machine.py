"""A machine that executes programs with values, channels and barriers: an oracle for the happens-before rule.

It shares no code with the engine's rule, so that the two can disagree. Its rules:
- A send never blocks. A receive blocks until its transfer arrives, `latency` after the send.
- A reduction blocks until all owners of the stage have reached it.
- A LOG blocks until the gradients of tied stages are reduced; at a shadow, until the owner has logged.
- An optimizer step blocks until every replica has committed.
- Forwards and backwards of a replica count in order.
- HEAL sends the state of the step boundary, so that the owner may not have logged; a LOG needs a whole replica.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal

from engine.core.action import Action, Op, Program
from engine.core.ownership import Ownership
from engine.core.program.dry_run import Span

State = Literal["ready", "blocked", "illegal"]
Slot = tuple[int, int]
Replica = tuple[int, Slot]  # worker and slot
Value = tuple[str, int, int, int]  # kind, pipeline, stage, microbatch
# op -> (kind of the value, stage of the other end minus its own stage)
TRANSFERS = {
    Op.SEND_F: ("activation", 1),
    Op.RECV_F: ("activation", -1),
    Op.SEND_B: ("gradient", -1),
    Op.RECV_B: ("gradient", 1),
}


def drawn_by(seed: int) -> random.Random:
    """Returns the random generator that draws the order of actions in a test."""
    return random.Random(seed)  # noqa: S311 - nothing here is secret


def no_cost(action: Action) -> int:
    """Costs nothing."""
    return 0


class Machine:
    """Executes one step. With `in_order`, a channel delivers transfers in the order of sending, else by name."""

    def __init__(
        self,
        ownership: Ownership,
        cost: Callable[[Action], int] = no_cost,
        in_order: bool = True,
        healing: Collection[Replica] = (),
        latency: int = 0,
    ):
        self.ownership = ownership
        self.latency = latency
        self.grid = ownership.grid
        self.cost = cost
        self.in_order = in_order
        self.unfilled = set(healing)
        self.free_at = dict.fromkeys(ownership.workers(), 0)
        self.held: dict[int, set[Value]] = {worker: set() for worker in ownership.workers()}
        self.channels: dict[tuple[int, int], list[tuple[Value, int]]] = {}
        self.counted: Counter[Replica] = Counter()
        self.added: Counter[Slot] = Counter()
        self.at_barrier: dict[int, dict[int, int]] = {stage: {} for stage in range(self.grid.stages)}
        self.state_sent_at: dict[Slot, int] = {}
        self.reduced_at: dict[Slot, int] = {}
        self.logged_at: dict[Replica, int] = {}
        self.voted_at: dict[Replica, int] = {}
        self.spans: list[Span] = []

    def run(self, program: Program, order: random.Random) -> bool:
        """Executes a program, each time an action of a worker drawn by `order`; returns whether it ended."""
        cursor = dict.fromkeys(program, 0)
        waiting: set[int] = set()
        while True:
            able = [w for w in program if cursor[w] < len(program[w]) and w not in waiting]
            if not able:
                return not waiting
            worker = order.choice(able)
            action = program[worker][cursor[worker]]
            if action.op is Op.REDUCE_GRAD and worker not in self.at_barrier[action.stage]:
                self.at_barrier[action.stage][worker] = self.free_at[worker]
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
        """Returns ready, blocked, or illegal if `worker` lacks a value that it must have made itself."""
        if action.op in (Op.RECV_F, Op.RECV_B):
            return self._state_of_receive(worker, action)
        legal, ready = self._conditions(worker, action)
        return "illegal" if not legal else "ready" if ready else "blocked"

    def _conditions(self, worker: int, action: Action) -> tuple[bool, bool]:
        """Returns whether an action is legal, and whether its inputs from elsewhere are there."""
        held, slot, whole = self.held[worker], slot_of(action), self.grid.microbatches
        replica = (worker, slot)
        owns = self.ownership.owner(*slot) == worker
        legal = ready = True
        match action.op:
            case Op.F:
                fed = action.stage == 0 or _value("activation", action, -1) in held
                open_ = replica not in self.logged_at and replica not in self.unfilled
                legal = fed and open_ and self.counted[replica] == action.microbatch
            case Op.B:
                fed = action.stage == self.grid.stages - 1 or _value("gradient", action, 1) in held
                legal = fed and _value("residual", action) in held and self.added[slot] == action.microbatch
            case Op.I:
                fed = action.stage == self.grid.stages - 1 or _value("gradient", action, 1) in held
                legal = fed and _value("residual", action) in held
            case Op.W:
                legal = _value("pending", action) in held and self.added[slot] == action.microbatch
            case Op.SEND_F | Op.SEND_B:
                legal = _value(TRANSFERS[action.op][0], action) in held
            case Op.HEAL if owns:
                legal = replica not in self.logged_at
            case Op.HEAL:
                ready = slot in self.state_sent_at
            case Op.REDUCE_GRAD:
                mine = self._with_stage(worker, action.stage)
                legal = all(self.added[each] == self.counted[worker, each] == whole for each in mine)
                ready = len(self.at_barrier[action.stage]) == len(self._owners(action.stage))
            case Op.LOG if owns:
                legal = slot in self.reduced_at
                ready = all(each in self.reduced_at for each in self._tied(action))
            case Op.LOG:
                legal = replica not in self.unfilled
                ready = (self.ownership.owner(*slot), slot) in self.logged_at
            case Op.COMMIT:
                legal = replica in self.logged_at
            case Op.STEP:
                ready = len(self.voted_at) == len(self._replicas())
        return legal, ready

    def _state_of_receive(self, worker: int, action: Action) -> State:
        what, to = TRANSFERS[action.op]
        wanted = _value(what, action, to)
        waiting = [value for value, _ in self._channel(self._other_end(action), worker)]
        if self.in_order and waiting and waiting[0] != wanted:
            return "illegal"
        return "ready" if wanted in waiting else "blocked"

    def do(self, worker: int, action: Action) -> None:
        """Executes one action that is ready, and records when it ran."""
        slot = slot_of(action)
        start = max(self.free_at[worker], *self._awaited(worker, action), 0)
        end = start + self.cost(action)
        self.free_at[worker] = end
        self.spans.append(Span(start, end, worker, action))
        match action.op:
            case Op.F:
                self.held[worker] |= {_value("activation", action), _value("residual", action)}
                self.counted[worker, slot] += 1
            case Op.B:
                self.held[worker].add(_value("gradient", action))
                self.added[slot] += 1
            case Op.I:
                self.held[worker] |= {_value("gradient", action), _value("pending", action)}
            case Op.W:
                self.added[slot] += 1
            case Op.SEND_F | Op.SEND_B:
                transfer = (_value(TRANSFERS[action.op][0], action), end + self.latency)
                self._channel(worker, self._other_end(action)).append(transfer)
            case Op.HEAL if self.ownership.owner(*slot) == worker:
                self.state_sent_at[slot] = end
            case Op.HEAL:
                self.unfilled.discard((worker, slot))
            case Op.REDUCE_GRAD:
                self.reduced_at |= dict.fromkeys(self._with_stage(worker, action.stage), end)
            case Op.LOG:
                self.logged_at[worker, slot] = end
            case Op.COMMIT:
                self.voted_at[worker, slot] = end

    def _awaited(self, worker: int, action: Action) -> list[int]:
        """Returns the arrival times of inputs from elsewhere; takes a received transfer out of its channel."""
        slot = slot_of(action)
        owner = self.ownership.owner(*slot)
        times: list[int] = []
        match action.op:
            case Op.RECV_F | Op.RECV_B:
                what, to = TRANSFERS[action.op]
                channel = self._channel(self._other_end(action), worker)
                (transfer,) = (each for each in channel if each[0] == _value(what, action, to))
                channel.remove(transfer)
                self.held[worker].add(transfer[0])
                times = [transfer[1]]
            case Op.HEAL if owner != worker:
                times = [self.state_sent_at[slot]]
            case Op.REDUCE_GRAD:
                times = list(self.at_barrier[action.stage].values())
            case Op.LOG if owner != worker:
                times = [self.logged_at[owner, slot]]
            case Op.LOG:
                times = [self.reduced_at[each] for each in self._tied(action)]
            case Op.STEP:
                times = list(self.voted_at.values())
        return times

    def _tied(self, action: Action) -> list[Slot]:
        groups = [group for group in self.grid.ties if action.stage in group]
        return [(action.pipeline, stage) for group in groups for stage in group]

    def _owners(self, stage: int) -> set[int]:
        return {self.ownership.owner(pipeline, stage) for pipeline in range(self.grid.pipelines)}

    def _with_stage(self, worker: int, stage: int) -> list[Slot]:
        every = [(pipeline, stage) for pipeline in range(self.grid.pipelines)]
        return [slot for slot in every if self.ownership.owner(*slot) == worker]

    def _replicas(self) -> list[Replica]:
        return [(worker, slot) for slot in self.grid.slots() for worker in self.ownership.replicas(*slot)]

    def _other_end(self, action: Action) -> int:
        return self.ownership.owner(action.pipeline, action.stage + TRANSFERS[action.op][1])

    def _channel(self, source: int, target: int) -> list[tuple[Value, int]]:
        return self.channels.setdefault((source, target), [])


def slot_of(action: Action) -> Slot:
    """Returns the slot that an action is about."""
    return (action.pipeline, action.stage)


def _value(what: str, action: Action, to: int = 0) -> Value:
    return (what, action.pipeline, action.stage + to, action.microbatch)
