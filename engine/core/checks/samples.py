"""Checks in the actions of a run that every committed step counted every sample exactly once.

The gradient and the buffers of a slot in a step come from one worker: the worker that ran the slot's last backward. The
accumulators of workers that died before are lost, and actions after a worker's exclusion are ignored. So in a committed
step that worker must have run each microbatch's forward once and its backward once. A redone forward (`f`) and a
backward for the input only (`I`) do not count. With streamed accumulators an heir may go on after a streamed
microbatch; one other worker must then have counted the microbatches before it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.core.action import ADDING_OPS, Action, Op
from engine.core.config.job import Job
from engine.core.history.gaps import left_out_steps
from engine.core.history.process_records import ResumedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.step_files import done_in, span_of
from engine.core.ownership import Slot
from engine.core.program.stream_pass import is_streamed

_COUNTS = ADDING_OPS | {Op.F}

SampleAction = tuple[int, int, Action]  # end in ns, worker, action
DoneAction = tuple[int, int, int, Action]  # step, end in ns, worker, action
Count = tuple[bool, int]  # whether it is a backward, microbatch


def miscounted(history: RunHistory, job: Job, since_ns: int = 0) -> list[str]:
    """Returns one sentence for each (step, slot, microbatch) not counted once, in steps committed since a time.

    Steps whose actions were left out are not checked.
    """
    commits = zip(history.commits.steps, history.commits.at_ns, strict=True)
    committed = {step for step, at_ns in commits if at_ns >= since_ns}
    committed.difference_update(*(range(first, last + 1) for first, last in left_out_steps(history)))
    lives = _Lives(
        [(each.at_ns, each.step) for each in history.of(ResumedRecord)],
        [(epoch.at_ns, out.worker) for epoch in history.epochs for out in epoch.verdict],
    )
    found = []
    span = span_of(job)
    for first, done in _in_ranges(history):
        steps = {step for step in range(first, first + span) if step in committed}
        committed = committed - steps
        found += _in_steps(steps, done, lives, job)
    return found + _in_steps(committed, (), lives, job)


def _in_ranges(history: RunHistory) -> Iterator[tuple[int, Iterator[DoneAction]]]:
    """Yields each range of steps by its first, with its actions."""
    for first in history.files.ranges():
        blocks = history.files.read(first)
        yield first, ((step, end, worker, action) for worker, data in blocks for step, end, action in done_in(data))


def _in_steps(steps: set[int], done: Iterable[DoneAction], lives: _Lives, job: Job) -> list[str]:
    entries: dict[tuple[int, Slot], list[SampleAction]] = {}
    for step, end_ns, worker, action in done:
        if action.op in _COUNTS:
            entries.setdefault((step, (action.pipeline, action.stage)), []).append((end_ns, worker, action))
    found = []
    for step in sorted(steps):
        for pipeline in range(job.pipelines):
            for stage in range(job.slots):
                slot = (pipeline, stage)
                mine = [each for each in entries.get((step, slot), []) if lives.counts(step, each)]
                found += [f"step {step}: {text}" for text in _of_slot(mine, slot, job)]
    return found


class _Lives(NamedTuple):
    """The times at which a run went on from a checkpoint, with its step, and those of the verdicts on workers."""

    resumed: Sequence[tuple[int, int]]
    out: Sequence[tuple[int, int]]

    def counts(self, step: int, entry: SampleAction) -> bool:
        """Returns whether an action counts: its step was not lost later, and its worker was not out in that life."""
        end_ns, worker, _ = entry
        begun_ns = max((at_ns for at_ns, _ in self.resumed if at_ns < end_ns), default=0)
        is_lost = any(kept < step and end_ns <= at_ns for at_ns, kept in self.resumed)
        return not is_lost and not any(each == worker and begun_ns < at_ns < end_ns for at_ns, each in self.out)


def _of_slot(entries: list[SampleAction], slot: Slot, job: Job) -> list[str]:
    name = f"{job.slot_noun} {slot[1]}" + (f" of pipeline {slot[0]}" if slot[0] else "")
    backwards = [each for each in entries if each[2].op in ADDING_OPS]
    if not backwards:
        return [f"no worker ran a backward of {name}"]
    owner = max(backwards, key=lambda each: each[0])[1]
    counts = _counts_of(owner, entries)
    counts.update(_streamed(owner, entries, job))
    return [
        f"worker {owner} counted the {'backward' if adds else 'forward'} of microbatch {microbatch} of {name} "
        f"{counts[adds, microbatch]} times"
        for adds in (False, True)
        for microbatch in range(job.microbatches)
        if counts[adds, microbatch] != 1
    ]


def _counts_of(worker: int, entries: Iterable[SampleAction]) -> Counter[Count]:
    return Counter((each[2].op in ADDING_OPS, each[2].microbatch) for each in entries if each[1] == worker)


def _streamed(owner: int, entries: Sequence[SampleAction], job: Job) -> set[Count]:
    """Returns the counts that the owner got by a stream: backwards before its own first one, and forwards it lacks."""
    own = _counts_of(owner, entries)
    first = min(microbatch for adds, microbatch in own if adds)
    if first and is_streamed(first - 1, job.log_every, job.microbatches):
        for other in sorted({each[1] for each in entries} - {owner}):
            theirs = _counts_of(other, entries)
            if all(theirs[True, microbatch] == 1 for microbatch in range(first)):
                forwards = {(False, microbatch) for adds, microbatch in theirs if not adds}
                return {(True, microbatch) for microbatch in range(first)} | (forwards - own.keys())
    return set()
