"""The passes that build a program from the compute actions of a schedule; `build` runs them, one after the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.core.action import ADDING_OPS, FORWARD_OPS, OP_TABLE, SEND_OPS, Action, Op, Where, make_action
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import RECEIVES, SENDS, DependencyIndex, makes, needs
from engine.core.program.dry_run import Span, dry_run
from engine.core.program.remaining_tasks import SENT_BY_SLOT, starts
from engine.core.program.schedules import COSTS, overlap_of
from engine.core.value import WIRE, Held, Kind, Value

# The pass that adds transfers of the values that a compute action needs and its worker neither holds nor makes.
#
# A value has one sender and one taker. The sender is the lowest worker that holds the value at the start, else the
# owner of its slot, which makes it. The taker is the owner of the slot that needs it. A redundant forward has no
# transfers: its input is on its worker.
#
#     worker 0   0F0 0SEND_F0 0F1 0SEND_F1 ...       a value that is made is sent right behind its maker
#     worker 1            1RECV_F0 1F0 1RECV_F1 1F1  and received just before the first action that needs it
#
# Values that are held at the start are sent at the front of the program, in the order in which they are needed. Each
# pair of workers receives in the order of its sends: a receive stands behind the receives of all earlier sends of that
# pair.


def with_transfers(
    program: Mapping[int, tuple[Action, ...]], ownership: Ownership, held: Collection[Held] = ()
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with its transfers; the dry run refuses a value that no worker holds or makes."""
    exchange = _Exchange(program, ownership)
    values = [(worker, value) for worker, value in held if value.kind in SENT_BY_SLOT]
    exchange.find_takers(values)
    front = exchange.send_held(values)
    exchange.send_made()
    return {worker: (*front[worker], *exchange.spliced(worker)) for worker in program}


class _Line(NamedTuple):
    """The values that the actions of one op on one slot take and give: number less the microbatch, and transfer."""

    takes: tuple[tuple[int, Op], ...]
    gives: tuple[tuple[int, Op], ...]


class _Lines(dict[tuple[int, Op, int], _Line]):
    """The lines of one worker by stage, op and pipeline."""

    def __init__(self, worker: int, ownership: Ownership, numbers: DependencyIndex):
        self._worker = worker
        self._ownership = ownership
        self._numbers = numbers

    def __missing__(self, key: tuple[int, Op, int]) -> _Line:
        stage, op, pipeline = key
        first, here = Action(stage, op, 0, pipeline), (self._worker, self._ownership)
        takes = self._ends(needs(first, *here), RECEIVES)
        gives = self._ends(makes(first, *here), SENDS)
        redundant = self._worker != self._ownership.owner(pipeline, stage)
        self[key] = line = _Line((), ()) if redundant else _Line(takes, gives)
        return line

    def _ends(self, things: Iterable[Held], ops: Mapping[Kind, Op]) -> tuple[tuple[int, Op], ...]:
        return tuple((self._numbers.of((WIRE, value)), ops[value.kind]) for _, value in things if value.kind in ops)


