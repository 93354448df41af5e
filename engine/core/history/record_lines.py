"""Writes records as lines, and reads them: a line is one JSON object, with the kind first."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import Any

from engine.core.config.job import Job
from engine.core.errors import InvariantError
from engine.core.exclusion import verdict_of
from engine.core.history import process_records, run_records
from engine.core.history.record import VERSION, Record, StampedRecord, kind_of
from engine.core.history.run_records import ActionRecord, EpochRecord, JobRecord

RECORDS: dict[str, type[Record]] = {
    kind_of(each): each
    for module in (run_records, process_records)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Record) and each not in (Record, StampedRecord)
}
_STAMPS = {each.name for each in fields(StampedRecord)}
_DEFAULTS = {
    each: {field.name: field.default for field in fields(each) if field.name not in _STAMPS}
    for each in RECORDS.values()
}
_OF_JOB = frozenset(Job.__dataclass_fields__)
_NEEDED = {
    each: frozenset(field.name for field in fields(each) if _DEFAULTS[each].get(field.name, MISSING) is MISSING)
    for each in RECORDS.values()
} | {JobRecord: _STAMPS | {"version"} | _OF_JOB}


def encoded(record: Record) -> str:
    """Returns the line of a record, without the newline."""
    defaults = _DEFAULTS[type(record)]
    plain: dict[str, Any] = {"event": kind_of(type(record))}
    for name in type(record).__dataclass_fields__:
        value = getattr(record, name)
        if name not in defaults or value != defaults[name]:
            plain[name] = value
    if isinstance(record, JobRecord):
        plain |= asdict(plain.pop("job"))
    return json.dumps(plain, separators=(",", ":"))


def decoded(line: str) -> Record:
    """Returns the record of a line; raises InvariantError that names the mistake in the line."""
    try:
        plain = json.loads(line)
        kind = plain.pop("event")
    except (ValueError, LookupError, AttributeError, TypeError):
        raise InvariantError(f"expected one event as JSON, found {line[:80]!r}") from None
    record = RECORDS.get(kind)
    if record is None:
        raise InvariantError(f"unknown event {kind!r}; use the bamboo that recorded it")
    if record is JobRecord and plain.get("version") != VERSION:
        raise InvariantError(_other_version(plain.get("version")))
    if plain.keys() != _NEEDED[record]:
        _refuse_other_fields(kind, record, plain)
    if record is ActionRecord:  # the most frequent kind has no lists or objects
        return record(**plain)
    for name, value in plain.items():
        if type(value) is list:
            plain[name] = _tupled(value)
    if record is EpochRecord:
        plain["verdict"] = verdict_of(plain)
    elif record is JobRecord:
        plain["job"] = Job(**{name: plain.pop(name) for name in _OF_JOB})
    return record(**plain)


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


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if type(value) is list else value
