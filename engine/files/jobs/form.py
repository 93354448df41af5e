"""Forms: one definition of the valid values of a part of a YAML file serves to check files and to make JSON schemas.

Rules: a form reports every problem in its part, each at its place. A value with a problem is left out of the result, so
that the caller sees valid values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from engine.core.errors import MOST_PROBLEMS, Problem, UserError, nearest
from engine.files.jobs.job_value import shown
from engine.files.strict_yaml import Document, KeyPath

# Writes scenarios as YAML.


def scenario_text(values: dict[str, Any]) -> str:
    """Returns plain values of a scenario as a YAML file."""
    return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=False))


BAD: Any = object()


@dataclass(slots=True)
class Reading:
    """One document while it is checked, and the problems found so far."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, path: KeyPath, expected: str, found: str = "", hint: str = "", *, key: bool = False) -> None:
        """Adds a problem with the value at a path, or with its key; raises UserError if there are too many to tell."""
        name = ".".join(str(part) for part in path)
        self.problems.append(Problem(name, expected, found, hint, self.document.source, *self.place(path, key=key)))
        if len(self.problems) > MOST_PROBLEMS:
            raise in_order(self.problems)

    def place(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """Returns line and column of the value or key at a path; if it is absent, of the nearest value around it."""
        places = self.document.key_places if key else self.document.places
        while path and path not in places:
            path, places = path[:-1], self.document.places
        return places.get(path, (1, 1))

    def located(self, problem: Problem) -> Problem:
        """Returns a problem with the `place` of its field added."""
        path: KeyPath = tuple(
            int(part) if part.isdecimal() and len(part) < 10 else part for part in problem.field.split(".")
        )
        line, column = self.place(path)
        return replace(problem, source=self.document.source, line=line, column=column)


def in_order(problems: Iterable[Problem]) -> UserError:
    """Returns the error that holds all problems, sorted by file and line."""
    return UserError(sorted(problems, key=lambda each: (each.source, each.line, each.column)))


@dataclass(frozen=True, slots=True)
class Atom:
    """One value; `read` returns it in the program's units, or None if it is not as `expected`."""

    expected: str
    read: Callable[[object], Any]
    json: Mapping[str, Any]
    choices: tuple[str, ...] = ()

    def check(self, reading: Reading, path: KeyPath, value: object) -> Any:
        """Returns the value as read, or `BAD`."""
        found = self.read(value)
        if found is None:
            reading.refuse(path, self.expected, shown(value), nearest(str(value), self.choices))
            return BAD
        return found

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the value."""
        return dict(self.json)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of at least one item; all items have the same form."""

    item: Form

    def check(self, reading: Reading, path: KeyPath, value: object) -> Any:
        """Returns the items as their form reads them, or `BAD` if `value` is no such list."""
        if not isinstance(value, list) or not value:
            reading.refuse(path, "a list of at least one", shown(value))
            return BAD
        # An item with a problem keeps its place, so that the numbers of the others do not shift.
        return [self.item.check(reading, (*path, number), each) for number, each in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the form."""
        return {"type": "array", "minItems": 1, "items": self.item.schema()}


@dataclass(frozen=True, slots=True)
class FormEntry:
    """One key of a mapping."""

    form: Form
    about: str
    required: bool = False
    expected: str = "a value"  # in the message that it is missing


@dataclass(frozen=True, slots=True)
class MappingOf:
    """A mapping with known keys; exactly one key of `one_of` and at least one of `any_of` must be present."""

    entries: Mapping[str, FormEntry]
    one_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()

    def check(self, reading: Reading, path: KeyPath, value: object) -> Any:
        """Returns the valid entries, or `BAD` if `value` is no mapping."""
        if not isinstance(value, dict):
            reading.refuse(path, f"a mapping with {', '.join(self.entries)}", shown(value))
            return BAD
        good = {}
        for name, each in value.items():
            if name not in self.entries:
                hint = nearest(name, self.entries) or f"there is {', '.join(self.entries)}"
                reading.refuse((*path, name), "a field that is known here", repr(name), hint, key=True)
                continue
            found = self.entries[name].form.check(reading, (*path, name), each)
            if found is not BAD:
                good[name] = found
        self._check_presence(reading, path, value)
        return good

    def _check_presence(self, reading: Reading, path: KeyPath, value: Mapping[str, object]) -> None:
        for name, entry in self.entries.items():
            if entry.required and not _is_there(reading, path, name, value):
                reading.refuse((*path, name), entry.expected, "nothing", entry.about)
        there = [name for name in self.one_of if _is_there(reading, path, name, value)]
        if self.one_of and len(there) != 1:
            reading.refuse(path, f"one of {', '.join(self.one_of)}", " and ".join(there) or "none of them")
        if self.any_of and not any(_is_there(reading, path, name, value) for name in self.any_of):
            reading.refuse(path, f"{' or '.join(self.any_of)}", "none of them")

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the form."""
        properties = {name: {"description": each.about, **each.form.schema()} for name, each in self.entries.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [name for name, each in self.entries.items() if each.required]
        if required:
            schema["required"] = required
        for rule, names in (("oneOf", self.one_of), ("anyOf", self.any_of)):
            if names:
                schema[rule] = [{"required": [name]} for name in names]
        return schema


Form = Atom | ListOf | MappingOf


def _is_there(reading: Reading, path: KeyPath, name: str, value: Mapping[str, object]) -> bool:
    """Says whether a key is present in the file, even if its value had a problem and was left out."""
    return name in value or (*path, name) in reading.document.key_places


def text(about: str = "text", pattern: str = "") -> Atom:
    """Returns the form of a text that is not empty and, if `pattern` is given, matches it as a whole."""
    import re

    def read(value: object) -> str | None:
        good = isinstance(value, str) and value.strip() and (not pattern or re.fullmatch(pattern, value))
        return str(value) if good else None

    return Atom(about, read, {"type": "string", "minLength": 1, **({"pattern": f"^{pattern}$"} if pattern else {})})


def whole(least: int = 0, most: int | None = None) -> Atom:
    """Returns the form of a whole number that is at least `least`, and at most `most`."""

    def read(value: object) -> int | None:
        return value if type(value) is int and value >= least and (most is None or value <= most) else None

    schema = {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})
    return Atom(f"a whole number >= {least}{'' if most is None else f' and <= {most}'}", read, schema)


def choice(*choices: str) -> Atom:
    """Returns the form of one of the words `choices`."""
    schema = {"enum": list(choices)}
    return Atom(f"one of {', '.join(choices)}", lambda value: value if value in choices else None, schema, choices)


def flag() -> Atom:
    """Returns the form of true or false."""
    return Atom("true or false", lambda value: value if isinstance(value, bool) else None, {"type": "boolean"})
