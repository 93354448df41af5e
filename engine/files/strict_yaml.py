"""Reads YAML as plain values with the place of each; rejects forms whose value would surprise their author.

Rules: duplicate keys, keys that are not text, anchors, aliases, tags, merge keys, a second document and ambiguous
scalars are problems. Size, depth and number of values are bounded, and reading stops after `MOST_PROBLEMS` problems.
Values are built from the parser's events, so no constructor of PyYAML ever runs. A value with a problem is left out, so
it is reported only once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from engine.core.errors import MOST_PROBLEMS, Problem, UserError, nearest
from engine.files.yaml_scalar import YamlScalar, plain_value, surprise

YamlValue = YamlScalar | list["YamlValue"] | dict[str, "YamlValue"]
KeyPath = tuple[str | int, ...]
TextPlace = tuple[int, int]

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_VALUES = 10_000  # including keys; PyYAML takes half a second for that many

_BROKEN: Any = object()
_INDENT = "indent this line as its neighbours: keys of one mapping, and items of one list, begin in one column"
# Problems of PyYAML -> what to do about each.
_PLAIN_WORDS = (
    (re.compile(r"'\\t'"), "indent with spaces, not tabs"),
    (re.compile(r"<block end>, but found '<scalar>'"), "quote the whole value, or indent this line as its neighbours"),
    (re.compile(r"<block end>, but found|mapping values are not allowed"), _INDENT),
    (re.compile(r"could not find expected ':'"), "write ': ' between a key and its value"),
    (re.compile(r"expected ',' or '[]}]'"), "close each [ and {, and put commas between the values"),
    (re.compile(r"unexpected end of stream"), "close the quote"),
    (re.compile(r"that cannot start any token"), "quote a value that begins with this character"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One file or text: its value, the (line, column) of every value and key, and the problems found."""

    source: str
    value: YamlValue = None
    places: dict[KeyPath, TextPlace] = field(default_factory=dict)
    key_places: dict[KeyPath, TextPlace] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def part(self, key: str) -> Document:
        """Returns the value under a key as a document, without the problems of the whole; an absent value is None."""
        value = self.value.get(key) if isinstance(self.value, dict) else None
        places, key_places = (
            {path[1:]: place for path, place in of_paths.items() if path[:1] == (key,)}
            for of_paths in (self.places, self.key_places)
        )
        return Document(self.source, value, places, key_places)