class _Exchange:
    """The values that go from worker to worker, by number: taker, sender, and the actions of both."""

    def __init__(self, program: Mapping[int, tuple[Action, ...]], ownership: Ownership):
        self.program = program
        self.numbers = DependencyIndex(program, ownership)
        self.lines: dict[int, list[_Line]] = {}  # of each worker's actions, in order
        for worker, actions in program.items():
            lines = _Lines(worker, ownership, self.numbers)
            self.lines[worker] = [lines[stage, op, pipeline] for stage, op, _, pipeline in actions]
        self.taker: dict[int, int] = {}
        self.taken_at: dict[int, int] = {}  # a position in its program
        self.receives: dict[int, Action] = {}
        self.sends: dict[int, Action] = {}
        self.under_way: dict[int, int] = {}  # its sender
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by sender and taker

    def find_takers(self, held: Iterable[Held]) -> None:
        """Finds the values that a worker needs and has neither held nor made by then."""
        here: dict[int, set[int]] = defaultdict(set)
        for worker, value in held:
            here[worker].add(self.numbers.of((WIRE, value)))
        for worker, actions in self.program.items():
            there = here[worker]
            for position, (action, (takes, gives)) in enumerate(zip(actions, self.lines[worker], strict=True)):
                stage, _, microbatch, pipeline = action
                for number, receive in takes:
                    taken = number + microbatch
                    if taken not in there:
                        there.add(taken)
                        self.taker[taken], self.taken_at[taken] = worker, position
                        self.receives[taken] = make_action(stage, receive, microbatch, pipeline)
                for number, _ in gives:
                    there.add(number + microbatch)

    def _send(self, number: int, worker: int) -> None:
        self.under_way[number] = worker
        self.queues[worker, self.taker[number]].append(number)

    def send_held(self, held: Collection[Held]) -> dict[int, list[Action]]:
        """Sends held values in the order in which they are needed; returns the sends of each worker."""
        holder: dict[Value, int] = {}
        for worker, value in held:
            holder[value] = min(worker, holder.get(value, worker))
        wanted = []
        for value, worker in holder.items():
            number = self.numbers.of((WIRE, value))
            if number in self.taker:
                wanted.append((self.taken_at[number], self.taker[number], value, worker, number))
        front: dict[int, list[Action]] = defaultdict(list)
        for _, _, value, worker, number in sorted(wanted):
            self._send(number, worker)
            front[worker].append(Action(value.stage, SENDS[value.kind], value.index, value.pipeline))
        return front

    def send_made(self) -> None:
        """Sends every other value that has a taker, when it is made for the first time."""
        for worker, actions in self.program.items():
            for (stage, _, microbatch, pipeline), (_, gives) in zip(actions, self.lines[worker], strict=True):
                for number, send in gives:
                    given = number + microbatch
                    if given in self.taker and given not in self.under_way:
                        self._send(given, worker)
                        self.sends[given] = make_action(stage, send, microbatch, pipeline)

    def spliced(self, worker: int) -> Iterator[Action]:
        """Returns a worker's actions with each receive before its use and each send behind its maker."""
        under_way, queues, receives, sends = self.under_way, self.queues, self.receives, self.sends
        for action, (takes, gives) in zip(self.program[worker], self.lines[worker], strict=True):
            microbatch = action[2]
            for number, _ in takes:
                taken = number + microbatch
                while taken in under_way:
                    come = queues[under_way[taken], worker].popleft()
                    yield receives[come]
                    del under_way[come]
            yield action
            for number, _ in gives:
                send = sends.pop(number + microbatch, None)
                if send is not None:
                    yield send


# The pass that adds redundant forwards: the first shadow of a slot runs the slot's forwards while it would wait.
#
# Only a shadow that has the input takes part: it owns the preceding stage of the same pipeline or runs its forwards
# again too, or the slot is of stage 0, whose input is data. So the pass adds no transfer. A worker's own actions keep
# their order and come first; a redundant forward that is ready fills a gap, lowest microbatch first, or stands behind
# the last backward. The gaps are those of a run with the given costs. Worker 0 shadows stage 1:
#
#     worker 0   0F0 0F1 1F0 1F1 0B0      0B1
#     worker 1       1F0 1B0     1F1 1B1
#
# A redundant forward without a gap makes the step longer wherever it stands. So some stand sooner, where a kill finds
# them done: one behind each of the first backwards that a forward follows. If that makes the step longer than before,
# the pass undoes it.

_Task = tuple[int, Action]  # (worker, action)


