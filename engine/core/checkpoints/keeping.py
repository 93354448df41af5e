"""Decides which commits are kept as checkpoints, which worker writes each stage, and which checkpoints may go.

Rules: a stage is written once, by a shadow if it has one, so that its owner pays nothing; stages are shared evenly over
the workers. A shard is written by the first shadow of its slot, or the owner. Every replica of the ownership of a
commit is whole, because each one has voted for it. The newest good checkpoint never goes, nor does one that is in use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from engine.core.duration import DURATION, EPOCHS, parse_duration, parse_epochs
from engine.core.ownership import Ownership, Slot
from engine.core.scalar import whole_number

Kept = TypeVar("Kept")
KEEPING_FORM = "a number of steps such as 100, of epochs as 1epoch, a duration such as 10m, 'end', or 0 for none"
KEEPING_PATTERN = rf"^\s*(?:end|[0-9]+|{EPOCHS}|(?![0.]+[a-z]){DURATION})\s*$"  # the same, for the schemas of files


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which commits are kept: each `every_steps`, each `every_ns`, the last one; a 0 stands for none of its kind.

    Epochs that are not counted yet are `in_epochs`: their commits are not known.
    """

    every_steps: int = 0
    every_ns: int = 0
    last: bool = True
    in_epochs: bool = False

    @property
    def needs_time(self) -> bool:
        """Whether `is_kept` depends on the time."""
        return self.every_ns > 0

    def is_kept(self, step: int, is_last: bool, since_ns: int = 0) -> bool:
        """Returns whether the commit of `step` is kept, `since_ns` after the one that was kept before or the start."""
        if is_last:
            return self.last
        by_step = self.every_steps > 0 and (step + 1) % self.every_steps == 0
        return by_step or (self.every_ns > 0 and since_ns >= self.every_ns)


def keeping_of(text: str) -> Keeping | None:
    """Returns the rule that `text` spells, in the form of `KEEPING_FORM`; None if it has not that form."""
    text = text.strip()
    if text == "end":
        return Keeping()
    if (steps := whole_number(text)) is not None:
        return Keeping(every_steps=steps, last=steps > 0)
    if parse_epochs(text):
        return Keeping(in_epochs=True)
    every_ns = parse_duration(text)
    return Keeping(every_ns=every_ns) if every_ns else None


def keeps_any(text: str) -> bool:
    """Returns whether the rule that `text` spells keeps a commit."""
    return keeping_of(text) != Keeping(last=False)


def writers(ownership: Ownership) -> Mapping[int, tuple[int, ...]]:
    """Returns the workers that write each stage, in the order of the shards; there is one without shards."""
    grid = ownership.grid
    if grid.fsdp:
        last = {slot: ownership.replicas(*slot)[:2][-1] for slot in grid.slots()}  # the first shadow, or the owner
        return {stage: tuple(last[each, stage] for each in range(grid.pipelines)) for stage in range(grid.stages)}
    candidates = {}
    for stage in range(grid.stages):
        owners = ownership.owners_of(stage)
        shadows = {each for pipeline in range(grid.pipelines) for each in ownership.shadows_of(pipeline, stage)}
        candidates[stage] = tuple(sorted(shadows - set(owners)) or sorted(shadows) or owners)
    shared = (_shared(candidates, most) for most in range(1, grid.stages + 1))
    chosen = next(filter(None, shared))
    return {stage: (chosen[stage],) for stage in range(grid.stages)}


def _shared(candidates: Mapping[int, Sequence[int]], most: int) -> dict[int, int] | None:
    """Returns a candidate for each stage, no worker for more than `most` of them; None if that is impossible."""
    chosen: dict[int, int] = {}

    def place(stage: int, tried: set[int]) -> bool:
        for worker in candidates[stage]:
            if worker not in tried:
                tried.add(worker)
                its = [each for each, other in chosen.items() if other == worker]
                if len(its) < most or any(place(each, tried) for each in its):
                    chosen[stage] = worker
                    return True
        return False

    return chosen if all(place(stage, set()) for stage in candidates) else None


class StateShare(NamedTuple):
    """A share of a checkpoint for one worker: a replica that it holds, and which shard of how many that is."""

    slot: Slot
    shard: int = 0
    shards: int = 1


@lru_cache(maxsize=256)
def shares_of(ownership: Ownership, worker: int) -> tuple[StateShare, ...]:
    """Returns the shares of a checkpoint that a worker writes, one for each of its stages, or of their shards."""
    held, is_cut = sorted(ownership.held_by(worker)), ownership.grid.fsdp > 0
    return tuple(
        StateShare((shard, stage) if is_cut else next(slot for slot in held if slot[1] == stage), shard, len(chosen))
        for stage, chosen in writers(ownership).items()
        for shard, writer in enumerate(chosen)
        if writer == worker
    )


def may_go(kept: Sequence[Kept], keep: int, good: Collection[Kept], in_use: Collection[Kept] = ()) -> tuple[Kept, ...]:
    """Returns the checkpoints that are older than the `keep` newest good ones; none if there are not so many.

    `kept` are all checkpoints, from the oldest to the newest; `good` are those among them that are known to be whole.
    """
    stay = [each for each in kept if each in good][-max(1, keep) :]
    if len(stay) < max(1, keep):
        return ()
    return tuple(each for each in kept[: kept.index(stay[0])] if each not in in_use)
