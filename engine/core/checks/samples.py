"""Checks in the actions of a run that every committed step counted every sample exactly once.

The gradient and the buffers of a slot in a step come from one worker: the last one that ran a backward of the slot, or
took its accumulator. In a committed step that accumulator must have each microbatch's forward once and its backward
once. `EFFECTS` has what each op does to it. The accumulators of workers that died before are lost, and actions after a
worker's exclusion are ignored.

    worker 1   1F0 1F1 1B0 | epoch | 1HAND0             STREAM and HAND carry an accumulator to another worker
    worker 0               | epoch | 1HAND0 1F1 1B1     which has counted microbatch 0 from then on

A worker that takes an accumulator at the fence writes no record of it. So one that goes on behind a microbatch also has
the accumulator up to there, if it was sent: the program streams behind that microbatch, or a HAND of it is recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import product
from operator import attrgetter
from typing import Final, NamedTuple

from engine.core.action import OP_TABLE, Action, Op, OpRow
from engine.core.errors import ensure
from engine.core.history.process_records import ResumedRecord
from engine.core.history.run_history import RunHistory, left_out_steps
from engine.core.history.step_files import done_in, span_of
from engine.core.job.job import Job
from engine.core.ownership import Slot
from engine.core.program.passes import is_streamed
from engine.core.value import Kind


class SampleEffect(Enum):
    """The effect of an action on the accumulator of its slot at its worker."""

    NONE = auto()
    COUNTS = auto()  # the forward of its microbatch
    ADDS = auto()  # the backward of its microbatch
    BRINGS = auto()  # the forward of its microbatch, which another worker has counted
    CARRIES = auto()  # one worker sends the accumulator up to the microbatch, and the others take it


_RULES: Final = {  # by the sums that an op makes, and whether it computes
    (frozenset({Kind.COUNTED}), True): SampleEffect.COUNTS,
    (frozenset({Kind.ADDED}), True): SampleEffect.ADDS,
    (frozenset({Kind.COUNTED}), False): SampleEffect.BRINGS,
    (frozenset({Kind.ADDED, Kind.COUNTED}), False): SampleEffect.CARRIES,
}


def effect_of(row: OpRow) -> SampleEffect:
    """Returns the effect of an op, by what it makes; an op that makes sums in another way needs a rule here."""
    sums = {term.kind for term in row.makes if term.kind in (Kind.ADDED, Kind.COUNTED)}
    rule = (frozenset(sums), row.work is not None)
    ensure(not sums or rule in _RULES, f"no rule counts the samples of an op like {row.about!r}")
    return _RULES.get(rule, SampleEffect.NONE)


EFFECTS: Final = {op: effect_of(row) for op, row in OP_TABLE.items()}


class DoneAction(NamedTuple):
    """An action of a worker in a step, in the epoch that the worker had entered, with the time of its end."""

    step: int
    epoch: int
    end_ns: int
    worker: int
    action: Action


class RunLives(NamedTuple):
    """The times at which a run resumed from a checkpoint, with its step, and those of the verdicts on workers."""

    resumed: Sequence[tuple[int, int]]
    out: Sequence[tuple[int, int]]

    def counts(self, done: DoneAction) -> bool:
        """Returns whether an action counts: its step was not lost later, and its worker had not been evicted."""
        end_ns = done.end_ns
        begun_ns = max((at_ns for at_ns, _ in self.resumed if at_ns < end_ns), default=0)
        is_lost = any(step < done.step and end_ns <= at_ns for at_ns, step in self.resumed)
        return not is_lost and not any(each == done.worker and begun_ns < at_ns < end_ns for at_ns, each in self.out)


@dataclass(slots=True)
class _Accumulator:
    """How often the accumulator of a slot has each microbatch, at one worker."""

    forwards: Counter[int] = field(default_factory=Counter)
    backwards: Counter[int] = field(default_factory=Counter)

    def has_once(self, microbatch: int) -> bool:
        """Returns whether it has the backward of each microbatch up to this one, once."""
        return all(self.backwards[each] == 1 for each in range(microbatch + 1))

    def take(self, microbatch: int, other: _Accumulator) -> None:
        """Takes over another one up to a microbatch; the forwards that this worker has counted itself stay."""
        self.backwards = Counter(range(microbatch + 1))
        for each in range(microbatch + 1):
            self.forwards[each] = self.forwards[each] or other.forwards[each]


def miscounted(history: RunHistory, job: Job, since_ns: int = 0) -> list[str]:
    """Returns a sentence for each (step, slot, microbatch) not counted once, in recorded steps since a time."""
    commits = zip(history.commits.steps, history.commits.at_ns, strict=True)
    committed = {step for step, at_ns in commits if at_ns >= since_ns}
    committed.difference_update(*(range(first, last + 1) for first, last in left_out_steps(history)))
    lives = RunLives(
        [(each.at_ns, each.step) for each in history.of(ResumedRecord)],
        [(epoch.at_ns, out.worker) for epoch in history.epochs for out in epoch.verdict],
    )
    sentences, span = [], span_of(job)
    for first in history.files.ranges():
        done = (
            DoneAction(step, epoch, end_ns, worker, action)
            for worker, data in history.files.read(first)
            for step, epoch, end_ns, action in done_in(data)
        )
        steps = {step for step in range(first, first + span) if step in committed}
        committed = committed - steps
        sentences += miscounted_in(steps, done, lives, job)
    return sentences + miscounted_in(committed, (), lives, job)


def miscounted_in(steps: set[int], done: Iterable[DoneAction], lives: RunLives, job: Job) -> list[str]:
    """Returns one sentence for each slot and microbatch that these actions did not count once in these steps."""
    entries: dict[tuple[int, Slot], list[DoneAction]] = defaultdict(list)
    most = job.program_microbatches
    for entry in done:
        action = entry.action
        if EFFECTS[action.op] is not SampleEffect.NONE and entry.step in steps and action.microbatch < most:
            entries[entry.step, (action.pipeline, action.stage)].append(entry)
    return [
        f"step {step}: {text}"
        for step, slot in product(sorted(steps), product(range(job.pipelines), range(job.slots)))
        for text in _of_slot(list(filter(lives.counts, entries.get((step, slot), ()))), slot, job)
    ]


def _of_slot(entries: list[DoneAction], slot: Slot, job: Job) -> list[str]:
    name = f"{job.slot_noun} {slot[1]}" + (f" of pipeline {slot[0]}" if slot[0] else "")
    owner, accumulator = _committed(entries, job)
    if owner is None:
        return [f"no worker ran a backward of {name}"]
    return [
        f"worker {owner} counted the {noun} of microbatch {microbatch} of {name} {counts[microbatch]} times"
        for noun, counts in (("forward", accumulator.forwards), ("backward", accumulator.backwards))
        for microbatch in range(job.program_microbatches)
        if counts[microbatch] != 1
    ]


def _committed(entries: list[DoneAction], job: Job) -> tuple[int | None, _Accumulator]:
    """Returns the worker whose accumulator of a slot is committed, and that accumulator; None if there is none."""
    handoffs = {entry.action.microbatch for entry in entries if entry.action.op is Op.HAND}
    all_of = defaultdict[int, _Accumulator](_Accumulator)
    owner = None
    for _, _, _, worker, action in sorted(entries, key=attrgetter("epoch", "end_ns")):
        mine, microbatch, before = all_of[worker], action.microbatch, action.microbatch - 1
        match EFFECTS[action.op]:
            case SampleEffect.COUNTS:
                mine.forwards[microbatch] += 1
            case SampleEffect.BRINGS:
                others = max(other.forwards[microbatch] for other in all_of.values())
                mine.forwards[microbatch] = mine.forwards[microbatch] or others
            case SampleEffect.ADDS:
                was_sent = before in handoffs or is_streamed(before, job.log_every, job.program_microbatches)
                if microbatch and before not in mine.backwards and was_sent:
                    _take(worker, before, all_of)
                mine.backwards[microbatch] += 1
                owner = worker
            case SampleEffect.CARRIES:
                is_taken = microbatch not in mine.backwards and _take(worker, microbatch, all_of)
                owner = worker if is_taken and action.op is Op.HAND else owner
    return owner, _Accumulator() if owner is None else all_of[owner]


def _take(taker: int, microbatch: int, all_of: Mapping[int, _Accumulator]) -> bool:
    """Lets a worker take the accumulator of another one; returns whether one has it whole up to the microbatch."""
    for worker, other in sorted(all_of.items()):
        if worker != taker and other.has_once(microbatch):
            all_of[taker].take(microbatch, other)
            return True
    return False
