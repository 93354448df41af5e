"""A machine that runs programs on provenance: an action results in the hash of the action and its inputs, in order.

Two runs with equal hashes have therefore added the same numbers in the same order. Every forward reads the buffers that
earlier forwards have changed. The machine shares no code with the engine's dependency rule; each action asserts that
its inputs are there. Workers can be killed between any two actions; the survivors report inventories.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import dropwhile, takewhile

from engine.core.action import COMPUTE_OPS, OP_TABLE, RECEIVE_OPS, STASH_OPS, Action, Op, Program
from engine.core.ownership import Ownership, Slot
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.offload import line_with_offloads
from engine.core.value import Kind, Value

State = dict[Slot, set[tuple[str, tuple[str, ...], int]]]
_HERE = {Kind.HOSTED: Kind.RESIDUAL, Kind.HOSTED_PENDING: Kind.PENDING}  # what is on the host, and then here
Log = tuple[str, tuple[str, ...]]  # gradient of a stage, final buffers of all pipelines


def hashed(*parts: object) -> str:
    """Returns the hash that stands for the result of an operation on `parts`."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass
class Replica:
    """One worker's replica of a slot: its state at the boundary, and the changes of the open step in place."""

    weights: str
    boundary: tuple[str, ...]  # buffers of all pipelines
    buffers: str
    counted: int = 0
    added: int = 0
    accumulator: str = ""
    befores: tuple[str, ...] = ()  # the buffers before each forward that has counted


@dataclass
class Body:
    """The replicas and values of one worker."""

    step: int = 0
    replicas: dict[Slot, Replica] = field(default_factory=dict)
    values: dict[Value, str] = field(default_factory=dict)
    reduced: dict[int, Log] = field(default_factory=dict)
    logged: dict[Slot, tuple[Log, ...]] = field(default_factory=dict)

    def stashes(self, *places: Kind) -> set[Value]:
        """Returns the residuals in one place, and what is left of them for the weights."""
        return {value._replace(kind=_HERE.get(value.kind, value.kind)) for value in self.values if value.kind in places}


