"""Inventories: the values that a frozen worker holds, as plain data that round-trips to JSON.

An inventory belongs to one worker and one epoch, and lists values of the open step only. A counter says how many
microbatches the worker's replica of a slot has taken in. `whole` are the slots whose state (weights, optimizer state,
buffers) the worker holds as of the last step boundary. Such a replica can also replace the same stage of another
pipeline, because the reduction brings the buffers of every pipeline to all of them.

As text, the values of one kind and slot are runs of microbatches, first and last: ``["residual",0,1,[0,3],[5,5]]`` are
microbatches 0 to 3 and 5. So a step of 512 microbatches is as long as a step of two. Each inventory has exactly one
text; any other text is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from engine.core.errors import InvariantError
from engine.core.message_kinds import ToAgent, ToWorker, message
from engine.core.ownership import Slot, runs_of
from engine.core.value import Kind, Value

_LISTED = frozenset({Kind.ACTIVATION, Kind.GRADIENT, Kind.RESIDUAL, Kind.CARRY, Kind.PENDING})

IndexRun = tuple[int, int]  # first and last microbatch


class ValueRuns:
    """Values of one worker as runs of successive microbatches, sorted, by kind and slot."""

    __slots__ = ("_runs",)

    def __init__(self, values: Iterable[Value] = ()):
        self._runs: dict[tuple[Kind, int, int], tuple[IndexRun, ...]] = {
            (kind, pipeline, stage): tuple(runs_of(map(itemgetter(3), of_slot)))
            for (kind, pipeline, stage), of_slot in groupby(sorted(values), key=itemgetter(0, 1, 2))
        }

    @classmethod
    def of_runs(cls, lines: Iterable[tuple[Kind, int, int, tuple[IndexRun, ...]]]) -> ValueRuns:
        """Returns the values of some lines: kind, pipeline, stage, and runs that follow each other with gaps."""
        values = cls()
        values._runs = {(kind, pipeline, stage): runs for kind, pipeline, stage, runs in lines}
        return values

    def __iter__(self) -> Iterator[Value]:
        for (kind, pipeline, stage), runs in self._runs.items():
            for first, last in runs:
                yield from (Value(kind, pipeline, stage, index) for index in range(first, last + 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueRuns) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(tuple(self._runs.items()))

    def __repr__(self) -> str:
        return f"ValueRuns({list(self)})"

    def lines(self) -> Iterator[tuple[Kind, int, int, tuple[IndexRun, ...]]]:
        """Yields kind, pipeline and stage with their runs, sorted."""
        return ((*owned, runs) for owned, runs in sorted(self._runs.items()))

    def runs(self, kind: Kind, slot: Slot) -> tuple[IndexRun, ...]:
        """Returns the first and the last microbatch of each run of one kind and slot."""
        return self._runs.get((kind, *slot), ())

    def has(self, kind: Kind, slot: Slot, index: int) -> bool:
        """Whether the value of one microbatch is among them."""
        return any(first <= index <= last for first, last in self.runs(kind, slot))

    def has_all(self, kind: Kind, slot: Slot, start: int, stop: int) -> bool:
        """Whether the values of the microbatches from `start` to before `stop` are among them."""
        return start >= stop or any(first <= start and stop - 1 <= last for first, last in self.runs(kind, slot))

    def since(self, kind: Kind, slot: Slot, start: int) -> Iterator[int]:
        """Yields the microbatches from `start` on."""
        for first, last in self.runs(kind, slot):
            yield from range(max(first, start), last + 1)


class SavedResiduals(NamedTuple):
    """The residuals of a slot that a worker that leaves can send: those of successive microbatches."""

    first: int
    sizes: tuple[int, ...]  # bytes
    forward_ns: int  # the usual time of a forward, with which a microbatch is recomputed
    graph_ns: int  # the usual time to make the graph of a microbatch at the other end
    load_ns: int = 0  # the time to load what makes graphs, once

    def bytes_of(self, microbatch: int) -> int:
        """Returns the bytes of the residual of a microbatch."""
        return self.sizes[microbatch - self.first]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The values that one worker holds. `step` is its open step: its replicas have taken `step` optimizer steps."""

    worker: int
    step: int
    whole: tuple[Slot, ...]
    counted: Mapping[Slot, int] = field(default_factory=dict)
    added: Mapping[Slot, int] = field(default_factory=dict)
    logged: tuple[Slot, ...] = ()
    values: ValueRuns = field(default_factory=ValueRuns)  # activations, gradients, residuals, carries and pendings
    saved: Mapping[Slot, SavedResiduals] = field(default_factory=dict)  # by a worker that leaves
    stuck: str = ""  # why it cannot send other residuals
    rates: Mapping[int, int] = field(default_factory=dict)  # bytes a second to other workers, as far as they are known