def with_redundant_forwards(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    cost: Callable[[Action], float] = lambda action: COSTS[action.op],
    healing: Collection[tuple[int, Slot]] = (),
) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions with the redundant forwards; the `healing` (worker, slot) take no part."""
    own = [(worker, action) for worker, actions in program.items() for action in actions]
    twice = redundant_slots(ownership, healing).items()
    again = [(w, Action(s, Op.F, m, d)) for (d, s), w in twice for m in range(ownership.grid.microbatches)]
    tasks = own + sorted(again, key=lambda task: (task[1].microbatch, task[1].stage, task))
    workers, costs = [worker for worker, _ in tasks], [cost(action) for _, action in tasks]
    before = _predecessors(tasks, len(own), ownership)
    order, length = starts(workers, costs, before)
    _, least = starts(workers[: len(own)], costs[: len(own)], before[: len(own)])
    if length > least:
        num_sooner = int((length - least) / max(costs[len(own) :]))
        sooner, its_length = starts(workers, costs, _sooner(order, tasks, len(own), before, num_sooner))
        order = sooner if its_length <= length else order
    lists: dict[int, list[Action]] = {worker: [] for worker in sorted({*program, *workers})}
    for number in order:
        worker, action = tasks[number]
        lists[worker].append(action)
    return {worker: tuple(actions) for worker, actions in lists.items()}


def _sooner(
    order: Sequence[int], tasks: Sequence[_Task], num_own: int, before: Sequence[list[int]], most: int
) -> list[list[int]]:
    """Returns `before` with the first `most` redundant forwards of each worker behind one backward each."""
    later = [list(each) for each in before]
    lines: dict[int, list[int]] = {}
    for number in order:
        lines.setdefault(tasks[number][0], []).append(number)
    for line in lines.values():
        own = [number for number in line if number < num_own]
        backwards = {number for number in own if tasks[number][1].op not in FORWARD_OPS}
        first = next((place for place, number in enumerate(line) if number in backwards), len(line))
        left = deque([number for number in line[first:] if number >= num_own][:most])
        for number, following in pairwise(own):
            turns = number in backwards and following not in backwards
            if turns and left and all(each <= number or each >= num_own for each in before[left[0]]):
                later[following].append(left.popleft())
    return later


def redundant_slots(ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> dict[Slot, int]:
    """Returns the slots whose forwards are run twice, each with the shadow that runs them again."""
    twice: dict[Slot, int] = {}
    for pipeline, stage in ownership.grid.slots():
        first = ownership.shadows_of(pipeline, stage)[:1]
        for shadow in first:
            before = (pipeline, stage - 1)
            at_hand = stage == 0 or ownership.owner(*before) == shadow or twice.get(before) == shadow
            if at_hand and (shadow, (pipeline, stage)) not in healing:
                twice[pipeline, stage] = shadow
    return twice


def lazy_slots(ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> tuple[Slot, ...]:
    """Returns the slots with a shadow whose forwards are run once under `eager` too: their input is not at hand."""
    twice = redundant_slots(ownership, healing)
    return tuple(slot for slot in ownership.grid.slots() if ownership.shadows_of(*slot) and slot not in twice)


def overhead_floor(num_stages: int, num_microbatches: int, forward: float, backward: float) -> float:
    """Returns by what share redundant forwards at least lengthen 1F1B: M (2F + B), and (P - 2) F before the last."""
    excess = (num_microbatches - 1) * forward - (num_stages - 1) * backward
    return max(0.0, excess) / ((num_microbatches + num_stages - 1) * (forward + backward))


def _predecessors(tasks: Sequence[_Task], num_own: int, ownership: Ownership) -> list[list[int]]:
    """Returns for each task the numbers of the tasks that must end before it starts.

    The first `num_own` tasks are the owners', in order on each worker; the redundant ones are in order on each slot.
    """
    maker = {
        value: number
        for number, (worker, action) in enumerate(tasks[:num_own])
        for _, value in makes(action, worker, ownership)
        if value.kind is not Kind.COUNTED  # each replica has its own counter, and the order sees to it
    }
    again: dict[Held, int] = {}
    last: dict[int | Slot, int] = {}
    before: list[list[int]] = []
    for number, (worker, action) in enumerate(tasks):
        needed = needs(action, worker, ownership)
        before.append([again.get((place, value), maker[value]) for place, value in needed if value in maker])
        if number >= num_own:
            again.update(dict.fromkeys(makes(action, worker, ownership), number))
        line = worker if number < num_own else (action.pipeline, action.stage)
        if line in last:
            before[number].append(last[line])
        last[line] = number
    return before


# The pass that streams accumulators: every c microbatches the owner of a slot sends its accumulator to the shadows.
#
# The owner sends behind the backward (or its part for the weights) and the send of its gradient, but not behind the
# last backward, where the log follows. A shadow takes a stream at the first place that, in a run with the usual costs,
# is one forward later than the send; at the latest behind all its compute actions. So the shadow seldom waits.
#
#     owner    1B0 1SEND_B0 1STREAM0 1F3 ...
#     shadow            2B0          2F3 1STREAM0 ...
#
# No stream stands inside a pair (`schedules.py`). A shadow's forward is left out if it has taken a stream of that
# microbatch or a later one. Only whole steps stream, not the plan of a recovery; a shadow that is healing takes no
# stream.

_UNDER_WAY = 1.0  # in forwards

_Stream = tuple[float, Action]  # when it is sent, and the action


def is_streamed(microbatch: int, log_every: int, num_microbatches: int) -> bool:
    """Says whether the accumulator is streamed behind the backward of a microbatch."""
    return log_every > 0 and (microbatch + 1) % log_every == 0 and microbatch < num_microbatches - 1


def with_streams(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    log_every: int,
    healing: Collection[tuple[int, Slot]] = (),
) -> Mapping[int, tuple[Action, ...]]:
    """Returns a program with its streams, none for the `healing` (worker, slot); as it is if `log_every` is 0."""
    if log_every == 0:
        return program
    spans: dict[int, list[Span]] = {worker: [] for worker in program}
    for span in dry_run(program, ownership).spans:
        spans[span.worker].append(span)
    sent: dict[int, list[_Stream]] = {worker: [] for worker in program}
    taken: dict[int, list[_Stream]] = {worker: [] for worker in program}
    for worker, mine in spans.items():
        for position, (_, _, _, (stage, op, microbatch, pipeline)) in enumerate(mine):
            if op not in ADDING_OPS or not is_streamed(microbatch, log_every, ownership.grid.microbatches):
                continue
            last = position  # of the backward and its send
            while last + 1 < len(mine) and mine[last + 1].action.op in SEND_OPS:
                last += 1
            stream = (mine[last].end, Action(stage, Op.STREAM, microbatch, pipeline))
            slot = (pipeline, stage)
            takers = [each for each in ownership.shadows_of(*slot) if (each, slot) not in healing]
            for taker in takers:
                taken[taker].append(stream)
            sent[worker] += [stream] if takers else []
    return {worker: _joined(mine, sent[worker], sorted(taken[worker])) for worker, mine in spans.items()}


def _joined(spans: Sequence[Span], sent: Sequence[_Stream], taken: Sequence[_Stream]) -> tuple[Action, ...]:
    """Returns one worker's actions with its streams; none stands between a backward and its transfer."""
    line: list[Action] = []
    to_send, to_take = list(reversed(sent)), list(reversed(taken))
    reached: dict[Slot, int] = {}  # the last microbatch of the streams taken
    for start, _, _, action in spans:
        is_pair = bool(line) and overlap_of(line[-1], action) == "OVERLAP_F_B"
        if action.op not in SEND_OPS and not is_pair:
            while to_send and to_send[-1][0] <= start:
                line.append(to_send.pop()[1])
            while to_take and to_take[-1][0] + _UNDER_WAY <= start:
                line.append(to_take.pop()[1])
                reached[line[-1].pipeline, line[-1].stage] = line[-1].microbatch
        if action.op is not Op.F or action.microbatch > reached.get((action.pipeline, action.stage), -1):
            line.append(action)
    return (*line, *(stream for _, stream in (*reversed(to_send), *reversed(to_take))))


