"""Gathers the parts of a checkpoint from the workers, and the hashes of its layers, until it is whole.

Rules: a manifest is written only of a step whose replicas agree: its hashes are complete, and no two of them differ.
A checkpoint is given up when a part of it cannot come any more: a worker cannot write it, or the run ends. An epoch may
begin without a worker that had parts to write: a checkpoint from before it is given up when a later one is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.core.checkpoints.manifest import LayerHash, Part
from engine.core.checkpoints.part_messages import keeps
from engine.core.message_codec import ToWorker
from engine.core.messages import EpochMessage

DISPUTED = "the hashes of its replicas are incomplete or differ"
INCOMPLETE = "not all of its parts were written"


class Unfinished(NamedTuple):
    """A checkpoint that is not whole yet: its parts by layer and shard, its hashes once they are complete.

    `is_orphan` says that an epoch has begun since its parts were ordered.
    """

    parts: Mapping[tuple[int, int], Part] = {}
    hashes: tuple[LayerHash, ...] = ()
    is_orphan: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has the hashes, and every shard of every layer."""
        return bool(self.hashes) and all(self._has(each.layer) for each in self.hashes)

    def _has(self, layer: int) -> bool:
        first = self.parts.get((layer, 0))
        return first is not None and all((layer, shard) in self.parts for shard in range(first.shards))


class Whole(NamedTuple):
    """A checkpoint that is whole: its step, the hashes of its layers, and its parts in order."""

    step: int
    hashes: tuple[LayerHash, ...]
    parts: tuple[Part, ...]


class GivenUp(NamedTuple):
    """A checkpoint that will not be whole, and why."""

    step: int
    why: str


class Gathering(NamedTuple):
    """The checkpoints that are not whole yet, by step; `begun` is the last step that was to be kept."""

    pending: Mapping[int, Unfinished] = {}
    begun: int = -1


Gathered = tuple[Gathering, tuple[Whole | GivenUp, ...]]


def order(gathering: Gathering, told: ToWorker, committed: int) -> Gathering:
    """Returns the gathering after a message to the workers, which may order the parts of the last committed step.

    In a new epoch the workers are ordered to write the parts that the dead have not written.
    """
    pending = gathering.pending
    if isinstance(told, EpochMessage):
        pending = {step: each._replace(is_orphan=True) for step, each in pending.items()}
    if not keeps(told):
        return gathering._replace(pending=pending)
    if committed in pending:
        return Gathering({**pending, committed: pending[committed]._replace(is_orphan=False)}, gathering.begun)
    if committed <= gathering.begun:
        return gathering._replace(pending=pending)
    return Gathering({**pending, committed: Unfinished()}, committed)


def add_part(gathering: Gathering, step: int, part: Part) -> Gathered:
    """Returns the gathering after a part has come; of two files with the same part, the first counts."""
    pending = gathering.pending.get(step)
    if pending is None or (part.layer, part.shard) in pending.parts:
        return gathering, ()
    parts = {**pending.parts, (part.layer, part.shard): part}
    return _settled(gathering, step, pending._replace(parts=parts))


def close(gathering: Gathering, step: int, hashes: tuple[LayerHash, ...]) -> Gathered:
    """Returns the gathering after the last hash of a step; `hashes` is empty if they are incomplete or differ."""
    pending = gathering.pending.get(step)
    if pending is None:
        return gathering, ()
    return _settled(gathering, step, pending._replace(hashes=hashes)) if hashes else give_up(gathering, step, DISPUTED)


def give_up(gathering: Gathering, step: int, why: str) -> Gathered:
    """Returns the gathering without the checkpoint of a step; nothing that still comes of it counts."""
    if step not in gathering.pending:
        return gathering, ()
    pending = {each: kept for each, kept in gathering.pending.items() if each != step}
    return gathering._replace(pending=pending), (GivenUp(step, why),)


def give_up_all(gathering: Gathering) -> Gathered:
    """Returns the gathering at the end of a run, after which nothing comes."""
    return gathering._replace(pending={}), tuple(GivenUp(step, INCOMPLETE) for step in sorted(gathering.pending))


def _settled(gathering: Gathering, step: int, found: Unfinished) -> Gathered:
    """Returns the gathering after news of a step; a whole checkpoint settles the older orphans."""
    pending = {**gathering.pending, step: found}
    if not found.is_whole:
        return gathering._replace(pending=pending), ()
    orphans = [each for each in sorted(pending) if each < step and pending[each].is_orphan]
    left = {each: kept for each, kept in pending.items() if each != step and each not in orphans}
    parts = tuple(part for _, part in sorted(found.parts.items()))
    given_up = (GivenUp(each, INCOMPLETE) for each in orphans)
    return gathering._replace(pending=left), (*given_up, Whole(step, found.hashes, parts))
