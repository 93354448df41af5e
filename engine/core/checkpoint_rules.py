"""Decides which commits are kept as checkpoints, which worker writes each stage, and which checkpoints may go.

Rules: a stage is written once, by a shadow if it has one, so that its owner pays nothing; stages are shared evenly over
the workers. A shard is written by the first shadow of its slot, or the owner. Every replica of the ownership of a
commit is whole, because each one has voted for it. The newest good checkpoint never goes, nor does one that is in use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from engine.core.errors import ExitCode
from engine.core.manifest import LayerHash, Part
from engine.core.message_kinds import TextsToAgent, ToAgent, ToWorker, message
from engine.core.messages import CommitMessage, EpochMessage, GoMessage
from engine.core.monitors import NO_MONITORS, Monitors
from engine.core.ownership import Ownership, Slot
from engine.core.units import DURATION, EPOCHS, parse_duration, parse_epochs, whole_number

C = TypeVar("C")  # a checkpoint
KEEPING_FORM = "a number of steps such as 100, of epochs as 1epoch, a duration such as 10m, 'end', or 0 for none"
KEEPING_PATTERN = rf"^\s*(?:end|[0-9]+|{EPOCHS}|(?![0.]+[a-z]){DURATION})\s*$"  # the same, for the schemas of files


@dataclass(frozen=True, slots=True)
class KeepRule:
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


def keeping_of(text: str) -> KeepRule | None:
    """Returns the rule that `text` spells, in the form of `KEEPING_FORM`; None if it has not that form."""
    text = text.strip()
    if text == "end":
        return KeepRule()
    if (steps := whole_number(text)) is not None:
        return KeepRule(every_steps=steps, last=steps > 0)
    if parse_epochs(text):
        return KeepRule(in_epochs=True)
    every_ns = parse_duration(text)
    return KeepRule(every_ns=every_ns) if every_ns else None


def keeps_any(text: str) -> bool:
    """Returns whether the rule that `text` spells keeps a commit."""
    return keeping_of(text) != KeepRule(last=False)


@lru_cache(maxsize=4)
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
    stages_of: dict[int, set[int]] = defaultdict(set)  # the same by worker

    def moves(stage: int, tried: set[int]) -> Iterator[tuple[int, int | None]]:
        """Yields each worker that may take a stage, with the stage that it must then give to another worker."""
        for worker in candidates[stage]:
            if worker not in tried:
                tried.add(worker)
                is_free = len(stages_of[worker]) < most
                yield from ((worker, each) for each in ((None,) if is_free else sorted(stages_of[worker])))

    def is_placed(stage: int) -> bool:
        """Gives a stage to a worker; a chain of moves may be as long as the pipeline, too long for a recursion."""
        tried: set[int] = set()
        chain, takers = [(stage, moves(stage, tried))], list[int]()
        while chain:
            worker, given_up = next(chain[-1][1], (-1, None))
            if worker < 0:
                chain.pop()
                del takers[-1:]
                continue
            takers.append(worker)
            if given_up is None:
                for (moved, _), taker in reversed([*zip(chain, takers, strict=True)]):
                    stages_of[chosen.get(moved, taker)].discard(moved)
                    chosen[moved] = taker
                    stages_of[taker].add(moved)
                return True
            chain.append((given_up, moves(given_up, tried)))
        return False

    return chosen if all(map(is_placed, candidates)) else None


class StateShare(NamedTuple):
    """A share of a checkpoint for one worker: a replica that it holds, and which shard of how many that is."""

    slot: Slot
    shard: int = 0
    shards: int = 1


@lru_cache(maxsize=256)
def shares_of(ownership: Ownership, worker: int) -> tuple[StateShare, ...]:
    """Returns the shares of a checkpoint that a worker writes, one for each of its stages, or of their shards."""
    slots, is_cut, writes = sorted(ownership.held_by(worker)), ownership.grid.fsdp > 0, writers(ownership)
    return tuple(
        StateShare((shard, stage) if is_cut else next(each for each in slots if each[1] == stage), shard, len(chosen))
        for stage in sorted({stage for _, stage in slots})
        for chosen in (writes[stage],)
        for shard, writer in enumerate(chosen)
        if writer == worker
    )


def may_go(checkpoints: Sequence[C], keep: int, good: Collection[C], in_use: Collection[C] = ()) -> tuple[C, ...]:
    """Returns the `checkpoints` that are older than the `keep` newest good ones; none if there are not so many.

    They are in order, the oldest first; `good` are those among them that are known to be whole.
    """
    stay = [each for each in checkpoints if each in good][-max(1, keep) :]
    if len(stay) < max(1, keep):
        return ()
    return tuple(each for each in checkpoints[: checkpoints.index(stay[0])] if each not in in_use)


# The ladder: the source of a lost state, the nearest first, and the end of a run that has none.
#
#     shadow -> the same stage in another pipeline -> newest good checkpoint -> an older one -> stop
#
# The first two rungs are heirs, which the membership protocol names. Below them, the launcher resumes the same run from
# a checkpoint, but only a few times an hour: a recurring cause would never end.

_WITHIN_NS = 3600 * 1_000_000_000


class Ladder(NamedTuple):
    """The times at which a run resumed from a checkpoint; it may do so `most` times in an hour."""

    most: int
    at_ns: tuple[int, ...] = ()

    def used(self, now_ns: int) -> int:
        """Returns how often it resumed in the last hour."""
        return sum(now_ns - each < _WITHIN_NS for each in self.at_ns)


def next_rung(ladder: Ladder, good: int | None, now_ns: int) -> tuple[Ladder, ExitCode | None]:
    """Returns the ladder after the loss of a state, and the exit code of a run that must stop, else None.

    `good` is the step of the newest good checkpoint, None if there is none.
    """
    if good is None:
        return ladder, ExitCode.STATE_LOST
    if ladder.used(now_ns) >= ladder.most:
        return ladder, ExitCode.STOPPED_RESUMABLE
    return ladder._replace(at_ns=(*ladder.at_ns, now_ns)), None


# The ends after which a run can be resumed from its last committed step: the workers that are left have its state. An
# exception and a loss that is not finite are of the open step. Not if replicas disagree, nor if a state is lost.
_KEEPS_LAST = frozenset({ExitCode.NOT_FINITE, ExitCode.USAGE, ExitCode.NOT_RECOVERED, ExitCode.COORDINATOR_UNAVAILABLE})


def keeps_last(code: int) -> bool:
    """Returns whether the last committed step of a run is kept that an error with this code ends."""
    return code in _KEEPS_LAST


# The control messages of a worker about the parts of a checkpoint that it writes, and those that order one.
def keeps(command: ToWorker | None) -> bool:
    """Returns whether a message to the workers orders a checkpoint of the last committed step."""
    if isinstance(command, EpochMessage):
        return keeps(command.commit) or keeps(command.go)
    return isinstance(command, CommitMessage | GoMessage) and command.keep


@message
class KeptMessage(ToAgent):
    """A part of the checkpoint of a step is on disk. The times are those of its write and of its sync.

    `copy_ns` is the time of the copy of all that the worker writes of this step, with its first part, else 0.
    """

    step: int
    part: Part
    copy_ns: int
    write_ns: int
    sync_ns: int


@message
class UnkeptMessage(TextsToAgent):
    """The worker cannot write its share of the checkpoint of a step; training continues."""

    step: int
    why: str


# Gathers the parts of a checkpoint from the workers, and the hashes of its layers, until it is whole.
#
# Rules: a manifest is written only of a step whose replicas agree: its hashes are complete, and no two of them differ.
# A checkpoint is abandoned when a part of it can no longer come: a worker cannot write it, or the run ends. An epoch
# may begin without a worker that had parts to write: an older checkpoint is abandoned when a later one is whole.

DISPUTED = "the hashes of its replicas are incomplete or differ"
INCOMPLETE = "not all of its parts were written"


class PartialCheckpoint(NamedTuple):
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


class CompleteCheckpoint(NamedTuple):
    """A checkpoint that is whole: its step, the hashes of its layers, and its parts in order."""

    step: int
    hashes: tuple[LayerHash, ...]
    parts: tuple[Part, ...]


class AbandonedCheckpoint(NamedTuple):
    """A checkpoint that will not be whole, and why."""

    step: int
    why: str


class Gathering(NamedTuple):
    """The checkpoints that are not whole yet, by step; `begun` is the last step that was to be kept."""

    pending: Mapping[int, PartialCheckpoint] = {}
    begun: int = -1


Gathered = tuple[Gathering, tuple[CompleteCheckpoint | AbandonedCheckpoint, ...]]


def begin_epoch(gathering: Gathering) -> Gathering:
    """Returns the gathering in a new epoch, whose workers may be ordered to write the parts of the dead."""
    return gathering._replace(
        pending={step: partial._replace(is_orphan=True) for step, partial in gathering.pending.items()}
    )


def order(gathering: Gathering, step: int) -> Gathering:
    """Returns the gathering after the order to write the parts of a step, the last committed one."""
    pending = gathering.pending
    if step in pending:
        return gathering._replace(pending={**pending, step: pending[step]._replace(is_orphan=False)})
    return gathering if step <= gathering.begun else Gathering({**pending, step: PartialCheckpoint()}, step)


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
    """Returns the gathering without the checkpoint of a step; its later parts do not count."""
    if step not in gathering.pending:
        return gathering, ()
    pending = {each: parts for each, parts in gathering.pending.items() if each != step}
    return gathering._replace(pending=pending), (AbandonedCheckpoint(step, why),)


def give_up_all(gathering: Gathering) -> Gathered:
    """Returns the gathering at the end of a run, after which nothing comes."""
    return gathering._replace(pending={}), tuple(
        AbandonedCheckpoint(step, INCOMPLETE) for step in sorted(gathering.pending)
    )


def _settled(gathering: Gathering, step: int, checkpoint: PartialCheckpoint) -> Gathered:
    pending = {**gathering.pending, step: checkpoint}
    if not checkpoint.is_whole:
        return gathering._replace(pending=pending), ()
    orphans = [each for each in sorted(pending) if each < step and pending[each].is_orphan]
    left = {each: gathered for each, gathered in pending.items() if each != step and each not in orphans}
    parts = tuple(part for _, part in sorted(checkpoint.parts.items()))
    given_up = (AbandonedCheckpoint(each, INCOMPLETE) for each in orphans)
    return gathering._replace(pending=left), (*given_up, CompleteCheckpoint(step, checkpoint.hashes, parts))


# The checkpoint with which a run begins, or goes on after the loss of a state.
@dataclass(frozen=True, slots=True)
class Resumption:
    """A checkpoint to begin after: its step, its place (a folder or a URL), its manifest there, and its run.

    `is_named`: the user named its step, and no other step replaces it. `init` is the hash of the weights that the run
    was once given, empty without them. `other_bits`: the job may have other bits than the run of the checkpoint.
    `monitors` are those of the manifest.
    """

    step: int
    place: str
    file: str
    run: str = ""
    is_named: bool = False
    init: str = ""
    other_bits: bool = False
    monitors: Monitors = NO_MONITORS


def begun_with(origin: Resumption | None) -> int:
    """Returns the last step before training begins: of the checkpoint, -1 without one."""
    return -1 if origin is None else origin.step