def read_yaml(path: Path) -> Document:
    """Returns a YAML file as a document, to which the caller adds problems; raises UserError if it is unreadable."""
    source = str(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would block
        raise UserError([Problem("", "a file", "something else", "", source)])
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # no path has a NUL, or half of a surrogate pair
        reason = getattr(error, "strerror", "") or str(error)
        raise UserError([Problem("", "a file that can be read", reason, _neighbour(path), source)]) from error
    if len(data) > MAX_BYTES:
        return Document(source, problems=(Problem("", f"at most {MAX_BYTES} bytes", source=source),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        place = (data.count(b"\n", 0, error.start) + 1, len(data[line_start : error.start].decode()) + 1)
        problem = Problem("", "UTF-8 text", repr(data[error.start : error.start + 1]), "", source, *place)
        return Document(source, problems=(problem,))
    return read_text(text, source)


def _neighbour(path: Path) -> str:
    """Returns a hint at the file beside `path` whose name is nearest; empty if there is none."""
    try:
        return "" if path.exists() else nearest(path.name, (other.name for other in path.parent.iterdir()))
    except (OSError, ValueError):
        return ""


def read_text(text: str, source: str) -> Document:
    """Returns a YAML text as a document; `source` names the text in its problems."""
    builder = _Builder(source)
    value = builder.build(text)
    value = None if value is _BROKEN else value
    return Document(source, value, builder.places, builder.key_places, tuple(builder.problems))


def read_scalar(text: str, source: str, name: str) -> Document:
    """Returns a text of the command line or the environment as a document of one scalar, the value of `name`."""
    document = read_text(text, source)
    problems = [replace(problem, field=problem.field or name, line=0, column=0) for problem in document.problems]
    if not problems and isinstance(document.value, (list, dict)):
        is_list = isinstance(document.value, list)
        kind, hint = ("a list", "separate values by commas, without brackets") if is_list else ("a mapping", "quote it")
        problems = [Problem(name, "one value", kind, hint, source)]
    # YAML would drop " # ..." as a comment; on a command line it is part of the value.
    if not problems and re.search(r"^[^'\"]*(^|\s)#", text):
        problems = [Problem(name, "one value", repr(text), "quote it", source)]
    return replace(document, value=None if problems else document.value, problems=tuple(problems))


class _EndOfReadingError(Exception):
    pass


class _Builder:
    """Builds one document from the events of PyYAML's parser and collects its problems."""

    def __init__(self, source: str):
        self.source = source
        self.places: dict[KeyPath, TextPlace] = {}
        self.key_places: dict[KeyPath, TextPlace] = {}
        self.problems: list[Problem] = []
        self.num_values = 0

    def build(self, text: str) -> YamlValue:
        try:
            self.loader = yaml.SafeLoader(text)
            return self._document()
        except _EndOfReadingError:
            pass
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = (before.count("\n") + 1, len(before) - before.rfind("\n"))
            character = f"the control character {chr(error.character)!r}"
            self.problems.append(Problem("", "readable YAML", character, "", self.source, *place))
        except yaml.MarkedYAMLError as error:
            hint = _plain_words(str(error.problem), text, error.problem_mark)
            place = (error.problem_mark.line + 1, error.problem_mark.column + 1) if error.problem_mark else (1, 1)
            self.problems.append(Problem("", "readable YAML", "", hint, self.source, *place))
        except (ValueError, OverflowError):
            # PyYAML raises these for an escape such as "\UFFFFFFFF".
            place = (self.loader.line + 1, self.loader.column + 1)
            self.problems.append(
                Problem("", "readable YAML", "", "an escape that names no character", self.source, *place)
            )
        return None

    def _document(self) -> YamlValue:
        self.loader.get_event()
        if isinstance(self.loader.get_event(), yaml.StreamEndEvent):
            return None
        value = self._node((), self.loader.get_event())
        self.loader.get_event()
        event = self.loader.get_event()
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse((), event, "one document", "a second one", "remove what follows")
        return value

    def _refuse(self, path: KeyPath, event: Any, expected: str, actual: str, hint: str) -> None:
        name = ".".join(map(str, path))
        self.problems.append(Problem(name, expected, actual, hint, self.source, *_place(event)))
        if len(self.problems) > MOST_PROBLEMS:
            raise _EndOfReadingError

    def _count(self, event: Any) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self._refuse((), event, f"at most {MAX_VALUES} keys and values", "more", "")
            raise _EndOfReadingError

    def _node(self, path: KeyPath, event: Any) -> YamlValue:
        self._count(event)
        self.places.setdefault(path, _place(event))
        if isinstance(event, yaml.AliasEvent):
            self._refuse(path, event, "no alias", f"'*{event.anchor}'", "write the value out")
            return _BROKEN
        self._check_properties(path, event)
        if isinstance(event, yaml.ScalarEvent):
            if event.style is None and (hint := surprise(event.value)):
                self._refuse(path, event, "a value that reads only one way", repr(event.value), hint)
                return _BROKEN
            return plain_value(event.value) if event.style is None else str(event.value)
        if len(path) >= MAX_DEPTH:
            self._refuse((), event, f"at most {MAX_DEPTH} levels", "a deeper one", "")
            raise _EndOfReadingError
        if not isinstance(event, yaml.SequenceStartEvent):
            return self._mapping(path)
        items: list[YamlValue] = []
        while not isinstance(event := self.loader.get_event(), yaml.SequenceEndEvent):
            items.append(self._node((*path, len(items)), event))
        return _BROKEN if any(item is _BROKEN for item in items) else items

    def _check_properties(self, path: KeyPath, event: Any) -> None:
        if event.anchor is not None:
            self._refuse(path, event, "no anchor", f"'&{event.anchor}'", "remove it")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(path, event, "no tag", repr(tag), "remove it")

    def _mapping(self, path: KeyPath) -> YamlValue:
        mapping: dict[str, YamlValue] = {}
        first_lines: dict[str, int] = {}
        while not isinstance(event := self.loader.get_event(), yaml.MappingEndEvent):
            key = self._key(path, event)
            here = (*path, "?" if key is None else key)
            self.key_places.setdefault(here, _place(event))
            if key in first_lines:
                self._refuse(here, event, "one value", "a second one", f"the first is in line {first_lines[key]}")
            value = self._node(here, self.loader.get_event())
            if key is not None and key not in first_lines:
                first_lines[key] = _place(event)[0]
                if value is not _BROKEN:
                    mapping[key] = value
        return mapping

    def _key(self, path: KeyPath, event: Any) -> str | None:
        self._count(event)
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(path, event, "a text key", "an alias, a list or a mapping", "")
            self._node((*path, "?"), event)
            return None
        self._check_properties(path, event)
        text = str(event.value)
        if event.style is not None:
            return text
        if text == "<<":
            self._refuse(path, event, "no merge key", "'<<'", "write its keys out")
            return None
        # y and n are fine as keys: all YAML readers in use read them as text.
        if (surprise(text) and text.lower() not in ("y", "n")) or not isinstance(plain_value(text), str):
            self._refuse(path, event, "a text key", repr(text), "quote it")
            return None
        return text


def _plain_words(problem: str, text: str, mark: Any) -> str:
    if problem.startswith("mapping values") and ": " in text[: mark.index].rpartition("\n")[2]:
        return "quote the value, which has a second ': '"
    return next((words for pattern, words in _PLAIN_WORDS if pattern.search(problem)), problem)


def _place(event: Any) -> TextPlace:
    return (event.start_mark.line + 1, event.start_mark.column + 1)
