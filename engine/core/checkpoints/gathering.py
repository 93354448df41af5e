"""Gathers the parts of a checkpoint from the workers, and the hashes of its layers, until it is whole.

Rules: a manifest is written only of a step whose replicas agree: its hashes are complete, and no two of them differ.
Nothing waits. A checkpoint that lacks a part when a later one is whole, or at the end, is given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.core.checkpoints.manifest import LayerHash, Part

DISPUTED = "the hashes of its replicas are incomplete or differ"
INCOMPLETE = "not all of its parts were written"
_MOST_PENDING = 4  # checkpoints; a step that lacks a part still lacks it after so many later ones


class Unfinished(NamedTuple):
    """A checkpoint that is not whole yet: its parts by layer and shard, its hashes once they are complete."""

    parts: Mapping[tuple[int, int], Part] = {}
    hashes: tuple[LayerHash, ...] = ()

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


def begin(gathering: Gathering, step: int) -> Gathering:
    """Returns the gathering after the commit of a step that is to be kept; a repetition changes nothing."""
    if step <= gathering.begun:
        return gathering
    return Gathering({**gathering.pending, step: Unfinished()}, step)


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
    """Returns the gathering after news of a step; a whole checkpoint settles all that are older."""
    pending = {**gathering.pending, step: found}
    if not found.is_whole:
        late = sorted(pending)[:-_MOST_PENDING]
        left = {each: kept for each, kept in pending.items() if each not in late}
        return gathering._replace(pending=left), tuple(GivenUp(each, INCOMPLETE) for each in late)
    given_up = tuple(GivenUp(each, INCOMPLETE) for each in sorted(pending) if each < step)
    left = {each: kept for each, kept in pending.items() if each > step}
    parts = tuple(part for _, part in sorted(found.parts.items()))
    return gathering._replace(pending=left), (*given_up, Whole(step, found.hashes, parts))