# The pass that gathers and frees the weights of stages, which otherwise lie in shards over the pipelines.
#
# At most `max_active` stages of a worker are whole at once, and at the end of the step none is. The next stages that a
# worker needs are gathered ahead of their use. To make room, the stage whose next use is last is freed. With one stage
# whole at once:
#
#     worker 0   0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD
#
# Every pipeline has the same lists, so the owners of a stage meet in the same order. Where the list scheduler orders
# the actions, the pipelines have different ones: then each stage is whole at all its owners, for all actions.


def with_unshards(program: Mapping[int, tuple[Action, ...]], max_active: int) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions, the same in all pipelines, with UNSHARD and RESHARD around them."""
    return {worker: tuple(_with_unshards(actions, max_active)) for worker, actions in program.items()}


def with_whole_stages(program: Mapping[int, tuple[Action, ...]], ownership: Ownership) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions with UNSHARD before all of them, and RESHARD behind, at all owners."""
    stages = sorted({action.stage for actions in program.values() for action in actions})
    return {
        worker: (*_at(worker, Op.UNSHARD, stages, ownership), *actions, *_at(worker, Op.RESHARD, stages, ownership))
        for worker, actions in program.items()
    }


def _at(worker: int, op: Op, stages: Sequence[int], ownership: Ownership) -> Iterator[Action]:
    for stage in stages:
        yield from (_on(op, (pipeline, stage)) for pipeline in ownership.pipelines_of(worker, stage)[:1])


def _with_unshards(actions: Sequence[Action], max_active: int) -> Iterator[Action]:
    whole: list[Slot] = []
    for action, wanted in zip(actions, _next_slots(actions, max_active), strict=True):
        yield from (_on(Op.RESHARD, slot) for slot in whole if slot not in wanted)
        yield from (_on(Op.UNSHARD, slot) for slot in wanted if slot not in whole)
        whole = wanted
        yield action
    yield from (_on(Op.RESHARD, slot) for slot in whole)


