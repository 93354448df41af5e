"""The codec of control messages: a message is a frozen data class, and travels as one JSON object that names its kind.

Rules: the kind is the name of the class in small letters, without its last word. The object has every field of the
class and no other, each of the annotated type; an error names kind and field. A tuple is a list in JSON, a data class
in a field is an object. The annotations of a class are read once, with its first message. Where a field holds a value
of another module as plain values or text, that module has the codec. Descriptors travel beside a message.

A message has at most `MAX_BYTES`. Texts of a user may have any length: the class of a message with such texts has a
`cut_note`, and its longest texts are cut so that it fits. Any other message that does not fit is a bug.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from engine.core.errors import InvariantError, ensure

MAX_BYTES = 160_000  # of a message; below the kernel's default socket buffer of 208 KiB
CUT = "... (cut)"
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # texts in files, in the place of numbers that JSON does not have
_LEAST_BYTES = 8  # of a text that is cut
_BESIDE_ROWS = 1_000  # bytes of a message beside its rows

Made = TypeVar("Made", bound="Message")
Row = TypeVar("Row")
Plain = Mapping[str, Any]  # a value of a module that has its codec
Read = Callable[[Any], Any]  # takes a value of JSON and returns the field's; raises TypeError for another type
Reader = tuple[frozenset[type], Read]


class Message:
    """One control message; its class is made by `message`. A `cut_note` ends each text that is cut."""

    __slots__ = ()
    cut_note = ""


class ToWorker(Message):
    """A message from the agent to a worker."""

    __slots__ = ()


class ToAgent(Message):
    """A message from a worker to the agent."""

    __slots__ = ()


class TextsToAgent(ToAgent):
    """A message from a worker to the agent with texts of the user's."""

    __slots__ = ()
    cut_note = CUT


class LastWords(ToAgent):
    """The last message of a worker, which has written its texts to its log."""

    __slots__ = ()
    cut_note = "... (cut; the log of the worker has the whole text)"


_SCALARS = frozenset({str, int, float, bool, NoneType})  # JSON has these; a number without a fraction may be a float
_KINDS: dict[str, type[Message]] = {}


def kind_of(made: type[Message]) -> str:
    """Returns the kind of a message as it travels, such as ``commit``."""
    return made.__name__.removesuffix("Message").lower()


def head_of(kind: type[Message]) -> bytes:
    """Returns the first bytes of every packet of a kind, by which a relay knows it without reading the rest."""
    return f'{{"kind":"{kind_of(kind)}"'.encode()


@dataclass_transform(frozen_default=True)
def message(made: type[Made]) -> type[Made]:
    """Makes a class a frozen data class with slots, and the one kind of message that has its name."""
    made = dataclass(frozen=True, slots=True)(made)
    kind = kind_of(made)
    ensure(kind not in _KINDS, f"two kinds of message are called {kind!r}")
    _KINDS[kind] = made
    return made


def kinds() -> Mapping[str, type[Message]]:
    """Returns the class of every kind."""
    return dict(_KINDS)


def encode(of: Message) -> bytes:
    """Returns a message as it travels; its longest texts are cut if it is too long and has a `cut_note`."""
    data = _TEXT({"kind": kind_of(type(of)), **_plain(of)}).encode()
    if len(data) <= MAX_BYTES or not of.cut_note:
        return data
    whole, most = json.loads(data), MAX_BYTES // 4
    kind = whole.pop("kind")
    while len(data) > MAX_BYTES and most >= _LEAST_BYTES:
        data = _TEXT({"kind": kind, **_with_cut_texts(whole, most, of.cut_note)}).encode()
        most //= 2
    return data


def strict_text(of: Any, **options: Any) -> str:
    """Returns the text of plain values as JSON, with a text of `NOT_FINITE` in the place of such a number."""
    try:
        return json.dumps(of, separators=(",", ":"), allow_nan=False, **options)
    except ValueError:
        known = json.loads(json.dumps(of, **options), parse_constant=str)
        return json.dumps(known, separators=(",", ":"), **options)


def _with_cut_texts(value: Any, most: int, note: str) -> Any:
    """Returns a value of JSON in which no text has more than `most` bytes."""
    if isinstance(value, str):
        return cut(value, most, note)
    if isinstance(value, list):
        return [_with_cut_texts(each, most, note) for each in value]
    if isinstance(value, dict):
        return {name: _with_cut_texts(each, most, note) for name, each in value.items()}
    return value


def cut(text: str, most: int, note: str) -> str:
    """Returns a text that has at most `most` bytes in a message; a longer one is cut, and ends in the note."""
    if len(text) <= most and _size(text) <= most:
        return text
    if 2 * _size(note) > most:
        note = "..."
    room = most - _size(note)
    length = bisect_right(range(min(len(text), room) + 1), room, key=lambda number: _size(text[:number])) - 1
    return text[:length] + note