def to_json(inventory: Inventory) -> str:
    """Returns the text of the inventory; equal inventories have the same text."""
    held: dict[str, object] = {
        "worker": inventory.worker,
        "step": inventory.step,
        "whole": sorted(inventory.whole),
        "counted": [[*slot, count] for slot, count in sorted(inventory.counted.items())],
        "added": [[*slot, count] for slot, count in sorted(inventory.added.items())],
        "logged": sorted(inventory.logged),
        "values": [
            [kind, pipeline, stage, *map(list, runs)] for kind, pipeline, stage, runs in inventory.values.lines()
        ],
    }
    if inventory.saved or inventory.stuck:
        held["stuck"] = inventory.stuck
        held["rates"] = [list(pair) for pair in sorted(inventory.rates.items())]
        held["saved"] = [
            [*slot, saved.first, saved.forward_ns, saved.graph_ns, saved.load_ns, *saved.sizes]
            for slot, saved in sorted(inventory.saved.items())
        ]
    return json.dumps(held, separators=(",", ":"))


def from_json(text: str) -> Inventory:
    """Returns the inventory that `text` holds; raises InvariantError if `to_json` would not have written `text`."""
    try:
        held = json.loads(text)
        inventory = Inventory(
            held["worker"],
            held["step"],
            tuple((pipeline, stage) for pipeline, stage in held["whole"]),
            {(pipeline, stage): count for pipeline, stage, count in held["counted"]},
            {(pipeline, stage): count for pipeline, stage, count in held["added"]},
            tuple((pipeline, stage) for pipeline, stage in held["logged"]),
            ValueRuns.of_runs(_line_of(*line) for line in held["values"]),
            {
                (pipeline, stage): SavedResiduals(first, tuple(sizes), forward_ns, graph_ns, load_ns)
                for pipeline, stage, first, forward_ns, graph_ns, load_ns, *sizes in held.get("saved", ())
            },
            held.get("stuck", ""),
            dict(held.get("rates", ())),
        )
        same = all(type(each) is int and each >= 0 for each in _numbers(inventory))
        same = same and type(inventory.stuck) is str and to_json(inventory) == text
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvariantError(f"not an inventory: {error!r} in {text[:200]!r}") from error
    if not same:
        raise InvariantError(f"not an inventory as it is written: {text[:200]!r}")
    return inventory


def _line_of(kind: str, pipeline: int, stage: int, *runs: list[int]) -> tuple[Kind, int, int, tuple[IndexRun, ...]]:
    if kind not in _LISTED:
        raise ValueError(f"{kind!r} is not a kind that an inventory lists")
    last = -2
    if not runs:
        raise ValueError(f"no run of {kind!r} of stage {stage}")
    for start, stop in runs:
        if not last + 1 < start <= stop:
            raise ValueError(f"{[start, stop]} is no run of microbatches behind {last}")
        last = stop
    return Kind(kind), pipeline, stage, tuple((start, stop) for start, stop in runs)


def _numbers(inventory: Inventory) -> Iterator[int]:
    yield from (inventory.worker, inventory.step)
    for slot in (*inventory.whole, *inventory.logged, *inventory.counted, *inventory.added, *inventory.saved):
        yield from slot
    yield from (number for saved in inventory.saved.values() for number in (*saved[:1], *saved.sizes, *saved[2:]))
    yield from (number for pair in inventory.rates.items() for number in pair)
    yield from inventory.counted.values()
    yield from inventory.added.values()
    for _, pipeline, stage, runs in inventory.values.lines():
        yield from (pipeline, stage, *(each for run in runs for each in run))


