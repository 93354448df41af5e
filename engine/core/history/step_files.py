"""The files of steps of a run: actions of workers and hashes of layers; and the ranges of them that a run keeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op, parse_action
from engine.core.history.process_records import ExitRecord, ResumedRecord
from engine.core.history.run_records import (
    ActionRecord,
    CommitRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    NoticeRecord,
    RaisedRecord,
    Record,
    SuspicionRecord,
)
from engine.core.job.job import Job

# The form of the files in the folder ``steps`` of a run: the actions of each worker, and the hashes of the layers.
#
# Rules: a file holds a range of steps, and its name has the first of them. All ranges of a run are equally long. One
# process writes a file. `actions-W-F.bin` has an entry of 32 bytes for each action of worker W, in the order of
# writing, and one for each chore. `hashes-F.jsonl` has a line for each audit. So a whole range can be left out without
# reading its files.

FOLDER = "steps"
_ENTRY = Struct("<qqIIQ")  # begin and length in ns, step, epoch, the work
ENTRY_BYTES = _ENTRY.size
OPS = tuple(Op)  # the place of an op is its number in an entry: a change needs a new version of the format
_MARK, _CHORE_MARK = 0xA5, 0xA6  # in the last byte of each entry, of a chore: other bytes are no entry
_PLACE = (1 << 48) - 1  # the bits of stage, pipeline and microbatch
# The same entry for numpy: the work is a stage, a pipeline, a microbatch, an op and the mark.
FIELDS = [
    *(("start_ns", "<i8"), ("length_ns", "<i8"), ("step", "<u4"), ("epoch", "<u4"), ("stage", "<u2")),
    *(("pipeline", "<u2"), ("microbatch", "<u2"), ("op", "u1"), ("mark", "u1")),
]
_NAME = re.compile(r"(?:actions-([0-9]{1,9})|hashes)-([0-9]{1,18})\.(?:bin|jsonl)")
_SECOND_NS = 1_000_000_000
_RANGE_BYTES = 1_000_000  # about, of the actions of all workers: small enough to leave out, large enough to be few


class Chore(StrEnum):
    """What a worker does in a step beside its actions, or inside one, as it loads a microbatch inside a forward."""

    DATA = "data"
    AUDIT = "audit"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"


CHORES = tuple(Chore)  # the place of a chore is its number in an entry


class StepFile(NamedTuple):
    """A file: the first step of its range, and the worker of its actions, None for hashes."""

    first: int
    worker: int | None

    def __str__(self) -> str:
        return f"hashes-{self.first}.jsonl" if self.worker is None else f"actions-{self.worker}-{self.first}.bin"


def step_file(name: str) -> StepFile | None:
    """Returns the file of this name; None for any other name."""
    match = _NAME.fullmatch(name)
    file = StepFile(int(match[2]), None if match[1] is None else int(match[1])) if match else None
    return file if str(file) == name else None


def span_of(job: Job) -> int:
    """Returns the steps of a range: 1, 2 or 5 times a power of ten, for a range of about a megabyte."""
    num_actions = job.pipelines * job.slots * (6 * job.program_microbatches + 6)
    most, span = max(1, _RANGE_BYTES // (num_actions * ENTRY_BYTES)), 1
    while span * 10 <= most:
        span *= 10
    return span * next(each for each in (5, 2, 1) if span * each <= max(most, span))


def entry(epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> bytes:
    """Returns the entry of an action."""
    return _ENTRY.pack(start_ns, end_ns - start_ns, step, epoch, _work(action))


def chore_entry(epoch: int, step: int, chore: Chore, start_ns: int, end_ns: int, action: str = "") -> bytes:
    """Returns the entry of a chore, for the slot and the microbatch of an action if it has one."""
    return _ENTRY.pack(start_ns, end_ns - start_ns, step, epoch, _chore(chore, action))


@lru_cache(maxsize=1 << 16)
def _chore(chore: Chore, action: str) -> int:
    place = _work(action) & _PLACE if action else 0
    return place | CHORES.index(chore) << 48 | _CHORE_MARK << 56


@lru_cache(maxsize=1 << 16)
def _work(text: str) -> int:
    action = parse_action(text)
    microbatch = max(action.microbatch, 0)
    return action.stage | action.pipeline << 16 | microbatch << 32 | OPS.index(action.op) << 48 | _MARK << 56


@lru_cache(maxsize=1 << 16)
def _text(work: int) -> str | None:
    """Returns the text of an action; None if the number stands for none."""
    op, mark = work >> 48 & 0xFF, work >> 56
    if not is_entry(op, mark):
        return None
    return str(action_of(work & 0xFFFF, work >> 16 & 0xFFFF, work >> 32 & 0xFFFF, op))


def is_entry(op: int, mark: int) -> bool:
    """Returns whether bytes with this op and this mark are an entry."""
    return mark == _MARK and op < len(OPS)


def is_chore(chore: int, mark: int) -> bool:
    """Returns whether bytes with this number and this mark are the entry of a chore."""
    return mark == _CHORE_MARK and chore < len(CHORES)


def action_of(stage: int, pipeline: int, microbatch: int, op: int) -> Action:
    """Returns the action of the fields of an entry."""
    return Action(stage, OPS[op], WHOLE_STAGE if OPS[op] in STAGE_OPS else microbatch, pipeline)


def done_in(data: bytes) -> Iterator[tuple[int, int, int, Action]]:
    """Yields step, epoch, end and action of each entry in the bytes of a file; other bytes are left out."""
    whole = len(data) // ENTRY_BYTES * ENTRY_BYTES
    for start_ns, length_ns, step, epoch, work in _ENTRY.iter_unpack(data[:whole]):
        if (text := _text(work)) is not None:
            yield step, epoch, start_ns + length_ns, parse_action(text)


def actions_in(data: bytes, worker: int, pid: int = 0, since: int = 0) -> Iterator[ActionRecord]:
    """Yields the actions in the bytes of a file, of steps from `since` on; other bytes than entries are left out."""
    whole = len(data) // ENTRY_BYTES * ENTRY_BYTES
    for start_ns, length_ns, step, epoch, work in _ENTRY.iter_unpack(data[:whole]):
        text = _text(work)
        if text is not None and step >= since:
            yield ActionRecord(
                worker=worker,
                pid=pid,
                epoch=epoch,
                step=step,
                action=text,
                start_ns=start_ns,
                end_ns=start_ns + length_ns,
            )


def moved_entries(data: bytes, at: Callable[[int], int]) -> bytes:
    """Returns whole entries whose times are on another clock: `at` maps a time to it, in nanoseconds.

    Two clocks drift apart by some millionths, so a length stays, and one difference serves for a second.
    """
    moved = bytearray(data)
    differences: dict[int, int] = {}
    for place in range(0, len(moved), ENTRY_BYTES):
        start_ns, *rest = _ENTRY.unpack_from(moved, place)
        second = start_ns // _SECOND_NS
        if second not in differences:
            differences[second] = at(second * _SECOND_NS) - second * _SECOND_NS
        _ENTRY.pack_into(moved, place, start_ns + differences[second], *rest)
    return bytes(moved)


# The ranges of steps whose actions a run keeps, if it may not keep all.
#
# Rules: the first range, the newest ones, and each range with a step near a failure, a fault or a change of members
# always stay. Of the others every second one goes, then every second of the rest, so that they stay evenly spaced.

BEFORE, AFTER = 2, 3  # steps around the open step that a recovery is timed by: the last action, the healed shadows
_NEWEST = 2  # ranges


class MarkedSteps:
    """The steps that are kept, from the records of a run in the order of the file."""

    def __init__(self) -> None:
        self.committed = -1
        self.steps: set[int] = set()
        self._is_training = False

    def add(self, record: Record) -> None:
        """Adds the next record."""
        match record:
            case CommitRecord() | ResumedRecord():
                self.committed = record.step
            case GoRecord():
                self._is_training = True
            case EpochRecord() if self._is_training:
                self._mark()
            case FaultRecord() | RaisedRecord() | SuspicionRecord() | NoticeRecord():
                self._mark()
            case ExitRecord() if not record.expected:
                self._mark()

    def _mark(self) -> None:
        opened = self.committed + 1
        self.steps.update(range(max(0, opened - BEFORE), opened + AFTER + 1))


def marked_steps(records: Iterable[Record]) -> set[int]:
    """Returns the steps whose actions are kept for the recoveries of a run."""
    marked = MarkedSteps()
    for record in records:
        marked.add(record)
    return marked.steps


def superfluous(num_bytes: Mapping[int, int], ranges: Collection[int], limit: int) -> set[int]:
    """Returns the ranges, by their numbers, to leave out so that the bytes of the others are at most `limit`.

    The `ranges` stay; if they alone are more than `limit`, all others are left out.
    """
    if sum(num_bytes.values()) <= limit:
        return set()
    last = max(num_bytes)
    always = {0, *range(last - _NEWEST + 1, last + 1), *ranges}
    every = 1
    while True:
        every *= 2
        out = {number for number in num_bytes if number % every and number not in always}
        left = sum(size for number, size in num_bytes.items() if number not in out)
        if left <= limit or every > last:
            return out | ({number for number in num_bytes if number not in always} if left > limit else set())


def as_ranges(numbers: Iterable[int], span: int) -> tuple[tuple[int, int], ...]:
    """Returns ranges by their numbers as (first step, last step), neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first, last = number * span, (number + 1) * span - 1
        if ranges and ranges[-1][1] == first - 1:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    return tuple(ranges)
