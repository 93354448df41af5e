"""Writes records as lines, and reads them: a line is one JSON object, with the kind first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache, lru_cache
from struct import Struct
from typing import Any, NamedTuple, get_type_hints

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op, parse_action
from engine.core.errors import InvariantError
from engine.core.exclusion import Verdict, verdict_of
from engine.core.history import process_records, run_records
from engine.core.history.process_records import Difference, ExitRecord, ResumedRecord
from engine.core.history.run_records import (
    UNSEALED,
    VERSION,
    ActionRecord,
    CommitRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    JobRecord,
    NoticeRecord,
    RaisedRecord,
    Record,
    StampedRecord,
    SuspicionRecord,
    UnreadLine,
    kind_of,
)
from engine.core.job.job import Job, size_problems
from engine.core.message_codec import Reader, reader_of, strict_text

RECORDS: dict[str, type[Record]] = {
    kind_of(kind): kind
    for module in (run_records, process_records)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind not in (Record, StampedRecord, UnreadLine)
}
_STAMPS = {field.name for field in fields(StampedRecord)}
_DEFAULTS = {
    kind: {field.name: field.default for field in fields(kind) if field.name not in _STAMPS}
    for kind in RECORDS.values()
}
_TYPES_OF_COMMIT = (int, int, int, int, float, float, float, bool)  # in the order of the line
_OF_JOB = frozenset(Job.__dataclass_fields__)
_NEEDED = {
    kind: frozenset(field.name for field in fields(kind) if _DEFAULTS[kind].get(field.name, MISSING) is MISSING)
    for kind in RECORDS.values()
} | {JobRecord: _STAMPS | {"version"} | _OF_JOB}


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise InvariantError(f"no number of a run is as long as {digits[:_MOST_DIGITS]}...")
    return int(digits)


_MOST_DIGITS = 18  # with a sign: years in nanoseconds, and columns of numbers take no more
_PARSE = json.JSONDecoder(parse_int=_whole_number).decode
_OF_USER = ('{"event":"job",', '{"event":"scenario",')  # with arguments and seeds, which may be longer


class TornLineError(InvariantError):
    """A line is no JSON object of an event: a write was cut short, or the file has other contents."""


def encoded(record: Record) -> str:
    """Returns the line of a record, without the newline."""
    defaults = _DEFAULTS[type(record)]
    plain: dict[str, Any] = {"event": kind_of(type(record))}
    for name in type(record).__dataclass_fields__:
        value = getattr(record, name)
        if name not in defaults or value != defaults[name]:
            plain[name] = value
    if isinstance(record, JobRecord):
        plain |= asdict(plain.pop("job").masked)
    return strict_text(plain, default=asdict)


def decoded(line: str) -> Record:
    """Returns the record of a line; raises InvariantError that names the mistake in the line, or TornLineError."""
    try:  # of these errors none is an InvariantError
        plain = json.loads(line) if line.startswith(_OF_USER) else _PARSE(line)
        kind = plain.pop("event")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise TornLineError(f"expected one event as JSON, found {line[:80]!r}") from None
    record = RECORDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise InvariantError(f"unknown event {str(kind)[:80]!r}; use the bamboo that recorded it")
    if record is JobRecord and plain.get("version") not in (UNSEALED, VERSION):
        raise InvariantError(_other_version(plain.get("version")))
    if plain.keys() != _NEEDED[record]:
        _refuse_other_fields(kind, record, plain)
    if record is CommitRecord and tuple(map(type, plain.values())) == _TYPES_OF_COMMIT:  # the most frequent kind
        return record(**plain)
    if record is JobRecord:
        plain["job"] = _job({name: plain.pop(name) for name in _OF_JOB})
    readers = _readers(kind)
    for name, value in plain.items():
        scalars, read = readers[name]
        if type(value) not in scalars:
            try:
                plain[name] = read(value)
            except TypeError as error:
                raise InvariantError(f"the field {name!r} of event {kind!r} is not {error}") from None
    return record(**plain)


def _job(plain: Mapping[str, Any]) -> Job:
    for name, value in plain.items():
        usual = getattr(_USUAL, name)
        if type(value) is not type(usual) and not (type(usual) is float and type(value) is int):
            raise InvariantError(f"the field {name!r} of event 'job' is not like {usual!r}: {value!r:.100}")
    job = Job(**plain)
    if problems := size_problems(job):
        raise InvariantError(f"the job of event 'job' cannot be: {problems[0]}")
    return job


_USUAL = Job()
_FLOAT = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_COMMIT = re.compile(
    r'\{"event":"commit","worker":(-?\d{1,18}),"pid":(\d{1,18}),"at_ns":(\d{1,18}),"step":(\d{1,18}),'
    rf'"loss":({_FLOAT}),"grad_norm":({_FLOAT}),"clip_factor":({_FLOAT}),"last":(true|false)\}}'
)


def commit_fields(line: str) -> tuple[str, ...] | None:
    """Returns the texts of the fields of a commit's line, for a reader of millions; None for any other line."""
    match = _COMMIT.fullmatch(line)
    return match.groups() if match else None


