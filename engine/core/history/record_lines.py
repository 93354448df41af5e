"""Writes records as lines, and reads them: a line is one JSON object, with the kind first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import Any, get_type_hints

from engine.core.config.job import Job
from engine.core.config.size import size_problems
from engine.core.errors import InvariantError
from engine.core.exclusion import Verdict, verdict_of
from engine.core.history import (
    elastic_records,
    memory_records,
    process_records,
    request_records,
    run_records,
    verdict_records,
)
from engine.core.history.record import UNSEALED, VERSION, Record, StampedRecord, kind_of
from engine.core.history.run_records import CommitRecord, JobRecord
from engine.core.history.verdict_records import Difference
from engine.core.message_codec import Reader, reader_of, strict_text

RECORDS: dict[str, type[Record]] = {
    kind_of(each): each
    for module in (run_records, process_records, memory_records, request_records, elastic_records, verdict_records)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Record) and each not in (Record, StampedRecord)
}
_STAMPS = {each.name for each in fields(StampedRecord)}
_DEFAULTS = {
    each: {field.name: field.default for field in fields(each) if field.name not in _STAMPS}
    for each in RECORDS.values()
}
_TYPES_OF_COMMIT = (int, int, int, int, float, float, float, bool)  # in the order of the line
_OF_JOB = frozenset(Job.__dataclass_fields__)
_NEEDED = {
    each: frozenset(field.name for field in fields(each) if _DEFAULTS[each].get(field.name, MISSING) is MISSING)
    for each in RECORDS.values()
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
    """Returns the job of a record, whose sizes are those of a job that can be run."""
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
