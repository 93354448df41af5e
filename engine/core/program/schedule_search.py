"""The search for a short schedule under a limit of memory, from measured costs.

1. Greedy lists, by many rules: as soon as a worker is free it takes what is ready, by the priority of the rule. The
   part of a backward for the weights (W) fills gaps, as in zero-bubble schedules (Qi et al., ICLR 2024, section 3).
2. Exchanges of neighbours in the best list: two actions that follow each other on a worker without a gap, on the
   longest path through the step (Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop, 1996).

Rule: on every stage the microbatches keep their order, forwards and backwards alike. So the bits are those of any
other schedule. Draws have keys: the same profile and limit give the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, product
from math import inf
from operator import add

from engine.core.action import Action, Op, make_action
from engine.core.errors import ensure
from engine.core.ownership import Placement, directions_of, turned, worker_of
from engine.core.program.dry_run import peak_stash
from engine.core.program.offload import line_with_offloads
from engine.core.program.schedules import SCHEDULES, ComputeList, ComputeLists, in_slices
from engine.core.random_key import random_key

_KIND = {Op.F: 0, Op.I: 1, Op.B: 1, Op.W: 2}
STEPS = 1_000_000  # actions of the lists that are tried
_MOST_KEY = 1 << 63
_CLOSE = 1.001  # times what is possible at best: good enough


@dataclass(frozen=True, slots=True)
class Profile:
    """What actions take, in one unit of time: a forward, the backward's two parts (by stage), a transfer."""

    forward: tuple[float, ...]
    for_input: tuple[float, ...]
    for_weights: tuple[float, ...]
    transfer: tuple[float, ...]  # from each stage to the next
    copy_time: float | None = None  # of a residual to the host, in forwards; None if it is not known

    def times(self, factor: float) -> Profile:
        """Returns the profile of actions that take so many times as long."""
        costs = self.forward, self.for_input, self.for_weights, self.transfer
        forward, for_input, for_weights, transfer = (tuple(factor * each for each in of) for of in costs)
        return Profile(forward, for_input, for_weights, transfer, self.copy_time)

    def cost(self, action: Action) -> float:
        """Returns what an action takes; nothing if it computes nothing."""
        stage = action.stage
        if action.op is Op.F:
            return self.forward[stage]
        for_input = self.for_input[stage] if action.op in (Op.I, Op.B) else 0.0
        return for_input + (self.for_weights[stage] if action.op in (Op.W, Op.B) else 0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """P workers, their stages, M microbatches or slices; a worker stashes at most `stash` residuals of a stage."""

    num_workers: int
    stages_per_worker: int
    microbatches: int
    placement: Placement
    stash: int
    slices: int = 1  # of a microbatch

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.num_workers * self.stages_per_worker

    def owners(self) -> list[int]:
        """Returns the worker of each stage."""
        return [worker_of(stage, self.num_workers, self.placement) for stage in range(self.stages)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The step of one schedule: its length, and the most microbatches stashed by a worker, also with offload."""

    schedule: str
    placement: Placement
    length: float
    stash: float
    fits: bool
    offloaded: float | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was found and the named schedules, the shortest within the limit first; none can be shorter than `least`."""

    rows: tuple[Candidate, ...]
    lists: ComputeLists
    least: float


def even_profile(stages: int, forward: float, for_input: float, for_weights: float, transfer: float) -> Profile:
    """Returns the profile of stages that all take the same."""
    return Profile((forward,) * stages, (for_input,) * stages, (for_weights,) * stages, (transfer,) * (stages - 1))


def searched(
    stages: int,
    stages_per_worker: int,
    microbatches: int,
    profile: Profile,
    memory: float | None = None,
    steps: int = STEPS,
    slices: int = 1,
) -> SearchResult:
    """Returns the shortest schedule in which a worker stashes at most `memory` microbatches of its layers (>= 1).

    By default the hungriest named schedule is the limit; the lists that are tried have `steps` actions together. With
    `slices` in a microbatch the profile is of a slice.
    """
    num_workers, num_items = stages // stages_per_worker, microbatches * slices
    fitting = {
        name: schedule
        for name, schedule in SCHEDULES.items()
        if schedule.takes(stages_per_worker)
        and num_items >= schedule.least_microbatches(num_workers)
        and directions_of(name) == 1
        and not (slices > 1 and schedule.overlaps)
    }
    size = num_workers, num_items + slices - 1, stages_per_worker
    named = {name: tuple(in_slices(line, slices) for line in of(*size)) for name, of in fitting.items()}
    most = max(map(most_stash, named.values()))
    stash = most if memory is None else int(memory * stages_per_worker * slices)
    placements: tuple[Placement, ...] = ("loop", "v") if stages_per_worker > 1 else ("loop",)
    made = []
    for placement in placements:
        shape = Shape(num_workers, stages_per_worker, num_items, placement, stash, slices)
        is_placed = {name for name, each in fitting.items() if stages_per_worker == 1 or each.placement == placement}
        start = [named[name] for name in fitting if name in is_placed]
        made.append((search(shape, profile, start, steps), shape))
    lists, shape = min(made, key=lambda one: length_of(one[0], profile, slices))
    rows = [_candidate("found", shape.placement, lists, profile, shape)]
    rows += [_candidate(name, fitting[name].placement, of, profile, shape) for name, of in named.items()]
    return SearchResult(
        tuple(sorted(rows, key=lambda row: (not row.fits, row.length, row.schedule != "found"))),
        lists,
        min(_least(shape, profile) for _, shape in made),
    )


def search(shape: Shape, profile: Profile, start: Sequence[ComputeLists] = (), steps: int = STEPS) -> ComputeLists:
    """Returns the shortest lists that it finds, none longer than those of `start` that keep to the limit."""
    ensure(shape.stash >= shape.stages_per_worker * shape.slices, "a microbatch is stashed once on each own stage")
    fitting = [lists for lists in start if most_stash(lists) <= shape.stash]
    fitting += [lists for rule in _rules(shape) if (lists := _Greedy(shape, profile, rule).lists())]
    needs = _Needs(profile, shape.slices)
    best = min((_Timeline(lists, needs) for lists in fitting), key=lambda timeline: timeline.length)
    return _exchanged(best, needs, shape, profile, steps)


def length_of(lists: ComputeLists, profile: Profile, slices: int = 1) -> float:
    """Returns how long a step takes; infinity if some actions wait for each other."""
    timeline = _Timeline(lists, _Needs(profile, slices))
    return timeline.length if timeline.is_whole else inf


@dataclass(frozen=True, slots=True)
class _Rule:
    """A worker has at most `ahead[worker]` forwards without their backward; `slack` is in lengths of a W.

    W runs if nothing else is ready for `slack` of its time, and with its I if `slack` is None.
    """

    ahead: tuple[int, ...]
    slack: float | None
    forward_first: bool
    deep_first: bool


def _rules(shape: Shape) -> Iterator[_Rule]:
    p, v = shape.num_workers, shape.stages_per_worker
    for lead, slack, forward_first, deep_first in product(
        (1.0, 1.5, 2.0, 4.0), (None, 0.0, 0.5, 1.0), (False, True), (False, True) if v > 1 else (True,)
    ):
        ahead = tuple(int(lead * (p - 1 - worker)) + shape.slices + (v - 1) * p for worker in range(p))
        yield _Rule(ahead, slack, forward_first, deep_first)


class _Greedy:
    """One list per worker, made in the order of time."""

    def __init__(self, shape: Shape, profile: Profile, rule: _Rule):
        self._shape, self._profile, self._rule = shape, profile, rule
        self._owner = shape.owners()
        self._stages = [[s for s, owner in enumerate(self._owner) if owner == w] for w in range(shape.num_workers)]
        self._num = {op: [0] * shape.stages for op in (Op.F, Op.I, Op.W)}  # microbatches that are done, by stage
        # When the input of each microbatch is at a stage, and the gradient of its output.
        self._inputs: list[list[float]] = [[] for _ in self._owner]
        self._gradients: list[list[float]] = [[] for _ in self._owner]
        self._inputs[0] = [0.0] * shape.microbatches
        self._actions: list[list[Action]] = [[] for _ in range(shape.num_workers)]
        self._free = [0.0] * shape.num_workers
        self._events = [(0.0, worker) for worker in range(shape.num_workers)]

    def lists(self) -> ComputeLists | None:
        """Returns the lists; None if the limit of memory leaves no way to the end."""
        while self._events:
            now, worker = heappop(self._events)
            if now >= self._free[worker] and (chosen := self._choice(worker, now)):
                self._run(worker, *chosen)
        done = all(num == self._shape.microbatches for nums in self._num.values() for num in nums)
        return tuple(map(tuple, self._actions)) if done else None

    def _choice(self, worker: int, now: float) -> tuple[int, Op] | None:
        """Returns the stage and the op that a worker begins now; None if it waits."""
        self._free[worker] = now
        backward, waits_b = self._next(worker, now, self._gradients, Op.I)
        forward, waits_f = self._next(worker, now, self._inputs, Op.F)
        room = forward is not None and self._has_room(worker, forward)
        if forward is not None and room and (backward is None or self._rule.forward_first):
            return forward, Op.F
        if backward is not None:
            return backward, Op.B if self._rule.slack is None else Op.I
        pending = [stage for stage in self._stages[worker] if self._num[Op.W][stage] < self._num[Op.I][stage]]
        if not pending:
            return None
        stage = min(pending, key=lambda stage: self._num[Op.W][stage])
        is_soon = min(waits_b, waits_f) < (self._rule.slack or 0.0) * self._profile.for_weights[stage]
        return None if is_soon and (forward is None or room) else (stage, Op.W)

    def _next(self, worker: int, now: float, there: list[list[float]], op: Op) -> tuple[int | None, float]:
        """Returns the stage with the next forward or backward that is ready, and how long it is to one that comes."""
        ready, wait = [], inf
        for stage in self._stages[worker]:
            number = self._num[op][stage]
            if number < len(there[stage]) and (op is Op.F or number < self._num[Op.F][stage]):
                if there[stage][number] <= now:
                    ready.append(stage)
                else:
                    wait = min(wait, there[stage][number] - now)
        last = max if self._rule.deep_first else min
        return (last(ready) if op is Op.F else max(ready)) if ready else None, wait

    def _has_room(self, worker: int, stage: int) -> bool:
        own = self._stages[worker]
        forwards, inputs, weights = (sum(self._num[op][local] for local in own) for op in (Op.F, Op.I, Op.W))
        num, slices = self._num[Op.F], self._shape.slices  # the backward of the last one comes first
        behind = (num[stage] // slices + 1) * slices
        wanted = sum(min(slices, behind - num[later]) for later in own if later >= stage)
        has_memory = forwards - weights + wanted <= self._shape.stash
        return has_memory and forwards - inputs + wanted <= self._rule.ahead[worker]

    def _run(self, worker: int, stage: int, op: Op) -> None:
        counted = (Op.I, Op.W) if op is Op.B else (op,)
        action = make_action(stage, op, self._num[counted[0]][stage])
        self._actions[worker].append(action)
        for part in counted:
            self._num[part][stage] += 1
        end = self._free[worker] = self._free[worker] + self._profile.cost(action)
        heappush(self._events, (end, worker))
        if op is Op.F and stage + 1 < self._shape.stages:
            self._arrive(self._inputs, stage + 1, end + self._profile.transfer[stage])
        elif op is Op.F:
            for _ in range(0 if (action.microbatch + 1) % self._shape.slices else self._shape.slices):
                self._arrive(self._gradients, stage, end)
        elif op is not Op.W and stage > 0:
            self._arrive(self._gradients, stage - 1, end + self._profile.transfer[stage - 1])

    def _arrive(self, there: list[list[float]], stage: int, at: float) -> None:
        there[stage].append(at)
        heappush(self._events, (at, self._owner[stage]))


_Key = tuple[int, int, int, int]  # kind, stage, microbatch, pipeline


class _Needs(dict[Action, tuple[float, tuple[tuple[_Key, float], ...], tuple[_Key, ...]]]):
    """What each action takes, what it needs and how long that is on its way, and what it makes; filled on demand."""

    def __init__(self, profile: Profile, slices: int):
        super().__init__()
        self._profile, self._slices = profile, slices

    def __missing__(self, action: Action) -> tuple[float, tuple[tuple[_Key, float], ...], tuple[_Key, ...]]:
        stage, op, microbatch, way = action
        needs: list[tuple[_Key, float]] = []
        if op is Op.F and stage:
            needs.append(((0, stage - 1, microbatch, way), self._profile.transfer[stage - 1]))
        elif op is Op.W:
            needs.append(((1, stage, microbatch, way), 0.0))
        elif op is not Op.F:
            needs.append(((0, stage, turned(microbatch, self._slices), way), 0.0))
            if stage + 1 < len(self._profile.forward):
                needs.append(((1, stage + 1, microbatch, way), self._profile.transfer[stage]))
        made = tuple((kind, stage, microbatch, way) for kind in ((1, 2) if op is Op.B else (_KIND[op],)))
        self[action] = self._profile.cost(action), tuple(needs), made
        return self[action]


class _Timeline:
    """When each action of some lists ends, and which other one it follows without a gap."""

    def __init__(self, lists: ComputeLists, needs: _Needs):
        self.lists = lists
        self.ends: list[list[float]] = [[] for _ in lists]
        self._follows: list[list[tuple[int, int]]] = [[] for _ in lists]
        self._walk(needs)
        self.length = max(ends[-1] for ends in self.ends if ends)

    def _walk(self, needs: _Needs) -> None:
        there: dict[_Key, tuple[float, int, int]] = {}  # its end, worker and position
        waiting: dict[_Key, int] = {}
        ready = list(range(len(self.lists)))
        while ready:
            worker = ready.pop()
            line, ends, follows = self.lists[worker], self.ends[worker], self._follows[worker]
            free = ends[-1] if ends else 0.0
            for position in range(len(ends), len(line)):
                cost, needed, made = needs[line[position]]
                start, before = free, (worker, position - 1)
                for key, delay in needed:
                    if (value := there.get(key)) is None:
                        waiting[key] = worker
                        break
                    if value[0] + delay > start:
                        start, before = value[0] + delay, value[1:]
                else:
                    free = start + cost
                    ends.append(free)
                    follows.append(before)
                    for key in made:
                        there[key] = (free, worker, position)
                        if key in waiting:
                            ready.append(waiting.pop(key))
                    continue
                break

    @property
    def is_whole(self) -> bool:
        """Whether every action runs; else some wait for each other."""
        return all(len(ends) == len(line) for ends, line in zip(self.ends, self.lists, strict=True))

    def exchanges(self) -> list[tuple[int, int]]:
        """Returns the places (worker, second position) at the ends of each stretch of the longest path by worker."""
        worker = max(range(len(self.ends)), key=lambda last: self.ends[last][-1])
        position, last, pairs = len(self.ends[worker]) - 1, len(self.ends[worker]) - 1, set[tuple[int, int]]()
        while position >= 0:
            before = self._follows[worker][position]
            if before != (worker, position - 1) or not position:
                if position < last:
                    pairs |= {(worker, position + 1), (worker, last)}
                last = before[1]
            worker, position = before
        return sorted(pairs)


def _exchanged(best: _Timeline, needs: _Needs, shape: Shape, profile: Profile, steps: int) -> ComputeLists:
    now, rounds, enough = best, steps // sum(map(len, best.lists)), _least(shape, profile) * _CLOSE
    heat = max(profile.forward + profile.for_input + profile.for_weights)
    for turn in range(rounds):
        pairs = [pair for pair in now.exchanges() if _may_change(*now.lists[pair[0]][pair[1] - 1 : pair[1] + 1])]
        if not pairs or best.length <= enough:
            break
        key = random_key(0, "exchange", turn)
        worker, second = pairs[key % len(pairs)]
        line = [*now.lists[worker]]
        line[second - 1], line[second] = line[second], line[second - 1]
        changed = tuple(line)
        if peak_stash(changed) > shape.stash:
            continue
        tried = _Timeline((*now.lists[:worker], changed, *now.lists[worker + 1 :]), needs)
        if tried.is_whole and tried.length <= now.length + heat * (1 - turn / rounds) * (key / _MOST_KEY) ** 2:
            now = tried
            best = min(best, now, key=lambda timeline: timeline.length)
    return best.lists


def _least(shape: Shape, profile: Profile) -> float:
    """Returns a length that no schedule goes below: the work of a worker, behind the way to its first stage."""
    way: list[float] = [0.0, *accumulate(map(add, profile.forward, profile.transfer))]
    costs = zip(profile.forward, profile.for_input, profile.for_weights, strict=True)
    work = [shape.microbatches * sum(of_stage) for of_stage in costs]
    owners = shape.owners()
    return max(
        way[owners.index(worker)] + sum(work[stage] for stage, owner in enumerate(owners) if owner == worker)
        for worker in range(shape.num_workers)
    )


def _may_change(first: Action, other: Action) -> bool:
    return first.stage != other.stage or (first.microbatch != other.microbatch and _KIND[first.op] != _KIND[other.op])


def _candidate(name: str, placement: Placement, lists: ComputeLists, profile: Profile, shape: Shape) -> Candidate:
    most, of_microbatch, stays = most_stash(lists), shape.stages_per_worker * shape.slices, None
    if profile.copy_time is not None:
        lines = [line_with_offloads(line, profile.copy_time, shape.slices) for line in lists]
        stays = most_stash(lines) / of_microbatch
    sizes = most / of_microbatch, most <= shape.stash, stays
    return Candidate(name, placement, length_of(lists, profile, shape.slices), *sizes)


def most_stash(lists: Sequence[ComputeList]) -> int:
    """Returns the most residuals of stages that a worker stashes at once."""
    return max(map(peak_stash, lists))