def whole_end(line: str) -> str:
    """Returns the record at the end of a torn line, which another writer appended to the half; empty without one.

    The text that is searched for cannot stand inside of a record: there its quotes have backslashes.
    """
    begin = line.rfind('{"event":')
    return line[begin:] if begin > 0 else ""


@cache
def _readers(kind: str) -> dict[str, Reader]:
    """Returns for each field of a record the types of scalars that it takes, and the reader of any other value."""
    return {
        name: _OWN_READERS.get(hint) or reader_of(hint)
        for name, hint in get_type_hints(RECORDS[kind]).items()
        if name in RECORDS[kind].__dataclass_fields__
    }


def _verdict(entries: Any) -> Verdict:
    try:
        return verdict_of({"verdict": entries})
    except (TypeError, ValueError):
        raise TypeError(f"a verdict: {entries!r:.100}") from None


def _difference(plain: Any) -> Difference:
    try:
        return Difference(**plain)
    except TypeError:
        raise TypeError(f"a difference: {plain!r:.100}") from None


_OWN_READERS: dict[Any, Reader] = {
    Verdict: (frozenset(), _verdict),
    Job: reader_of(Any),
    Difference | None: (frozenset({type(None)}), _difference),
}


def _refuse_other_fields(kind: str, record: type[Record], plain: dict[str, Any]) -> None:
    if missing := sorted(_NEEDED[record] - plain.keys()):
        raise InvariantError(f"event {kind!r} has no field {missing[0]!r}")
    known = _NEEDED[record] | _DEFAULTS[record].keys()
    if unknown := sorted(plain.keys() - known):
        raise InvariantError(f"event {kind!r} has an unknown field {unknown[0]!r}")


def refuse_other_version(first: Record) -> None:
    """Raises InvariantError if the first record of a file is not the job's, which has the version of the format."""
    if not isinstance(first, JobRecord):
        raise InvariantError(_other_version(None))


def _other_version(version: object) -> str:
    age = "an older" if version is None or (isinstance(version, int) and version < VERSION) else "a newer"
    named = "without a version" if version is None else f"version {version}"
    return (
        f"recorded by {age} bamboo: format {named}, this one reads version {VERSION}; use the bamboo that recorded it"
    )


# The form of the files in the folder ``steps`` of a run: the actions of each worker, and the hashes of the layers.
#
# Rules: a file holds a range of steps, and its name has the first of them. All ranges of a run are equally long. One
# process writes a file. `actions-W-F.bin` has an entry of 32 bytes for each action of worker W, in the order of
# writing. `hashes-F.jsonl` has a line for each audit. So a whole range can be left out without reading its files.

FOLDER = "steps"
_ENTRY = Struct("<qqIIQ")  # begin and length in ns, step, epoch, the work
ENTRY_BYTES = _ENTRY.size
OPS = tuple(Op)  # the place of an op is its number in an entry: a change needs a new version of the format
_MARK = 0xA5  # in the last byte of each entry: other bytes are no entry
# The same entry for numpy: the work is a stage, a pipeline, a microbatch, an op and the mark.
FIELDS = [
    *(("start_ns", "<i8"), ("length_ns", "<i8"), ("step", "<u4"), ("epoch", "<u4"), ("stage", "<u2")),
    *(("pipeline", "<u2"), ("microbatch", "<u2"), ("op", "u1"), ("mark", "u1")),
]
_NAME = re.compile(r"(?:actions-([0-9]{1,9})|hashes)-([0-9]{1,18})\.(?:bin|jsonl)")
_SECOND_NS = 1_000_000_000
_RANGE_BYTES = 1_000_000  # about, of the actions of all workers: small enough to leave out, large enough to be few


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
    num_actions = job.pipelines * job.slots * (6 * job.microbatches + 6)
    most, span = max(1, _RANGE_BYTES // (num_actions * ENTRY_BYTES)), 1
    while span * 10 <= most:
        span *= 10
    return span * next(each for each in (5, 2, 1) if span * each <= max(most, span))


def entry(epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> bytes:
    """Returns the entry of an action."""
    return _ENTRY.pack(start_ns, end_ns - start_ns, step, epoch, _work(action))


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


def superfluous(num_bytes: Mapping[int, int], kept: Collection[int], limit: int) -> set[int]:
    """Returns the ranges, by their numbers, to leave out so that the bytes of the others are at most `limit`.

    The `kept` ranges stay; if they alone are more than `limit`, all others are left out.
    """
    if sum(num_bytes.values()) <= limit:
        return set()
    last = max(num_bytes)
    always = {0, *range(last - _NEWEST + 1, last + 1), *kept}
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