class Machine:
    """The live workers, each in its open step. With `retain`, a worker keeps until the commit what goes elsewhere."""

    alone = COMPUTE_OPS | RECEIVE_OPS  # ops whose actions end the wait of no other worker

    def __init__(self, ownership: Ownership, retain: bool):
        self.ownership = ownership
        self.retain = retain
        self.bodies = {worker: Body() for worker in ownership.workers()}
        self.votes: set[tuple[int, Slot, int]] = set()
        self.done: list[tuple[int, Action]] = []
        for slot in ownership.grid.slots():
            for worker in ownership.replicas(*slot):
                self.bodies[worker].replicas[slot] = _fresh(slot, ownership.grid.pipelines)

    def enter(self, programs: Iterable[Program], ownership: Ownership) -> None:
        """Begins the programs of successive steps; nothing that was on its way is left."""
        self.ownership = ownership
        self.program: dict[int, tuple[Action, ...]] = dict.fromkeys(self.bodies, ())
        self.taker: dict[tuple[int, Action], int] = {}
        for step, program in enumerate(programs, self.newest()):
            for worker, line in program.items():
                self.program[worker] += line
                self.taker.update({(step, action): worker for action in line if action.op in RECEIVE_OPS})
                self._forget_logs({action.stage for action in line if action.op is Op.REDUCE_GRAD}, step)
        self.cursor = dict.fromkeys(self.program, 0)
        self.channels: dict[tuple[int, int], deque[tuple[int, Value, str]]] = {}
        self.sender: dict[tuple[int, Value], int] = {}
        self.states: dict[tuple[int, Slot], Replica] = {}
        self.streams: dict[tuple[int, Action], Replica] = {}
        self.residuals: dict[tuple[int, Action], tuple[str, str]] = {}
        self.sums: dict[tuple[int, Slot], Log] = {}
        self.logs: dict[tuple[int, Slot], tuple[Log, ...]] = {}
        self.barrier: dict[tuple[int, int], dict[int, tuple[str, str]]] = {}
        self.votes = set()
        self.uses = {worker: _uses(line) for worker, line in self.program.items()}

    def take_back(self, worker: int) -> None:
        """Copies all residuals of a worker back from its host."""
        for value in [each for each in self.bodies[worker].values if each.kind in _HERE]:
            op = Op.RELOAD if value.kind is Kind.HOSTED else Op.RELOAD_W
            self._copy(worker, Action(value.stage, op, value.index, value.pipeline))

    def with_copies(self, program: Program, copy_time: float) -> Program:
        """Returns the rest of a step with the copies of residuals to the host and back."""
        slices, bodies = self.ownership.grid.slices, self.bodies
        return {
            worker: line_with_offloads(
                line, copy_time, slices, bodies[worker].stashes(*_HERE.values()), bodies[worker].stashes(*_HERE)
            )
            for worker, line in program.items()
        }

    def left_by(self, victims: Collection[int]) -> Machine:
        """Returns the survivors as they are now, frozen; this machine is not touched."""
        left = copy(self)
        left.bodies = {worker: _copied(body) for worker, body in self.bodies.items() if worker not in victims}
        left.done = []
        return left

    def _forget_logs(self, stages: Collection[int], step: int) -> None:
        """Drops the reductions and log entries of these stages: the plan reduces and logs them again."""
        for body in self.bodies.values():
            if body.step == step:
                body.logged = {slot: log for slot, log in body.logged.items() if slot[1] not in stages}
                body.reduced = {stage: log for stage, log in body.reduced.items() if stage not in stages}

    def newest(self) -> int:
        """Returns the newest step that is open at any worker."""
        return max(body.step for body in self.bodies.values())

    def run(self, order: random.Random, limit: int = 1 << 30) -> bool:
        """Runs at most `limit` actions, each of a worker drawn by `order`; returns whether the program has ended."""
        able = [worker for worker, line in self.program.items() if self.cursor[worker] < len(line)]
        blocked: list[int] = []
        while limit > 0 and able:
            worker = order.choice(able)
            action = self.program[worker][self.cursor[worker]]
            if not self._do(worker, action):
                able.remove(worker)
                blocked.append(worker)
                continue
            if action.op not in self.alone:
                able += blocked
                blocked.clear()
            limit -= 1
            self.done.append((worker, action))
            self._forget(worker, action)
            self.cursor[worker] += 1
            if action.op is Op.STEP:  # a worker takes its steps as one
                rest = list(dropwhile(lambda each: each.op is Op.STEP, self.program[worker][self.cursor[worker] :]))
                self.cursor[worker] = len(self.program[worker]) - len(rest)
                self.uses[worker] = _uses(rest)
            if self.cursor[worker] == len(self.program[worker]):
                able.remove(worker)
        assert able or not blocked, f"nobody can go on: { {w: str(self.program[w][self.cursor[w]]) for w in blocked} }"
        return not able

    def all_voted(self, step: int) -> bool:
        """Returns whether every replica has voted for `step`, so that the coordinator may have said commit."""
        slots = self.ownership.grid.slots()
        return all((step, slot, worker) in self.votes for slot in slots for worker in self.ownership.replicas(*slot))

    def inventories(self) -> tuple[Inventory, ...]:
        """Returns the inventories of all workers."""
        return tuple(_inventory(worker, self.bodies[worker]) for worker in sorted(self.bodies))

    def catch_up(self, committed: int) -> None:
        """Takes the optimizer steps of those that have not taken those of `committed`."""
        for body in self.bodies.values():
            if body.step == committed:
                self._step(body)

    def adopt(self, slots: Iterable[Slot], ownership: Ownership) -> None:
        """Makes the ownership valid: its owners build replicas from those they hold of the stage in other pipelines."""
        self.ownership = ownership
        for pipeline, stage in slots:
            body = self.bodies[self.ownership.owner(pipeline, stage)]
            other = next(each for (_, s), each in sorted(body.replicas.items()) if s == stage)
            body.replicas[pipeline, stage] = Replica(other.weights, other.boundary, other.boundary[pipeline])

    def state(self) -> State:
        """Returns slot -> (weights, buffers, step) of its replicas: more than one is wrong."""
        found: State = {}
        for slot in self.ownership.grid.slots():
            for worker in self.ownership.replicas(*slot):
                replica = self.bodies[worker].replicas[slot]
                seen = (replica.weights, replica.boundary, self.bodies[worker].step)
                found.setdefault(slot, set()).add(seen)
        return found

    def _do(self, worker: int, action: Action) -> bool:
        """Runs the action, or returns False if one of its inputs is not there yet."""
        match action.op:
            case Op.F | Op.REDO_F:
                self._forward(worker, action)
            case Op.B | Op.I:
                self._backward(worker, action)
            case Op.W:
                self._add(self._replica(worker, action), action, self.bodies[worker].values[_own(Kind.PENDING, action)])
            case Op.SEND_F | Op.SEND_B:
                self._send(worker, action)
            case Op.RECV_F | Op.RECV_B:
                return self._receive(worker, action)
            case Op.STREAM | Op.HAND:
                return self._stream(worker, action)
            case op if op in STASH_OPS:
                self._copy(worker, action)
            case Op.SHIP:
                return self._ship(worker, action)
            case Op.COMMIT:
                assert (action.pipeline, action.stage) in self.bodies[worker].logged
                self.votes.add((self.bodies[worker].step, (action.pipeline, action.stage), worker))
            case Op.STEP:
                if not self.all_voted(self.bodies[worker].step):
                    return False
                self._step(self.bodies[worker])
            case _:
                return self._end(worker, action)
        return True

    def _forward(self, worker: int, action: Action) -> None:
        values, replica = self.bodies[worker].values, self._replica(worker, action)
        fed = values[_own(Kind.ACTIVATION, action, -1)] if action.stage else "data"
        read = replica.buffers if action.op is Op.F else replica.befores[action.microbatch]
        state = (values[_own(Kind.RESIDUAL, action, later=-1)],) if self._slice_of(action) else ()
        seen = hashed(replica.weights, read, fed, action.microbatch, *state)
        values[_own(Kind.ACTIVATION, action)] = hashed("A", seen, action.pipeline, action.stage)
        values[_own(Kind.RESIDUAL, action)] = hashed("R", seen, action.pipeline, action.stage)
        values.pop(_own(Kind.HOSTED, action), None)
        if action.op is Op.F:
            assert replica.counted == action.microbatch, f"{action} counts after {replica.counted}"
            replica.counted += 1
            replica.befores += (replica.buffers,)
            replica.buffers = hashed(replica.buffers, seen)

    def _copy(self, worker: int, action: Action) -> None:
        kind, values = OP_TABLE[action.op].needs[0].kind, self.bodies[worker].values
        other = _HERE.get(kind) or next(away for away, here in _HERE.items() if here is kind)
        values[_own(other, action)] = values.pop(_own(kind, action))

    def _backward(self, worker: int, action: Action) -> None:
        values, last = self.bodies[worker].values, self.ownership.grid.stages - 1
        fed = values[_own(Kind.GRADIENT, action, 1)] if action.stage < last else "loss"
        slices, of_backward = self.ownership.grid.slices, self._slice_of(action)
        carry = (values.pop(_own(Kind.CARRY, action, later=-1)),) if of_backward else ()
        of_forward = slices - 1 - of_backward
        both = hashed(values.pop(_own(Kind.RESIDUAL, action, later=of_forward - of_backward)), fed, *carry)
        values[_own(Kind.GRADIENT, action)] = hashed("G", both)
        if slices > 1:
            values[_own(Kind.CARRY, action)] = hashed("C", both)
        if action.op is Op.B:
            self._add(self._replica(worker, action), action, both)
        else:
            values[_own(Kind.PENDING, action)] = both
            values.pop(_own(Kind.HOSTED_PENDING, action), None)

    def _slice_of(self, action: Action) -> int:
        return action.microbatch % self.ownership.grid.slices

    def _add(self, replica: Replica, action: Action, what: str) -> None:
        assert replica.added == action.microbatch, f"{action} adds after {replica.added}"
        replica.added += 1
        replica.accumulator = hashed(replica.accumulator, what)

    def _send(self, worker: int, action: Action) -> None:
        kind, step = (Kind.ACTIVATION, 1) if action.op is Op.SEND_F else (Kind.GRADIENT, -1)
        receive = Op.RECV_F if action.op is Op.SEND_F else Op.RECV_B
        now, value = self.bodies[worker].step, _own(kind, action)
        taker = self.taker[now, action._replace(op=receive, stage=action.stage + step)]
        self.sender[now, value] = worker
        what = self.bodies[worker].values[value]
        self.channels.setdefault((worker, taker), deque()).append((now, value, what))

    def _receive(self, worker: int, action: Action) -> bool:
        forward = action.op is Op.RECV_F
        value = _own(Kind.ACTIVATION, action, -1) if forward else _own(Kind.GRADIENT, action, 1)
        now = self.bodies[worker].step
        if (now, value) not in self.sender:
            return False
        *arrived, what = self.channels[self.sender[now, value], worker].popleft()
        assert arrived == [now, value], f"worker {worker}: {action} finds {arrived}"
        self.bodies[worker].values[value] = what
        return True

    def _stream(self, worker: int, action: Action) -> bool:
        replica, following = self._replica(worker, action), action.microbatch + 1
        key = (self.bodies[worker].step, action)
        owns = self.ownership.owner(action.pipeline, action.stage) == worker
        if owns is (action.op is Op.STREAM):
            assert replica.added == following, f"{action} after {replica.added} have been added"
            self.streams[key] = replace(replica, befores=(*replica.befores, replica.buffers)[: following + 1])
        elif key not in self.streams:
            return False
        else:
            of = self.streams[key]
            assert replica.added < following, f"{action} after {replica.added} have been streamed"
            replica.added, replica.accumulator = following, of.accumulator
            if replica.counted < following:
                replica.counted, replica.buffers, replica.befores = following, of.befores[-1], of.befores[:-1]
        return True

    def _ship(self, worker: int, action: Action) -> bool:
        replica, microbatch = self._replica(worker, action), action.microbatch
        values, value = self.bodies[worker].values, _own(Kind.RESIDUAL, action)
        key = (self.bodies[worker].step, action)
        if self.ownership.owner(action.pipeline, action.stage) != worker:
            self.residuals[key] = values[value], (*replica.befores, replica.buffers)[microbatch + 1]
        elif key not in self.residuals:
            return False
        else:
            values[value], after = self.residuals[key]
            assert microbatch <= replica.counted, f"{action} counts after {replica.counted}"
            if microbatch == replica.counted:
                replica.counted, replica.befores = microbatch + 1, (*replica.befores, replica.buffers)
                replica.buffers = after
        return True

    def _end(self, worker: int, action: Action) -> bool:
        body, grid, slot = self.bodies[worker], self.ownership.grid, (action.pipeline, action.stage)
        owned, key = self.ownership.owner(*slot) == worker, (body.step, slot)
        if action.op is Op.REDUCE_GRAD:
            return self._reduce(body, worker, action.stage)
        if action.op is Op.HEAL and owned:
            of = body.replicas[slot]
            self.states[key] = Replica(of.weights, of.boundary, of.boundary[slot[0]])
        elif action.op is Op.HEAL:
            if key not in self.states:
                return False
            body.replicas[slot] = replace(self.states[key])
        elif owned:
            if slot not in body.logged:
                parts = [self._reduced(body, slot[0], stage) for stage in sorted({slot[1], *grid.tied_to(slot[1])})]
                if None in parts:
                    return False
                body.logged[slot] = (body.reduced[slot[1]], *(part for part in parts if part))
            self.logs[key] = body.logged[slot]
        else:
            if key not in self.logs:
                return False
            body.logged[slot] = self.logs[key]
        return True

    def _reduce(self, body: Body, worker: int, stage: int) -> bool:
        """Every pipeline's accumulator and buffers, once the owners of all of them have come."""
        grid, come = self.ownership.grid, self.barrier.setdefault((body.step, stage), {})
        for pipeline in self.ownership.pipelines_of(worker, stage):
            replica = body.replicas[pipeline, stage]
            assert replica.added == replica.counted == grid.microbatches
            come[pipeline] = (replica.accumulator, replica.buffers)
        if len(come) < grid.pipelines:
            return False
        body.reduced[stage] = self._sum_of([come[pipeline] for pipeline in range(grid.pipelines)])
        for pipeline in self.ownership.pipelines_of(worker, stage):
            self.sums[body.step, (pipeline, stage)] = body.reduced[stage]
        return True

    def _sum_of(self, parts: list[tuple[str, str]]) -> Log:
        """Returns the reduction of (accumulator, buffers) of each pipeline."""
        return hashed(*(each for each, _ in parts)), tuple(each for _, each in parts)

    def _reduced(self, body: Body, pipeline: int, stage: int) -> Log | None:
        if self.bodies[self.ownership.owner(pipeline, stage)] is body:
            return body.reduced[stage]
        return self.sums.get((body.step, (pipeline, stage)))

    def _step(self, body: Body) -> None:
        body.replicas = {slot: each for slot, each in body.replicas.items() if slot in body.logged}  # of a leaver: none
        for slot, replica in body.replicas.items():
            buffers = body.logged[slot][0][1]
            weights = hashed(replica.weights, body.logged[slot])
            body.replicas[slot] = Replica(weights, buffers, buffers[slot[0]])
        body.step += 1
        body.values, body.reduced, body.logged = {}, {}, {}

    def _replica(self, worker: int, action: Action) -> Replica:
        return self.bodies[worker].replicas[action.pipeline, action.stage]

    def _forget(self, worker: int, action: Action) -> None:
        """Drops the values of which `action` was the last use, unless they are retained."""
        uses, values = self.uses[worker], self.bodies[worker].values
        for value in _used(action):
            uses[value] -= 1
            made_here = (value.pipeline, value.stage) in self.bodies[worker].replicas
            if not uses[value] and not (self.retain and made_here and self._goes_elsewhere(value)):
                values.pop(value, None)

    def _goes_elsewhere(self, value: Value) -> bool:
        to = {Kind.ACTIVATION: 1, Kind.GRADIENT: -1}.get(value.kind, 0)
        owner = self.ownership.owner
        return owner(value.pipeline, value.stage) != owner(value.pipeline, value.stage + to)


