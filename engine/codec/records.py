"""Records as lines, and back: a line is one JSON object, with the kind first, without the fields that have defaults."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from typing import Annotated, Any, get_type_hints

import msgspec

from engine.codec.values import converted, parsed, plain_of, text_of, value_of
from engine.core.errors import InvariantError
from engine.core.history import process_records, run_records
from engine.core.history.run_records import (
    UNSEALED,
    VERSION,
    CommitRecord,
    JobRecord,
    Record,
    StampedRecord,
    UnreadLine,
    kind_of,
)
from engine.core.job.job import Job, size_problems

RECORDS: dict[str, type[Record]] = {
    kind_of(made): made
    for module in (run_records, process_records)
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, Record) and made not in (Record, StampedRecord, UnreadLine)
}
_KINDS = {made: kind for kind, made in RECORDS.items()}
_STAMPS = frozenset({"worker", "pid", "at_ns"})
_OF_WORKER = frozenset(field.name for field in fields(StampedRecord)) - _STAMPS  # a commit has none of them
_OF_JOB = frozenset(Job.__dataclass_fields__)
_DEFAULTS = {
    made: {field.name: field.default for field in fields(made) if field.name not in _STAMPS}
    for made in RECORDS.values()
}
_FIELDS = {made: frozenset(made.__dataclass_fields__) for made in RECORDS.values()}
_FIELDS |= {JobRecord: _FIELDS[JobRecord] - {"job"} | _OF_JOB}
_NEEDED = {
    made: frozenset(name for name in names if _DEFAULTS[made].get(name, MISSING) is MISSING)
    for made, names in _FIELDS.items()
}
_NEEDED |= {JobRecord: _NEEDED[JobRecord] - _OF_JOB}  # a run from before a field did what its default says
_MOST_DIGITS = 18  # with a sign: years in nanoseconds, and columns of numbers take no more
_OF_USER = ("job", "scenario")  # with arguments and seeds, which may be longer
_COMMIT = '{"event":"commit",'  # of which a day has a million: its line is read in one go
_Whole = Annotated[int, msgspec.Meta(gt=-(10 ** (_MOST_DIGITS - 1)), lt=10**_MOST_DIGITS)]
_read_commit = msgspec.json.Decoder(
    msgspec.defstruct(
        "Commit",
        [
            (name, _Whole if hint is int else hint, *((None,) if name == "lr" else ()))
            for name, hint in get_type_hints(CommitRecord).items()
            if name not in _OF_WORKER
        ],
        tag_field="event",
        tag="commit",
        forbid_unknown_fields=True,
    )
).decode


class TornLineError(InvariantError):
    """A line is no JSON object of an event: a write was cut short, or the file has other contents."""


def encoded(record: Record) -> str:
    """Returns the line of a record, without the newline."""
    defaults = _DEFAULTS[type(record)]
    plain: dict[str, Any] = {"event": _KINDS[type(record)]}
    for name in type(record).__dataclass_fields__:
        value = getattr(record, name)
        if name not in defaults or value != defaults[name]:
            plain[name] = value
    if isinstance(record, JobRecord):
        plain |= plain_of(plain.pop("job").masked)
    return text_of(plain)


def decoded(line: str) -> Record:
    """Returns the record of a line; raises InvariantError that names the mistake in the line, or TornLineError."""
    if line.startswith(_COMMIT):
        with suppress(msgspec.MsgspecError, UnicodeError):  # else the mistake is named below
            return CommitRecord(**msgspec.structs.asdict(_read_commit(line)))
    try:
        plain = parsed(line)
        kind = plain.pop("event")
        if kind not in _OF_USER:
            _refuse_long(plain)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise TornLineError(f"expected one event as JSON, found {line[:80]!r}") from None
    record_class = RECORDS.get(kind) if isinstance(kind, str) else None
    if record_class is None:
        raise InvariantError(f"unknown event {str(kind)[:80]!r}; use the bamboo that recorded it")
    if record_class is JobRecord and plain.get("version") not in (UNSEALED, VERSION):
        raise InvariantError(_other_version(plain.get("version")))
    if missing := _NEEDED[record_class] - plain.keys():
        raise InvariantError(f"event {kind!r} has no field {min(missing)!r}")
    if unknown := plain.keys() - _FIELDS[record_class]:
        raise InvariantError(f"event {kind!r} has an unknown field {min(unknown)!r}")
    if record_class is JobRecord:
        plain["job"] = _job({name: plain.pop(name) for name in _OF_JOB & plain.keys()})
    take = partial(value_of, is_whole=False) if any(isinstance(value, dict) for value in plain.values()) else converted
    return take(plain, record_class, f"event {kind!r}")


def _job(plain: Mapping[str, Any]) -> Job:
    """Returns the job of a record, whose sizes are those of a job that can be run; its words may be older ones."""
    for name, value in plain.items():
        usual = getattr(_USUAL, name)
        if type(value) is not type(usual) and not (type(usual) is float and type(value) is int):
            raise InvariantError(f"the field {name!r} of event 'job' is not like {usual!r}: {value!r:.100}")
    job = Job(**plain)
    if problems := size_problems(job):
        raise InvariantError(f"the job of event 'job' cannot be: {problems[0]}")
    return job


_USUAL = Job()


def _refuse_long(value: Any) -> None:
    """Refuses a whole number, also inside of a value, that has too many digits."""
    if type(value) is int and len(digits := str(value)) > _MOST_DIGITS:
        raise InvariantError(f"no number of a run is as long as {digits[:_MOST_DIGITS]}...")
    for item in value if type(value) is list else value.values() if type(value) is dict else ():
        _refuse_long(item)


def whole_end(line: str) -> str:
    """Returns the whole record that another writer appended to a torn line; empty without one."""
    begin = line.rfind('{"event":')
    return line[begin:] if begin > 0 else ""


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
