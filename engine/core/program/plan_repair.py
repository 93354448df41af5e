"""Plan repair: the plan of a recovery from the program that was running, at the cost of what the failure touched.

The planner (`planner.py`) plans all that is left of a step. Most of it is known: a worker that keeps its slots goes on
with the rest of its program. So only the programs of the successors are rewritten. A value that was on its way at the
fence is sent again, in front. Suppose worker 2 died, the owner of stage 2, and worker 1 is its successor:

    worker 0   0SEND_F4  0F5 0SEND_F5 ...             what was on its way, then the rest of its program
    worker 1   2F3 2SEND_F3 2B2 1B2 1RECV_F4 1F4 ...  merged: the rest of its own program, and what is left of stage 2
    worker 3   3SEND_B2  3RECV_F3 3F3 ...             as worker 0; the activations come from worker 1 now

A successor runs in the order of the starts in a dry run of a whole step. So all programs are in the order of one run
without a failure, and no worker waits in a circle. Work that is redone comes first, because it started first.

Inventories decide here too: a worker has done what it has counted, and it is where its program has that behind it.
`repaired` returns None where the planner has to plan the step: a worker that lost a slot while it lives, a value that
its maker no longer holds, a backward that is half done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.core.action import (
    COMPUTE_OPS,
    FORWARD_OPS,
    OP_TABLE,
    RECEIVE_OPS,
    SEND_OPS,
    Action,
    Op,
    Program,
    make_action,
    ops_that_make,
    parse_action,
)
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.dependencies import RECEIVES, SENDS
from engine.core.program.inventory import Inventory, ProgramRest
from engine.core.value import Kind

# Stages from the slot that makes a value to the one that takes it.
_FURTHER = {kind: OP_TABLE[SENDS[kind]].peer for kind in (Kind.ACTIVATION, Kind.GRADIENT)}
_CARRIES = {op: kind for ops in (SENDS, RECEIVES) for kind, op in ops.items()}
_MAKES = {op: kind for kind in _FURTHER for op in ops_that_make(kind) & COMPUTE_OPS}
_TAKES = {op: term.kind for op in COMPUTE_OPS for term in OP_TABLE[op].needs if term.kind in _FURTHER}


# The baseline: the program of a whole step by the owners alone, with all that a repair looks up in it.
@dataclass(frozen=True, slots=True)
class SlotLines:
    """The positions of a slot's actions in its owner's program, by microbatch."""

    forward: list[int]
    for_input: list[int]  # of the backward, or of its part for the input
    adding: list[int]  # of the backward, or of its part for the weights
    receives: dict[Kind, list[int]]  # of the values that the slot takes, if another worker makes them
    sends: dict[Kind, list[int]]  # of the values that it makes, if another worker takes them

    def taking(self, kind: Kind) -> list[int]:
        """Returns the positions of the actions that take values of a kind."""
        return self.forward if kind is Kind.ACTIVATION else self.for_input


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """The compute actions and transfers of a whole step, with the start of each in a dry run."""

    owners: tuple[int, ...]
    program: Program
    starts: Mapping[int, Sequence[float]]
    lines: Mapping[Slot, SlotLines]
    slots: Mapping[int, tuple[Slot, ...]]  # of each owner


def baseline_of(
    program: Program, starts: Mapping[int, Sequence[float]], grid: Grid, owners: tuple[int, ...]
) -> Baseline:
    """Returns the baseline of a program; `starts` are those of each worker's actions in a dry run."""

    def nowhere() -> list[int]:
        return [-1] * grid.microbatches

    def transfers() -> dict[Kind, list[int]]:
        return {kind: nowhere() for kind in _FURTHER}

    lines = {slot: SlotLines(nowhere(), nowhere(), nowhere(), transfers(), transfers()) for slot in grid.slots()}
    slots: dict[int, list[Slot]] = {worker: [] for worker in program}
    for slot, owner in zip(grid.slots(), owners, strict=True):
        slots[owner].append(slot)
    for actions in program.values():
        for position, (stage, op, microbatch, pipeline) in enumerate(actions):
            line = lines[pipeline, stage]
            if op in RECEIVE_OPS:
                line.receives[_CARRIES[op]][microbatch] = position
            elif op in SEND_OPS:
                line.sends[_CARRIES[op]][microbatch] = position
            elif op in FORWARD_OPS:
                line.forward[microbatch] = position
            elif op in COMPUTE_OPS:
                if op in _MAKES:
                    line.for_input[microbatch] = position
                if op is not Op.I:
                    line.adding[microbatch] = position
    return Baseline(owners, program, starts, lines, {worker: tuple(mine) for worker, mine in slots.items()})