def _next_slots(actions: Sequence[Action], most: int) -> list[list[Slot]]:
    """Returns for each action the next `most` slots, its own first, in the order of their next use."""
    wanted: list[list[Slot]] = []
    order: list[Slot] = []
    for action in reversed(actions):
        slot = (action.pipeline, action.stage)
        order = [slot, *(each for each in order if each != slot)]
        wanted.append(order[:most])
    return wanted[::-1]


def _on(op: Op, slot: Slot) -> Action:
    pipeline, stage = slot
    return Action(stage, op, pipeline=pipeline)


# The pass that adds the end of a step: reduce, log, commit and step for every replica, and healing of new shadows.
#
# Every worker goes through the same stages in the same order, owners before shadows, so that workers never wait in a
# circle. A value that is held at the start is not made again.
#
#     owner    ... last backward  REDUCE_GRAD  LOG  COMMIT  STEP
#     shadow   ...                             LOG  COMMIT  STEP
#
# The owner of a slot sends its state to a new shadow before its own first wait, so it arrives even if other workers
# fail later. The shadow receives it behind its last SEND or UNSHARD: from there on others wait for it at the end of the
# step only.

_MEETS = frozenset(op for op, row in OP_TABLE.items() if row.meets)
_MAY_WAIT = _MEETS | {op for op, row in OP_TABLE.items() if any(term.at is Where.WIRE for term in row.needs)}
_AWAITED = _MEETS | SEND_OPS


def with_end_of_step(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    held: Collection[Held] = (),
    healing: Collection[tuple[int, Slot]] = (),
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with the actions behind the backwards; `healing` shadows get the state of their slot.

    A slot whose owner holds the reduced gradient at the start is not reduced again. The owner sends its LOG to the
    shadows that lack it.
    """
    there = frozenset(each for each in held if each[1].kind in (Kind.REDUCED, Kind.LOGGED))
    return {worker: with_end(worker, actions, ownership, there, healing) for worker, actions in program.items()}


def with_end(
    worker: int,
    actions: Sequence[Action],
    ownership: Ownership,
    there: Collection[Held] = (),
    healing: Collection[tuple[int, Slot]] = (),
) -> tuple[Action, ...]:
    """Returns one worker's part of `with_end_of_step`; `there` are the REDUCED and LOGGED values that are held."""
    return (*_with_heals(worker, actions, ownership, healing), *_end(worker, ownership, there))


def _by_stage(slots: Collection[Slot]) -> list[Slot]:
    return sorted(slots, key=lambda slot: (slot[1], slot[0]))


def _with_heals(
    worker: int, actions: Sequence[Action], ownership: Ownership, healing: Collection[tuple[int, Slot]]
) -> list[Action]:
    sent = {slot for _, slot in healing if ownership.owner(*slot) == worker}
    taken = {slot for taker, slot in healing if taker == worker}
    last = max((position for position, action in enumerate(actions, 1) if action.op in _AWAITED), default=0)
    waits = (position for position, action in enumerate(actions) if action.op in _MAY_WAIT)
    first = min(next(waits, 0), last)  # the receipt of a state is a wait too
    return [*actions[:first], *_heals(sent), *actions[first:last], *_heals(taken), *actions[last:]]


def _heals(slots: Collection[Slot]) -> list[Action]:
    return [Action(stage, Op.HEAL, pipeline=pipeline) for pipeline, stage in _by_stage(slots)]


def _end(worker: int, ownership: Ownership, there: Collection[Held]) -> list[Action]:
    owned, shadowed = _by_stage(ownership.slots_of(worker)), _by_stage(ownership.shadowed_by(worker))
    first = {stage: (pipeline, stage) for pipeline, stage in reversed(owned)}
    end = [
        Action(stage, Op.REDUCE_GRAD, pipeline=pipeline)
        for pipeline, stage in owned
        if first[stage] == (pipeline, stage) and (worker, Value(Kind.REDUCED, pipeline, stage)) not in there
    ]
    end += [Action(stage, Op.LOG, pipeline=pipeline) for pipeline, stage in owned]
    end += [
        Action(stage, Op.LOG, pipeline=pipeline)
        for pipeline, stage in shadowed
        if (worker, Value(Kind.LOGGED, pipeline, stage)) not in there
    ]
    end += [Action(s, op, pipeline=d) for op in (Op.COMMIT, Op.STEP) for d, s in (*owned, *shadowed)]
    return end
