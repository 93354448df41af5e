"""Values of any class of the core as JSON, and back: msgspec reads the form of a class off its annotations.

Rules: a data class is an object, a tuple and a named tuple are lists, an enum is its value. JSON has no number that is
not finite: a text of `NOT_FINITE` stands in its place. A text that is kept (a record, a manifest, a key in the store)
has ASCII only, and floats as Python writes them, so a value has the same text in every version of bamboo: hashes and
comparisons depend on it. The standard library writes these texts; msgspec reads all. An error names the field.
"""

from __future__ import annotations

import json
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.core.errors import InvariantError

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_MOST = 300  # characters of a wrong value in an error

# msgspec shows a class to other threads while it still looks at it; who reads that class then crashes the process. No
# process is forked meanwhile: its copy of the class would stay half looked at.
_LOOKING = threading.Lock()
os.register_at_fork(before=_LOOKING.acquire, after_in_parent=_LOOKING.release, after_in_child=_LOOKING.release)
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}

Made = TypeVar("Made")


def decoder_of(of: Any) -> msgspec.json.Decoder[Any]:
    """Returns the decoder of a class; before any other use of a class, msgspec must have looked at it here."""
    if of not in _DECODERS:
        with _LOOKING:
            _DECODERS[of] = msgspec.json.Decoder(of)
    return _DECODERS[of]


def other_plain(value: Any) -> Any:
    """Returns a value that msgspec does not know as one that it knows: a mapping as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"JSON has no {type(value).__name__}")


def plain_of(value: Any) -> Any:
    """Returns a value as values of JSON; tuples stay tuples."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=other_plain)


_TEXTS = {
    is_sorted: json.JSONEncoder(separators=(",", ":"), sort_keys=is_sorted, allow_nan=False, default=plain_of).encode
    for is_sorted in (False, True)
}


def text_of(value: Any, *, sort_keys: bool = False) -> str:
    """Returns the text of a value, in one line; equal values have the same text."""
    try:
        return _TEXTS[sort_keys](value)
    except ValueError:
        plain = json.loads(json.dumps(value, default=plain_of), parse_constant=str)
        return _TEXTS[sort_keys](plain)


def cut(text: str, most: int, note: str) -> str:
    """Returns a text that has at most `most` bytes in a message; a longer one is cut, and ends in the note."""
    if len(text) <= most and _size(text) <= most:
        return text
    if 2 * _size(note) > most:
        note = "..."
    room = most - _size(note)
    length = bisect_right(range(min(len(text), room) + 1), room, key=lambda number: _size(text[:number])) - 1
    return text[:length] + note


def _size(text: str) -> int:
    """Returns the bytes that a text has in a message, without its quotes."""
    return len(text_of(text)) - 2


def parsed(text: str | bytes) -> Any:
    """Returns the values of JSON in a text; raises ValueError, or RecursionError where it is nested too deep."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return json.loads(text)  # which takes halves of surrogate pairs, as names of files have them, and NaN


def read(text: str | bytes, of: type[Made], called: str, *, is_whole: bool = True) -> Made:
    """Returns the value of a class in a text; raises InvariantError, which calls it so, for any other text."""
    try:
        return value_of(parsed(text), of, "it", is_whole=is_whole)
    except (ValueError, RecursionError, InvariantError) as error:
        raise InvariantError(f"invalid {called}: {error}: {text[:_MOST]!r}") from error


def value_of(plain: Any, of: type[Made], called: str, *, is_whole: bool = True) -> Made:
    """Returns the value of a class from plain values; raises InvariantError with the first wrong field.

    No object has another field than its class. With `is_whole` each has all of them.
    """
    value = converted(plain, of, called)
    try:
        _compare(plain, plain_of(value), called, is_whole)
    except RecursionError as error:
        raise InvariantError(f"{called} is nested too deep") from error
    return value


def converted(plain: Any, of: type[Made], called: str) -> Made:
    """Returns the value as `value_of` does, but leaves out fields that the class does not have."""
    decoder_of(of)
    try:
        return msgspec.convert(plain, of, str_keys=True)
    except msgspec.ValidationError:
        pass
    # Numbers that are not finite are texts, which the lax mode reads: all at once, because a list may have millions.
    try:
        value = msgspec.convert(plain, of, str_keys=True, strict=False)
        _refuse_lax(plain, plain_of(value), called, called)
    except msgspec.ValidationError as error:
        raise InvariantError(_worded(str(error), called)) from None
    except RecursionError as error:
        raise InvariantError(f"{called} is nested too deep") from error
    return value


def _refuse_lax(plain: Any, built: Any, where: str, called: str) -> None:
    """Refuses plain values that only the lax mode reads, but for the texts of `NOT_FINITE`."""
    if isinstance(plain, list):
        for one, other in zip(plain, built, strict=False):
            _refuse_lax(one, other, where, called)
    elif isinstance(plain, dict):
        for name in plain.keys() & built.keys():
            _refuse_lax(plain[name], built[name], f"the field {name!r} of {called}", called)
    elif type(plain) is not type(built) and not (type(built) is float and (type(plain) is int or plain in NOT_FINITE)):
        raise InvariantError(f"{where} is not right: expected another type, found {plain!r:.{_MOST}}")


def _worded(error: str, called: str) -> str:
    fields = re.findall(r"\.(\w+)", error.rpartition("$")[2])
    if not fields and (missing := _MISSING.match(error)):
        return f"{called} lacks its field {missing[1]!r}"
    where = f"the field {fields[-1]!r} of {called}" if fields else called
    return f"{where} is not right: {error[:_MOST]}"


def _compare(plain: Any, built: Any, called: str, is_whole: bool) -> None:
    """Refuses plain values in which an object has other fields than in those of the value that was built of them."""
    if isinstance(plain, list):
        for one, other in zip(plain, built, strict=False):
            _compare(one, other, called, is_whole)
    elif isinstance(plain, dict):
        if is_whole and (missing := built.keys() - plain.keys()):
            raise InvariantError(f"{called} lacks its field {min(missing)!r}")
        if unknown := plain.keys() - built.keys():
            raise InvariantError(f"{called} has no field {min(unknown)!r}")
        for name, value in plain.items():
            _compare(value, built[name], called, is_whole)