# The repair. It ends with the first thing that it cannot do.
class _Unrepairable(Exception):
    """The planner has to plan the step."""


def _require(condition: object, why: str) -> None:
    if not condition:
        raise _Unrepairable(why)


def repaired(
    base: Baseline, ownership: Ownership, step: int, inventories: Sequence[Inventory], done: Collection[Slot]
) -> tuple[ProgramRest, ...] | None:
    """Returns how every member continues in `step`, without handoffs and shards; None if the planner has to plan it.

    The owners of the `done` slots hold the inputs of the optimizer step.
    """
    try:
        return _Repair(base, ownership, step, inventories, done).rests()
    except _Unrepairable:
        return None


class RepairedProgram(Mapping[int, tuple[Action, ...]]):
    """The programs of all members in a repair, put together on demand from `program`, which was running."""

    def __init__(
        self,
        rests: Iterable[ProgramRest],
        program: Program,
        with_end: Callable[[int, tuple[Action, ...]], tuple[Action, ...]],  # adds the end of the step to a part
    ):
        self._rests = {rest.worker: rest for rest in rests}
        self._program, self._with_end = program, with_end
        self._known: dict[int, tuple[Action, ...]] = {}

    def __getitem__(self, worker: int) -> tuple[Action, ...]:
        if worker not in self._known:
            self._known[worker] = self._with_end(worker, self.rest(worker))
        return self._known[worker]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rests)

    def __len__(self) -> int:
        return len(self._rests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment] # as of a dict

    def rest(self, worker: int) -> tuple[Action, ...]:
        """Returns the program of a member up to its last backward."""
        rest = self._rests[worker]
        if rest.rewritten is not None:
            actions = tuple(map(parse_action, rest.rewritten.split()))
        elif rest.first < 0:
            actions = ()
        else:
            actions = _without(self._program[worker], rest.first, rest.dropped)
        return (*map(parse_action, rest.sends.split()), *actions)


def _without(actions: tuple[Action, ...], first: int, dropped: Iterable[int]) -> tuple[Action, ...]:
    """Returns the actions from a position on, without the `dropped` positions, which are in order."""
    rest: list[Action] = []
    for place in dropped:
        rest += actions[first:place]
        first = place + 1
    return (*rest, *actions[first:])