def in_messages(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Yields rows in order, as many together as one message takes."""
    part: list[Row] = []
    room = 0
    for row in rows:
        size = len(_TEXT(row)) + 1
        if part and size > room:
            yield tuple(part)
            part = []
        room = (room if part else MAX_BYTES - _BESIDE_ROWS) - size
        part.append(row)
    if part:
        yield tuple(part)


def _size(text: str) -> int:
    """Returns the bytes that a text has in a message, without its quotes."""
    return len(_TEXT(text)) - 2


def decode(data: bytes) -> Message:
    """Returns the message that `encode` made these bytes of; raises InvariantError for any other bytes."""
    try:
        text = data.decode()
        found, end = _PARSE(text)  # which is quicker than json.loads, as there is no space before or after
        kind = found.pop("kind", None)
        made = _KINDS.get(kind)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvariantError(f"these bytes are no message: {data[:100]!r}") from error
    if made is None:
        raise InvariantError(f"no message is of the kind {kind!r:.100}")
    if end != len(text):
        raise InvariantError(f"more bytes follow a message {kind!r}: {text[end : end + 100]!r}")
    decoded: Message = _read(made, found)
    return decoded


def _plain(value: Any) -> dict[str, Any]:
    """Returns the fields of a data class, as the encoder takes them."""
    return {name: getattr(value, name) for name, _, _ in _form(value.__class__)}


_PARSE = json.JSONDecoder().raw_decode
_TEXT = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


@cache
def _form(made: Any) -> tuple[tuple[str, frozenset[type], Read], ...]:
    """Returns for each field of a data class its name, and the types and the reader of its annotation."""
    hints = get_type_hints(made)
    return tuple((each.name, *reader_of(hints[each.name])) for each in fields(made))


def _read(made: Any, found: Any) -> Any:
    """Returns the data class whose fields were found; raises InvariantError that names the first wrong one."""
    if type(found) is not dict:
        raise _wrong("an object", found)
    form, values = _form(made), []
    try:
        for name, scalars, read in form:
            value = found[name]
            values.append(value if type(value) in scalars else read(value))
    except KeyError:
        raise InvariantError(f"{_called(made)} lacks its field {name!r}") from None
    except TypeError as error:
        raise InvariantError(f"the field {name!r} of {_called(made)} is not {error}") from None
    if len(found) > len(values):
        unknown = sorted(found.keys() - {name for name, _, _ in form})
        raise InvariantError(f"{_called(made)} has no field {unknown[0]!r}")
    return made(*values)


def _called(made: type) -> str:
    return f"a message {kind_of(made)!r}" if issubclass(made, Message) else f"a {made.__name__.lower()}"


def _wrong(wanted: str, value: Any) -> TypeError:
    return TypeError(f"{wanted}: {value!r:.100}")


def reader_of(hint: Any) -> Reader:
    """Returns the types of scalars that an annotation takes as they are, and the reader of any other value."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    scalars = frozenset(each for each in members if each in _SCALARS)
    others = [each for each in members if each not in _SCALARS]
    if others:
        ensure(len(others) == 1, f"no field of a message can be {hint}")
        return scalars, _reader_of_many(others[0])
    wanted = " or ".join(sorted(each.__name__ for each in scalars))
    if float in scalars and str not in scalars:
        return scalars | {int}, partial(_number, wanted)
    return scalars | {int} if float in scalars else scalars, partial(_refuse, wanted)


def _reader_of_many(hint: Any) -> Read:
    """Returns the reader of an annotation whose values are no scalars."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return partial(_read, hint)
    if origin is tuple and arguments[-1] is ...:
        return partial(_items, reader_of(arguments[0]))
    if origin is tuple:
        return partial(_parts, tuple(map(reader_of, arguments)))
    if origin is Mapping:
        return partial(_values, reader_of(arguments[1]))
    if origin is Literal:
        return partial(_choice, arguments)
    ensure(hint is Any, f"no field of a message can be {hint}")
    return lambda value: value


def _refuse(wanted: str, value: Any) -> Any:
    raise _wrong(wanted, value)


def _number(wanted: str, value: Any) -> float:
    return float(value) if value in NOT_FINITE else _refuse(wanted, value)


def _choice(options: tuple[Any, ...], value: Any) -> Any:
    return value if value in options else _refuse(f"one of {', '.join(map(str, options))}", value)


def _items(item: Reader, value: Any) -> Any:
    if type(value) is not list:
        raise _wrong("a list", value)
    scalars, read = item
    if scalars.issuperset(map(type, value)):
        return tuple(value)
    return tuple([each if type(each) in scalars else read(each) for each in value])


def _parts(parts: tuple[Reader, ...], value: Any) -> Any:
    if type(value) is not list or len(value) != len(parts):
        raise _wrong(f"a list of {len(parts)}", value)
    return tuple([e if type(e) in scalars else read(e) for (scalars, read), e in zip(parts, value, strict=True)])


def _values(item: Reader, value: Any) -> Any:
    if type(value) is not dict:
        raise _wrong("an object", value)
    scalars, read = item
    return {name: each if type(each) in scalars else read(each) for name, each in value.items()}