# The control messages of a recovery: inventories, the document of a plan, and the digest of the plan that was made.
#
# `epoch` of a worker's message is the one that it has accepted.


@dataclass(frozen=True, slots=True)
class ProgramRest:
    """How a worker goes on in its program of the open step, up to its last backward."""

    worker: int
    first: int = -1  # the position at which it goes on; -1: it has no program
    dropped: tuple[int, ...] = ()  # positions of transfers of values that have come
    sends: str = ""  # what it sends again, in front, as actions with blanks between them
    rewritten: str | None = None  # its program in place of the rest of the one that it had


@dataclass(frozen=True, slots=True)
class Repair:
    """A plan by what it changes in the programs that were running; `plan_repair.py` decides it."""

    rests: tuple[ProgramRest, ...]  # of every member
    adopted: tuple[Slot, ...]
    done: tuple[Slot, ...]
    logged: tuple[tuple[int, Slot], ...]  # shadows that hold the inputs of the optimizer step of a slot that is done
    healing: tuple[tuple[int, Slot], ...]


@message
class PlanMessage(ToWorker):
    """The document that every member makes the plan of an epoch from, when the last inventory is in."""

    epoch: int
    committed: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]  # members that had given notice when the epoch was made; they do not become shadows
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    inventories: tuple[tuple[int, str], ...]  # worker and text
    wanted: tuple[int, ...] = ()  # the wanted owner of each slot, which becomes a shadow; empty if no slot is to move
    hosts: tuple[int, ...] = ()  # a number for the host of each member; empty if all are on one
    before: tuple[int, ...] = ()  # the owners when the open step began
    ships: tuple[tuple[int, int, int, int], ...] = ()  # the residuals that are sent, as `Ship`
    repair: Repair | None = None  # the plan, if it is a repair: then no member has to make one
    schedule: str = ""  # of the open step; empty: the job's own
    digest: str = ""  # of the grid and the whole repair, if `repair` is the part of one member


@dataclass(frozen=True, slots=True)
class GridChange:
    """What differs from the grid of an earlier plan, which all members that stay have: workers, or values by place."""

    base: int  # the epoch of that plan
    gone: tuple[int, ...]
    joined: tuple[tuple[int, int], ...]  # worker and number of its host; -1 if all are on one
    owners: tuple[tuple[int, int], ...]
    shadows: tuple[tuple[int, tuple[int, ...]], ...]
    before: tuple[tuple[int, int], ...]  # to the owners of that plan
    schedule: str  # of the open step


@message
class PlanPartMessage(ToWorker):
    """A `PlanMessage` with a repair, for one member: what changed in the grid, and how it and its peers go on."""

    epoch: int
    committed: int
    leaving: tuple[int, ...]
    change: GridChange
    repair: Repair
    digest: str  # of the grid that follows, and of the whole repair
    ends: bool  # whether a slot of any member is done
    wanted: tuple[tuple[int, int], ...] = ()  # the wanted owners that are not those of the grid, by place


@message
class WholePlanMessage(ToAgent):
    """The worker cannot follow its part of a plan, and needs the whole: it has another grid, or more peers."""

    epoch: int


@message
class PrepareMessage(ToWorker):
    """The document of an epoch that will begin with the coming commit; the answer has the same number."""

    number: int
    plan: PlanMessage


@message
class PreparePartMessage(ToWorker):
    """A `PrepareMessage` for one member: its part of the plan, and the inventory with which it will begin."""

    number: int
    part: PlanPartMessage
    holds: str


@message
class InventoryMessage(ToAgent):
    """All that a frozen worker holds, as text; `whole` are the places of the slots whose replica it has whole."""

    epoch: int
    holds: str
    whole: tuple[int, ...]


@message
class PlannedMessage(ToAgent):
    """The worker has made the plan: its digest, and the stages that cannot be recovered."""

    epoch: int
    digest: str
    lost_stages: tuple[int, ...]


@message
class PreparedMessage(ToAgent):
    """The worker has made the plan of a coming epoch, for the order with this number."""

    epoch: int
    number: int
    digest: str