def _copied(body: Body) -> Body:
    replicas = {slot: replace(replica) for slot, replica in body.replicas.items()}
    return Body(body.step, replicas, dict(body.values), dict(body.reduced), dict(body.logged))


def _fresh(slot: Slot, pipelines: int) -> Replica:
    boundary = tuple(f"buffers {pipeline} {slot[1]}" for pipeline in range(pipelines))
    return Replica(f"weights {slot[1]}", boundary, boundary[slot[0]])


def _own(kind: Kind, action: Action, to: int = 0, later: int = 0) -> Value:
    return Value(kind, action.pipeline, action.stage + to, action.microbatch + later)


def _used(action: Action) -> list[Value]:
    match action.op:
        case Op.F | Op.REDO_F:
            return [_own(Kind.ACTIVATION, action, -1)]
        case Op.B | Op.I:
            return [_own(Kind.GRADIENT, action, 1)]
        case Op.W:
            return [_own(Kind.PENDING, action)]
        case Op.SEND_F:
            return [_own(Kind.ACTIVATION, action)]
        case Op.SEND_B:
            return [_own(Kind.GRADIENT, action)]
    return []


def _uses(actions: Iterable[Action]) -> dict[Value, int]:
    uses: dict[Value, int] = {}
    for action in takewhile(lambda each: each.op is not Op.STEP, actions):
        for value in _used(action):
            uses[value] = uses.get(value, 0) + 1
    return uses


def _inventory(worker: int, body: Body) -> Inventory:
    return Inventory(
        worker,
        body.step,
        tuple(sorted(body.replicas)),
        {slot: replica.counted for slot, replica in sorted(body.replicas.items()) if replica.counted},
        {slot: replica.added for slot, replica in sorted(body.replicas.items()) if replica.added},
        tuple(sorted(body.logged)),
        ValueRuns(each._replace(kind=_HERE.get(each.kind, each.kind)) for each in body.values),
    )