class _Repair:
    """What a repair has found and decided, part by part."""

    def __init__(
        self, base: Baseline, ownership: Ownership, step: int, inventories: Sequence[Inventory], done: Collection[Slot]
    ):
        self._base, self._ownership, self._done = base, ownership, done
        self._inventories = {
            held.worker: held if held.step == step else Inventory(held.worker, step, held.whole) for held in inventories
        }
        slots = ownership.grid.slots()
        self._owner = dict(zip(slots, ownership.owners, strict=True))
        self._before = dict(zip(slots, base.owners, strict=True))
        self._struck = [slot for slot in slots if self._owner[slot] != self._before[slot]]
        _require(not any(self._before[slot] in self._inventories for slot in self._struck), "a live worker lost a slot")
        self._successors = sorted({self._owner[slot] for slot in self._struck})
        self._first: dict[int, int] = {}  # position at which a worker goes on in its program
        self._dropped: dict[int, list[int]] = defaultdict(list)  # positions of transfers of values that have come
        self._again: dict[int, list[tuple[float, int, Action]]] = defaultdict(list)  # sends, by the start of their use
        self._left: dict[tuple[Kind, Slot], range | dict[int, None]] = {}  # microbatches that a slot takes and makes
        self._redone: dict[Slot, int] = {}  # of a struck slot: forwards below are counted
        for worker, mine in base.slots.items():
            if worker in self._inventories:
                self._find_place(worker, mine)
        for slot in self._struck:
            self._find_left(slot)
        for slot in slots:
            for kind in _FURTHER:
                self._connect(kind, slot)
        self._lists = {worker: self._merged(worker) for worker in self._successors}
        self._lists = {worker: self._with_receives(worker, actions) for worker, actions in self._lists.items()}
        for worker in self._successors:
            for other in self._neighbours(worker):
                if other not in self._lists and not self._receives_in_order(other, worker):
                    own = [action for action in self._rest(other) if action[1] not in RECEIVE_OPS]
                    self._lists[other] = self._with_receives(other, own)

    # A worker that keeps its slots

    def _find_place(self, worker: int, slots: Sequence[Slot]) -> None:
        """Finds where a worker is in its program; what it has counted must be what its program has before that."""
        held, microbatches = self._inventories[worker], self._ownership.grid.microbatches
        first, following = 0, []
        for slot in slots:
            line, counted, added = self._base.lines[slot], held.counted.get(slot, 0), held.added.get(slot, 0)
            _require(slot not in self._done or added == microbatches, "a slot that another worker has ended")
            pending = held.values.runs(Kind.PENDING, slot)
            for_input = pending[0][1] + 1 if pending else added
            _require(not pending or (len(pending) == 1 and pending[0][0] == added), "backwards out of order")
            _require(held.values.has_all(Kind.RESIDUAL, slot, for_input, counted), "a residual is gone")
            for places, count in ((line.forward, counted), (line.for_input, for_input), (line.adding, added)):
                first = max(first, places[count - 1] + 1) if count else first
                following += places[count : count + 1]
            self._left[Kind.ACTIVATION, slot] = range(counted, microbatches)
            self._left[Kind.GRADIENT, slot] = range(for_input, microbatches)
        _require(all(place >= first for place in following), "another order than that of the program")
        actions = self._base.program[worker]
        while first < len(actions) and actions[first].op in SEND_OPS:
            first += 1  # what has been made is sent in front, if it is missing
        self._first[worker] = first

    # A slot with another owner

    def _find_left(self, slot: Slot) -> None:
        worker = self._owner[slot]
        held, microbatches = self._inventories[worker], self._ownership.grid.microbatches
        counted, added = held.counted.get(slot, 0), held.added.get(slot, 0)
        if slot in self._done:
            counted = added = microbatches
        _require(not held.values.runs(Kind.PENDING, slot), "half a backward of another worker")
        wanted = self._wanted_again(slot, counted)
        kept = frozenset(held.values.since(Kind.RESIDUAL, slot, added))
        _require(kept.isdisjoint(wanted) and min(wanted, default=added) >= added, "an activation is gone")
        redone = [index for index in range(added, counted) if index in wanted or index not in kept]
        self._redone[slot] = counted
        self._left[Kind.ACTIVATION, slot] = dict.fromkeys((*redone, *range(counted, microbatches)))
        self._left[Kind.GRADIENT, slot] = range(added, microbatches)

    def _wanted_again(self, slot: Slot, counted: int) -> frozenset[int]:
        """Returns the activations of counted forwards that the next slot needs, and that neither of them holds."""
        kind, taker = Kind.ACTIVATION, (slot[0], slot[1] + 1)
        needed = self._left.get((kind, taker), range(0))
        target = self._owner.get(taker, -1)
        if target in (-1, self._owner[slot]) or self._before[taker] != target:
            return frozenset()
        there, here = self._inventories[target].values, self._inventories[self._owner[slot]].values
        early = (index for index in needed if index < counted)
        return frozenset(
            index for index in early if not there.has(kind, slot, index) and not here.has(kind, slot, index)
        )

    # The values between two slots

    def _connect(self, kind: Kind, maker: Slot) -> None:
        """Finds the values that one slot still takes from another: made later, there already, or sent again."""
        taker = (maker[0], maker[1] + _FURTHER[kind])
        if taker not in self._owner:
            return
        source, target = self._owner[maker], self._owner[taker]
        made, needed = self._left[kind, maker], self._left[kind, taker]
        there = self._inventories[target].values
        missing: Iterable[int]
        touched = maker in self._redone or taker in self._redone
        if isinstance(made, range) and isinstance(needed, range):
            missing = range(needed.start, made.start)
            _require(touched or needed.start <= made.start, "an owner behind its neighbour")
        else:
            missing = set(needed).difference(made)
        if source == target:
            _require(not touched or all(there.has(kind, maker, index) for index in missing), "a value is gone")
            return
        if taker in self._redone and maker not in self._redone:
            _require(all(index in needed for index in made), "a send without a taker")
        self._send_again(kind, maker, taker, [index for index in sorted(missing) if not there.has(kind, maker, index)])
        if isinstance(needed, range) and taker not in self._redone:
            places = self._base.lines[taker].receives[kind]
            self._dropped[target] += [places[index] for index in there.since(kind, maker, needed.start)]
        if isinstance(made, range) and maker not in self._redone:
            places = self._base.lines[maker].sends[kind]
            self._dropped[source] += [places[index] for index in there.since(kind, maker, made.start)]

    def _send_again(self, kind: Kind, maker: Slot, taker: Slot, microbatches: Iterable[int]) -> None:
        line, source = self._base.lines[taker], self._owner[maker]
        places = line.taking(kind) if taker in self._redone else line.receives[kind]
        starts, values = self._base.starts[self._before[taker]], self._inventories[source].values
        for index in microbatches:
            _require(values.has(kind, maker, index), "a value is gone")
            place = places[index]
            self._again[source].append((starts[place], place, make_action(maker[1], SENDS[kind], index, maker[0])))

    # The program of a worker

    def rests(self) -> tuple[ProgramRest, ...]:
        """Returns how every member goes on."""
        rests = []
        for worker in self._inventories:
            sends = " ".join(map(str, self._sent_in_front(worker)))
            if worker in self._lists:
                rests.append(ProgramRest(worker, sends=sends, rewritten=" ".join(map(str, self._lists[worker]))))
            else:
                rests.append(ProgramRest(worker, self._first.get(worker, -1), self._dropped_of(worker), sends))
        return tuple(rests)

    def _sent_in_front(self, worker: int) -> list[Action]:
        return [action for _, _, action in sorted(self._again[worker])] if worker in self._again else []

    def _dropped_of(self, worker: int) -> tuple[int, ...]:
        return tuple(sorted(place for place in self._dropped.get(worker, ()) if place >= self._first.get(worker, 0)))

    def _rest(self, worker: int) -> tuple[Action, ...]:
        """Returns the rest of a worker's program, without the transfers of values that have come."""
        if worker not in self._first:
            return ()
        return _without(self._base.program[worker], self._first[worker], self._dropped_of(worker))

    # The program of a successor

    def _merged(self, worker: int) -> list[Action]:
        """Returns what is left of all slots of a successor, in the order of the baseline's starts, with its sends."""
        base, items = self._base, list[tuple[float, Action]]()
        if (first := self._first.get(worker)) is not None:
            rest = zip(base.starts[worker][first:], base.program[worker][first:], strict=True)
            items += [(start, action) for start, action in rest if action[1] in COMPUTE_OPS]
        for slot, counted in self._redone.items():
            if self._owner[slot] == worker:
                pipeline, stage = slot
                line, starts = base.lines[slot], base.starts[self._before[slot]]
                for index in self._left[Kind.ACTIVATION, slot]:
                    action = make_action(stage, Op.F if index >= counted else Op.REDO_F, index, pipeline)
                    items.append((starts[line.forward[index]], action))
                for index in self._left[Kind.GRADIENT, slot]:
                    items.append((starts[line.for_input[index]], make_action(stage, Op.B, index, pipeline)))
        items.sort()
        return [part for _, action in items for part in self._with_send(worker, action)]

    def _with_send(self, worker: int, action: Action) -> Iterator[Action]:
        stage, op, microbatch, pipeline = action
        yield action
        if (kind := _MAKES.get(op)) is None:
            return
        taker = (pipeline, stage + _FURTHER[kind])
        target = self._owner.get(taker, worker)
        if target == worker or microbatch not in self._left[kind, taker]:
            return
        if not self._inventories[target].values.has(kind, (pipeline, stage), microbatch):
            yield make_action(stage, SENDS[kind], microbatch, pipeline)

    def _with_receives(self, worker: int, actions: Iterable[Action]) -> list[Action]:
        """Returns a list with each receive before its use, and behind the receives of earlier sends of that pair."""
        coming: dict[Action, deque[Action]] = {}
        for source in self._neighbours(worker):
            sent = self._lists[source] if source in self._lists else self._rest(source)
            queue = deque(self._receipts(worker, (*self._sent_in_front(source), *sent)))
            coming |= dict.fromkeys(queue, queue)
        parts: list[Action] = []
        for action in actions:
            stage, op, microbatch, pipeline = action
            if op in _TAKES:
                receipt = make_action(stage, RECEIVES[_TAKES[op]], microbatch, pipeline)
                while receipt in coming:
                    come = coming[receipt].popleft()
                    del coming[come]
                    parts.append(come)
            parts.append(action)
        return parts

    def _neighbours(self, worker: int) -> list[int]:
        """Returns the other owners of the slots beside those of a worker, in order."""
        mine = [slot for slot, owner in self._owner.items() if owner == worker]
        beside = ((pipeline, stage + more) for pipeline, stage in mine for more in _FURTHER.values())
        return sorted({self._owner.get(slot, worker) for slot in beside} - {worker})

    def _receipts(self, worker: int, actions: Iterable[Action]) -> Iterator[Action]:
        """Yields the receives of `worker` for the sends in another worker's list, in their order."""
        for stage, op, microbatch, pipeline in actions:
            if op in SEND_OPS:
                kind = _CARRIES[op]
                taker = stage + _FURTHER[kind]
                if self._owner[pipeline, taker] == worker:
                    yield make_action(taker, RECEIVES[kind], microbatch, pipeline)

    def _receives_in_order(self, worker: int, source: int) -> bool:
        """Whether a worker that keeps its slots receives in the order in which a successor sends now."""
        received = [action for action in self._rest(worker) if action[1] in RECEIVE_OPS]
        received = [each for each in received if self._owner[each[3], each[0] - _FURTHER[_CARRIES[each[1]]]] == source]
        return received == list(self._receipts(worker, (*self._sent_in_front(source), *self._lists[source])))
