"""Ownership: the grid of slots of a step, the worker that trains each slot, and the workers that shadow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from typing import Any, Literal

# Placement: the worker of each stage of a pipeline when each worker has several stages.
#
# Stages are dealt out in rounds of one per worker. `loop` deals every round in the order of the workers, `v` deals
# every second round backwards. Six stages on three workers:
#
#               loop       v
#     worker 0  0 3        0 5
#     worker 1  1 4        1 4
#     worker 2  2 5        2 3

Placement = Literal["loop", "v"]
PlacementChoice = Literal["auto", "loop", "v"]  # auto: the placement of the schedule


def worker_of(stage: int, num_workers: int, placement: Placement) -> int:
    """Returns the number, within its pipeline, of the worker that has `stage`."""
    turn, place = divmod(stage, num_workers)
    return num_workers - 1 - place if placement == "v" and turn % 2 else place


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and the last of each run of successive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [(first, last) for first, last in runs]


@dataclass(frozen=True, slots=True)
class Members:
    """Workers, in order, as runs of successive numbers: a message is as long as the gaps between them are many."""

    runs: tuple[tuple[int, int], ...]  # first and last

    @classmethod
    def of(cls, workers: Iterable[int]) -> Members:
        """Returns some workers, which are in order."""
        return cls(tuple(runs_of(workers)))

    def __contains__(self, worker: int) -> bool:
        return any(first <= worker <= last for first, last in self.runs)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(first, last + 1) for first, last in self.runs)


Slot = tuple[int, int]  # (pipeline, stage)
Redundancy = Literal["none", "lazy", "eager", "reroute"]


def turned(microbatch: int, slices: int) -> int:
    """Returns the number with which a slice is numbered from the other end of its microbatch, as in its backward."""
    return microbatch + slices - 1 - 2 * (microbatch % slices)


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a step: D x P slots, M microbatches; `ties` are groups of stages that share a parameter.

    With more than one of `blocks` in a stage of the job, `stages` counts blocks, and so does every number of a stage.
    With `fsdp` a slot has its own shard of the stage, and no slot stands for that of another pipeline; at most so many
    stages of a worker are whole at once. With more than one of `slices` in a microbatch of the job, `microbatches`
    counts slices, and so does every number of a microbatch. Backwards take the slices of a microbatch in reverse order,
    and are numbered in the order in which they run: F0 F1, then B0 of slice 1 and B1 of slice 0.
    """

    stages: int
    microbatches: int
    pipelines: int = 1
    ties: tuple[tuple[int, ...], ...] = ()
    blocks: int = 1
    fsdp: int = 0
    slices: int = 1

    @property
    def noun(self) -> str:
        """The noun for a slot in messages: a whole stage, or a block of one."""
        return "stage" if self.blocks == 1 else "block"

    def slots(self) -> tuple[Slot, ...]:
        """Returns all slots, pipeline by pipeline."""
        return tuple(product(range(self.pipelines), range(self.stages)))

    def has(self, pipeline: int, stage: int, microbatch: int = 0) -> bool:
        """Whether a microbatch of a slot is inside the grid; no number is negative, unless the action has none."""
        return pipeline < self.pipelines and stage < self.stages and microbatch < self.microbatches

    def turned(self, microbatch: int) -> int:
        """Returns the number of the forward of a backward's slice, and of the backward of a forward's."""
        return turned(microbatch, self.slices)

    def place(self, slot: Slot) -> int:
        """Returns the number of a slot, counted pipeline by pipeline."""
        return slot[0] * self.stages + slot[1]

    def places(self, slots: Iterable[Slot]) -> tuple[int, ...]:
        """Returns the numbers of some slots."""
        return tuple(map(self.place, slots))

    def tied_to(self, stage: int) -> tuple[int, ...]:
        """Returns the other stages that share a parameter with `stage`, in order."""
        return tuple(sorted({other for group in self.ties if stage in group for other in group} - {stage}))


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner and the shadows of each slot; slot (pipeline, stage) has the place ``pipeline * stages + stage``.

    `shadows` has one tuple per slot, in the order of succession. It is empty if the job has no shadows.
    """

    grid: Grid
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...] = ()
    # What has been looked up: the slots that each worker owns and shadows, by worker, and under None the hash.
    _known: dict[int | None, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        if None not in self._known:
            self._known[None] = hash((self.grid, self.owners, self.shadows))
        return int(self._known[None])

    def _places(self, worker: int) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        """Returns the slots that a worker owns, and those that it shadows; the first call looks at all workers."""
        if -1 not in self._known:
            by_worker: dict[int, tuple[list[Slot], list[Slot]]] = {-1: ([], [])}
            for place, owner in enumerate(self.owners):
                slot = divmod(place, self.grid.stages)
                by_worker.setdefault(owner, ([], []))[0].append(slot)
                for shadow in self.shadows[place] if self.shadows else ():
                    by_worker.setdefault(shadow, ([], []))[1].append(slot)
            self._known.update({each: (tuple(mine), tuple(others)) for each, (mine, others) in by_worker.items()})
        places: tuple[tuple[Slot, ...], tuple[Slot, ...]] = self._known.get(worker, ((), ()))
        return places

    def owner(self, pipeline: int, stage: int) -> int:
        """Returns the worker that trains the slot."""
        return self.owners[pipeline * self.grid.stages + stage]

    def shadows_of(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """Returns the workers beside the owner that hold a replica of the slot or are about to receive one."""
        return self.shadows[pipeline * self.grid.stages + stage] if self.shadows else ()

    def replicas(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """Returns the owner of a slot, then its shadows."""
        return (self.owner(pipeline, stage), *self.shadows_of(pipeline, stage))

    def slots_of(self, worker: int) -> tuple[Slot, ...]:
        """Returns the slots that `worker` owns, in order."""
        return self._places(worker)[0]

    def shadowed_by(self, worker: int) -> tuple[Slot, ...]:
        """Returns the slots that `worker` shadows, in order."""
        return self._places(worker)[1]

    def held_by(self, worker: int) -> tuple[Slot, ...]:
        """Returns the slots that `worker` owns, then the slots that it shadows."""
        return (*self.slots_of(worker), *self.shadowed_by(worker))

    def run_of(self, pipeline: int, stage: int) -> range:
        """Returns the run of a slot: the consecutive stages around it that its owner owns."""
        owner, first, end = self.owner(pipeline, stage), stage, stage + 1
        while first and self.owner(pipeline, first - 1) == owner:
            first -= 1
        while end < self.grid.stages and self.owner(pipeline, end) == owner:
            end += 1
        return range(first, end)

    def pipelines_of(self, worker: int, stage: int) -> tuple[int, ...]:
        """Returns the pipelines in which `worker` owns `stage`."""
        return tuple(each for each in range(self.grid.pipelines) if self.owner(each, stage) == worker)

    def owners_of(self, stage: int) -> tuple[int, ...]:
        """Returns the workers that own `stage` in some pipeline, each once, in pipeline order."""
        return tuple(dict.fromkeys(self.owner(pipeline, stage) for pipeline in range(self.grid.pipelines)))

    def workers(self) -> tuple[int, ...]:
        """Returns the workers that own or shadow a slot, in order."""
        return tuple(sorted({*self.owners, *(worker for line in self.shadows for worker in line)}))


def by_slot(owners: Iterable[int], stages: int) -> dict[Slot, int]:
    """Returns the owner of each slot, from the owners by place."""
    return {divmod(place, stages): owner for place, owner in enumerate(owners)}


_TWO_WAY = frozenset({"dualpipe"})


def directions_of(schedule: str) -> int:
    """Returns how many pipelines of a schedule, given by name or as CSV, run on the same workers.

    In every second one, stage 0 is on the last worker.
    """
    return 2 if schedule in _TWO_WAY else 1


def fresh(grid: Grid, stages_per_worker: int = 1, placement: Placement = "loop", directions: int = 1) -> Ownership:
    """Returns the ownership at the start of a job: P / V workers per pipeline, numbered pipeline by pipeline.

    A worker owns all blocks of its stages. With two `directions` every second pipeline runs on the workers of the one
    before it, in reverse.
    """
    num_workers = grid.stages // grid.blocks // stages_per_worker
    placed = [worker_of(slot // grid.blocks, num_workers, placement) for slot in range(grid.stages)]
    lines = (placed, [num_workers - 1 - place for place in placed])
    teams = (divmod(pipeline, directions) for pipeline in range(grid.pipelines))
    return Ownership(grid, tuple(team * num_workers + each for team, way in teams for each in lines[way]))


def with_shadows(
    ownership: Ownership,
    redundancy: Redundancy,
    level: int,
    members: Collection[int],
    leaving: Collection[int] = (),
    next_owners: tuple[int, ...] = (),
    host_of: Mapping[int, str] | None = None,
) -> Ownership:
    """Returns the ownership with new shadows up to the number that the policy wants; surplus ones are dropped.

    `lazy` and `eager` want `level` shadows of each slot, `none` wants none, and `reroute` wants one where no other
    worker holds the stage in another pipeline. A new shadow is a member, not the owner, and not leaving. The owner of a
    slot in `next_owners` becomes a shadow first, beside the present ones. A leaving worker stays a shadow until it has
    left. Where `host_of` names hosts, a worker on a host without a replica of the slot comes first; a slot whose
    replicas are all on one host gets one more, so one of the others is surplus next time. In a run of several blocks,
    the owner of the preceding run shadows the first half, and that of the following run (cyclic), or another worker,
    the second half: two workers share the blocks of one that dies. Other slots get the least loaded worker; of several,
    the owner of the nearest preceding stage (cyclic), then those of other pipelines.
    """
    if redundancy == "none" and not next_owners and not any(ownership.shadows):
        return ownership
    slots, due = ownership.grid.slots(), _due(ownership, members, leaving, next_owners)
    shadows = {slot: ownership.shadows_of(*slot) for slot in slots}
    count = partial(_count, ownership, redundancy, level, shadows, leaving)
    staying_members = sorted(set(members).difference(leaving))
    for slot in slots:
        staying = tuple(worker for worker in shadows[slot] if worker not in leaving)
        shadows[slot] = staying if due else _kept(ownership.owner(*slot), staying, count(slot), host_of or {})
    loads = Counter([*ownership.owners * _LOAD_OF_OWNING, *(each for line in shadows.values() for each in line)])

    def add(slot: Slot, worker: int) -> None:
        shadows[slot] += (worker,)
        loads[worker] += 1

    for slot in slots:
        owner = ownership.owner(*slot)
        if slot in due and due[slot] not in shadows[slot]:
            add(slot, due[slot])
        while len(shadows[slot]) < count(slot):
            if not (able := _able((owner, *shadows[slot]), staying_members, host_of or {})):
                break
            add(slot, _best(able, ownership, loads, slot))
        if host_of and shadows[slot] and count(slot) and _on_one_host(owner, shadows[slot], host_of):
            others = [worker for worker in staying_members if host_of.get(worker) != host_of.get(owner)]
            if able := _able((owner, *shadows[slot]), others, host_of):
                add(slot, _best(able, ownership, loads, slot))
    for slot in slots:
        shadows[slot] += tuple(each for each in ownership.shadows_of(*slot) if each in leaving)
    return replace(ownership, shadows=tuple(shadows[slot] for slot in slots))


def _count(
    ownership: Ownership,
    redundancy: Redundancy,
    level: int,
    shadows: Mapping[Slot, tuple[int, ...]],
    leaving: Collection[int],
    slot: Slot,
) -> int:
    """Returns the number of shadows that the policy wants of a slot."""
    if redundancy != "reroute":
        return 0 if redundancy == "none" else level
    others = (shadows[d, slot[1]] for d in range(ownership.grid.pipelines) if d != slot[0])
    holders = {*ownership.owners_of(slot[1]), *(worker for line in others for worker in line)}
    return int(holders <= {ownership.owner(*slot), *leaving})


def healed(
    ownership: Ownership,
    redundancy: Redundancy,
    level: int,
    members: tuple[int, ...],
    leaving: tuple[int, ...],
    next_owners: tuple[int, ...],
    hosts: tuple[int, ...],
) -> Ownership:
    """Returns the ownership of the next step, which all members and the coordinator compute from one document.

    `hosts` has a number for the host of each member; it is empty if all are on one.
    """
    host_of = {each: str(host) for each, host in zip(members, hosts, strict=True)} if hosts else None
    return with_shadows(ownership, redundancy, level, members, leaving, next_owners, host_of)


def _kept(owner: int, staying: tuple[int, ...], most: int, host_of: Mapping[int, str]) -> tuple[int, ...]:
    """Returns the shadows that stay, the first `most`; the last of them is on another host if no other one is."""
    shadows = staying[:most]
    if not shadows or not _on_one_host(owner, shadows, host_of):
        return shadows
    elsewhere = [each for each in staying[most:] if host_of.get(each) != host_of.get(owner)]
    return (*shadows[:-1], elsewhere[0]) if elsewhere else shadows


def _on_one_host(owner: int, shadows: tuple[int, ...], host_of: Mapping[int, str]) -> bool:
    return {host_of.get(each) for each in shadows} == {host_of.get(owner)}


def _due(
    ownership: Ownership, members: Collection[int], leaving: Collection[int], next_owners: tuple[int, ...]
) -> dict[Slot, int]:
    """Returns the next owner of each slot that another worker owns."""
    return {
        slot: worker
        for slot, owner, worker in zip(
            ownership.grid.slots(), ownership.owners, next_owners or ownership.owners, strict=True
        )
        if worker != owner and worker in members and worker not in leaving
    }


# In units of a forward: an owner runs a forward (1) and a backward (2), a shadow at most a forward.
_LOAD_OF_OWNING = 3


def _able(replicas: tuple[int, ...], members: list[int], host_of: Mapping[int, str]) -> list[int]:
    """Returns the members that may get the next of these replicas, in order; on new hosts alone if there are any."""
    able = [each for each in members if each not in replicas]
    hosts = {host_of.get(each) for each in replicas}
    return [each for each in able if host_of and host_of.get(each) not in hosts] or able


def _best(able: Collection[int], ownership: Ownership, loads: Counter[int], slot: Slot) -> int:
    """Returns the best of the workers that may become the next shadow of a slot, by the load that each has by now."""
    run, stage, load = ownership.run_of(*slot), slot[1], loads.__getitem__
    before = _from(slot, -1, able, ownership)
    if len(run) > 1 and ownership.grid.blocks > 1:
        first = next(before)
        behind = next((each for each in _from(slot, 1, able, ownership) if each != first), first)
        from_first, to_last = stage - run[0], run[-1] - stage
        beside = [*[first][: from_first <= to_last], *[behind][: from_first >= to_last]]  # both in the middle
        return min(beside, key=load)
    least = min(map(load, able))
    return next(each for each in before if load(each) == least)


def _from(slot: Slot, step: int, able: Collection[int], ownership: Ownership) -> Iterator[int]:
    """Yields `able` by the distance from a slot to the next slot of each: in its pipeline, then in others, cyclic."""
    grid, (pipeline, stage) = ownership.grid, slot
    left = set(able)
    for more in range(grid.pipelines):
        for way in range(1, grid.stages + 1):
            owner = ownership.owner((pipeline + more) % grid.pipelines, (stage + step * way) % grid.stages)
            if owner in left:
                left.remove(owner)
                yield owner
    yield from (each for each in able if each in left)
