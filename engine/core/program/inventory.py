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

from engine.core.errors import InvariantError
from engine.core.message_kinds import ToAgent, ToWorker, message
from engine.core.ownership import Slot
from engine.core.value import Kind, Value

_LISTED = frozenset({Kind.ACTIVATION, Kind.GRADIENT, Kind.RESIDUAL, Kind.PENDING})


@dataclass(frozen=True, slots=True)
class Inventory:
    """The values that one worker holds. `step` is its open step: its replicas have taken `step` optimizer steps."""

    worker: int
    step: int
    whole: tuple[Slot, ...]
    counted: Mapping[Slot, int] = field(default_factory=dict)
    added: Mapping[Slot, int] = field(default_factory=dict)
    logged: tuple[Slot, ...] = ()
    values: tuple[Value, ...] = ()  # activations, gradients, residuals and pendings, sorted


def to_json(inventory: Inventory) -> str:
    """Returns the text of the inventory; equal inventories have the same text."""
    held = {
        "worker": inventory.worker,
        "step": inventory.step,
        "whole": sorted(inventory.whole),
        "counted": [[*slot, count] for slot, count in sorted(inventory.counted.items())],
        "added": [[*slot, count] for slot, count in sorted(inventory.added.items())],
        "logged": sorted(inventory.logged),
        "values": [
            [*owned, *(list(run) for run in _runs(value.index for value in values))]
            for owned, values in groupby(sorted(inventory.values), key=lambda value: value[:3])
        ],
    }
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
            tuple(value for line in held["values"] for value in _values_of(*line)),
        )
        same = all(type(each) is int and each >= 0 for each in _numbers(inventory)) and to_json(inventory) == text
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvariantError(f"not an inventory: {error!r} in {text[:200]!r}") from error
    if not same:
        raise InvariantError(f"not an inventory as it is written: {text[:200]!r}")
    return inventory


def _runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last of each run of successive numbers."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1]


def _values_of(kind: str, pipeline: int, stage: int, *runs: list[int]) -> Iterator[Value]:
    if kind not in _LISTED:
        raise ValueError(f"{kind!r} is not a kind that an inventory lists")
    for first, last in runs:
        yield from (Value(Kind(kind), pipeline, stage, index) for index in range(first, last + 1))


def _numbers(inventory: Inventory) -> Iterator[int]:
    yield from (inventory.worker, inventory.step)
    for slot in (*inventory.whole, *inventory.logged, *inventory.counted, *inventory.added):
        yield from slot
    yield from inventory.counted.values()
    yield from inventory.added.values()
    for value in inventory.values:
        yield from value[1:]


# The control messages of a recovery: inventories, the document of a plan, and the digest of the plan that was made.
#
# `epoch` of a worker's message is the one that it has accepted.


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


@message
class PrepareMessage(ToWorker):
    """The document of an epoch that will begin with the coming commit; the answer has the same number."""

    number: int
    plan: PlanMessage


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
