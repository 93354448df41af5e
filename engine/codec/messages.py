"""Control messages as they travel: a message is one JSON object that names its kind, with every field of its class.

A message has at most `MAX_BYTES`. Texts of a user may have any length: the class of a message with such texts has a
`cut_note`, and its longest texts are cut so that it fits. Any other message that is longer, such as the plan of a large
job, is compressed behind its kind; one that does not fit then is a bug.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from engine.codec.values import cut, decoder_of, other_plain, parsed, plain_of, value_of
from engine.core.errors import InvariantError
from engine.core.message_kinds import MAX_BYTES, Message, class_of, head_of, kind_of, kinds

_LEAST_BYTES = 8  # of a text that is cut
_BESIDE_ROWS = 1_000  # bytes of a message beside its rows
_HEAD = b'{"kind":"'
_PACKED = b"\0"  # behind the kind: the rest is compressed
_MOST_BYTES = 16_000_000  # of a message before it is compressed

Row = TypeVar("Row")
_encoder = msgspec.json.Encoder(enc_hook=other_plain)
_head = cache(head_of)
_wire = json.JSONEncoder(separators=(",", ":"), default=plain_of).encode  # with numbers that are not finite


def encode(of: Message) -> bytes:
    """Returns a message as it travels. One that is too long has its longest texts cut, or it is compressed."""
    data = _text(of)
    if len(data) <= MAX_BYTES:
        return data
    if not of.cut_note:
        kind: Any = type(of)
        head = _head(kind)
        return head + _PACKED + zlib.compress(data[len(head) :], 1) if len(data) <= _MOST_BYTES else data
    whole, most = plain_of(of), MAX_BYTES // 4
    while len(data) > MAX_BYTES and most >= _LEAST_BYTES:
        data = _wire({"kind": kind_of(type(of)), **_with_cut_texts(whole, most, of.cut_note)}).encode()
        most //= 2
    return data


def _text(of: Message, *, is_read: bool = False) -> bytes:
    """Returns the text of a message; one that `is_read` has only finite numbers, as JSON has no others."""
    message_class: Any = type(of)
    try:
        data = _encoder.encode(of)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = b""
    # A number that is not finite has become null.
    if not data.isascii() or not data or (b"null" in data and not is_read and _reread(message_class, data) != of):
        data = _wire(of).encode()
    return _head(message_class) + (b"," if len(data) > 2 else b"") + data[1:]


def _reread(message_class: Any, data: bytes) -> Message | None:
    try:
        message: Message = decoder_of(message_class).decode(data)
    except msgspec.ValidationError:
        return None
    return message


def decode(data: bytes) -> Message:
    """Returns the message that `encode` made these bytes of; raises InvariantError for any other bytes."""
    end = data.find(b'"', len(_HEAD))
    message_class: Any = class_of(data[len(_HEAD) : end].decode(errors="replace"))
    if data[end + 1 : end + 2] == _PACKED:
        data = data[: end + 1] + _unpacked(data[end + 2 :])
    try:
        if message_class is not None:
            message: Message = decoder_of(message_class).decode(data)
            if _text(message, is_read=True) == data:
                return message
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return _looked_at(data)


def prepare_to_decode(base: type[Message]) -> None:
    """Makes the decoders of all kinds of a class: each takes up to 2 ms, and many kinds come first in a failure."""
    for message_class in kinds().values():
        if issubclass(message_class, base):
            decoder_of(message_class)


def _unpacked(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise InvariantError(f"a compressed message is broken: {error}") from error
    if not stream.eof or stream.unused_data:
        raise InvariantError(f"a compressed message is cut, or has more than {_MOST_BYTES} bytes")
    return whole


def _looked_at(data: bytes) -> Message:
    """Returns the message in bytes that are not as `encode` makes them; names the mistake, unless it means the same."""
    try:
        plain = parsed(data)
        kind = plain.pop("kind", None)
        message_class = class_of(kind)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvariantError(f"these bytes are not a message: {data[:100]!r}") from error
    if message_class is None:
        raise InvariantError(f"no message is of the kind {kind!r:.100}")
    return value_of(plain, message_class, f"a message {kind!r}")


def _with_cut_texts(value: Any, most: int, note: str) -> Any:
    """Returns plain values in which no text has more than `most` bytes."""
    if isinstance(value, str):
        return cut(value, most, note)
    if isinstance(value, (list, tuple)):
        return [_with_cut_texts(item, most, note) for item in value]
    if isinstance(value, dict):
        return {name: _with_cut_texts(item, most, note) for name, item in value.items()}
    return value


def in_messages(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Yields rows in order, as many together as one message takes."""
    part: list[Row] = []
    room = 0
    for row in rows:
        size = len(_wire(row)) + 1
        if part and size > room:
            yield tuple(part)
            part = []
        room = (room if part else MAX_BYTES - _BESIDE_ROWS) - size
        part.append(row)
    if part:
        yield tuple(part)
