"""Frames, in which the messages between hosts travel, and the rules of those that come from another host.

Rules: a frame is a header, a line break, and the control message, the line, or the compressed bytes of files, if the
header is of one of these. All else is JSON, which has no line break. A frame that is longer than `MOST_BYTES`, or of
another form, ends the stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from struct import Struct

from engine.codec.messages import decode, encode
from engine.core.errors import InvariantError
from engine.core.hosts.host_messages import (
    MOST_SHIPPED_BYTES,
    ControlHostMessage,
    DecisionHostMessage,
    ForkHostMessage,
    FromOtherHost,
    PastControlHostMessage,
    PastDecisionHostMessage,
    ProcessesHostMessage,
    ShippedHostMessage,
    ShippedPart,
    SignalHostMessage,
    SignsHostMessage,
    ToOtherHost,
    WorkerSign,
    is_shipped,
)
from engine.core.hosts.host_options import NAME
from engine.core.message_kinds import MAX_BYTES, Message, ToAgent
from engine.core.messages import BordersMessage, HeartbeatMessage, PartitionMessage, WelcomeMessage

MOST_BYTES = MAX_BYTES + 1_000  # of a frame: a control message and its header
_BREAK = b"\n"
_SIGNS, _SIGN_BYTES = 32, MAX_BYTES // 2  # in one frame; of their heartbeats
_FAST = 1  # of zlib: events become a sixth, entries of actions a third, in 3 ms for a megabyte
_PACKED = (ControlHostMessage, DecisionHostMessage, PastDecisionHostMessage, PastControlHostMessage, ShippedHostMessage)


def sign_frames(
    received: int, sent_ns: int, signs: Sequence[WorkerSign], echo: tuple[int, ...] = ()
) -> Iterator[bytes]:
    """Yields the frames with signs of life, one without any too: a heartbeat is longer the more workers there are."""
    first, num_bytes = 0, 0
    for place, sign in enumerate(signs):
        num_bytes += len(sign.heartbeat)
        if place - first >= _SIGNS or (num_bytes > _SIGN_BYTES and place > first):
            yield frame(SignsHostMessage(received, sent_ns, tuple(signs[first:place])))
            first, num_bytes = place, len(sign.heartbeat)
    yield frame(SignsHostMessage(received, sent_ns, tuple(signs[first:]), echo))


def frame(header: Message, packet: bytes = b"") -> bytes:
    """Returns a frame; raises InvariantError for one of bamboo's own that is too long."""
    data = encode(header) + (_BREAK + packet if packet else b"")
    if len(data) > MOST_BYTES:
        raise InvariantError(f"a frame {type(header).__name__} of {len(data)} bytes is too long")
    return data


def read_frame(data: bytes) -> tuple[Message, bytes]:
    """Returns the header of a frame and the packet behind it; raises InvariantError for another form."""
    if len(data) > MOST_BYTES:
        raise InvariantError(f"a frame has {len(data)} bytes, and at most {MOST_BYTES}")
    header, separator, packet = data.partition(_BREAK)
    message = decode(header)
    if not isinstance(message, FromOtherHost | ToOtherHost):
        raise InvariantError(f"a frame begins with a message between hosts, not with {type(message).__name__}")
    if bool(separator) is not isinstance(message, _PACKED):
        raise InvariantError("a control message, a line, or bytes, follow a header that says so, and no other")
    return message, packet


# A bundle: the frames that are due at one time travel as one message, because each message has its price.
#
# Rule: each frame has its length in front of it, four bytes, the highest one first. A bundle without a frame, or one
# whose lengths do not add up, ends the stream.

_LENGTH = Struct(">I")
MOST_BUNDLE_BYTES = MOST_BYTES + _LENGTH.size


def fits(num_bytes: int, frame: bytes) -> bool:
    """Returns whether a frame fits a bundle that has `num_bytes` already; the first one always does."""
    return not num_bytes or num_bytes + bundled_bytes(frame) <= MOST_BUNDLE_BYTES


def bundled_bytes(frame: bytes) -> int:
    """Returns the bytes of a frame in a bundle."""
    return _LENGTH.size + len(frame)


def bundle(frames: Iterable[bytes]) -> bytes:
    """Returns frames as one message."""
    return b"".join(part for each in frames for part in (_LENGTH.pack(len(each)), each))


def frames_of(data: bytes) -> list[bytes]:
    """Returns the frames of a bundle, in order; raises InvariantError for another form."""
    frames, place = list[bytes](), 0
    while place < len(data) or not frames:
        begin = place + _LENGTH.size
        place = begin + (_LENGTH.unpack_from(data, place)[0] if begin <= len(data) else 0)
        if place > len(data):
            raise InvariantError(f"a bundle of {len(data)} bytes ends inside of a frame")
        frames.append(data[begin:place])
    return frames


# The rules of frames of another host beyond their form: numbers that a host can have, and words of workers alone.
#
# Rule: a frame that has passed can be carried out. A frame that has not passed proves that the other end is
# no agent of this version, so its host is lost.

_MOST = 1 << 63  # of any number, as it may get into memory that is shared with workers
_MOST_PLACE = 1 << 31  # of the first numbers of a place
_MOST_WORKERS = 1 << 16
_MOST_SIGNAL = 64
_OF_PROCESS = (3, 4)

Packets = tuple[Message, bytes]


def read_from_host(data: bytes) -> Packets:
    """Returns a frame to the host that coordinates; raises InvariantError for one that no host sends."""
    header, packet = _read(data, FromOtherHost)
    if isinstance(header, ControlHostMessage):
        _refuse_unless(isinstance(decode(packet), ToAgent), "a message that a worker sends")
    elif isinstance(header, SignsHostMessage):
        _refuse_unless(len(header.echo) in (0, 2) and min(header.echo, default=0) >= 0, "two times")
        for each in header.signs:
            _check_sign(each)
    elif isinstance(header, ProcessesHostMessage):
        for facts in header.processes:
            _refuse_unless(len(facts) in _OF_PROCESS and min(facts[:3]) >= 0, "a number, a worker and a pid")
            _refuse_unless(facts[1] < _MOST_WORKERS, f"at most {_MOST_WORKERS} workers")
        _refuse_unless(header.heard >= 0, "a number of decisions")
    elif isinstance(header, PastControlHostMessage):
        is_taught = isinstance(decode(packet), WelcomeMessage | PartitionMessage | BordersMessage)
        _refuse_unless(is_taught, "a message that each newcomer is told")
    elif isinstance(header, PastDecisionHostMessage):
        _refuse_unless(header.number >= 0 and packet.isascii(), "a decision in plain text, and its number")
    return header, packet


def read_from_coordinator(data: bytes) -> Packets:
    """Returns a frame of the host that coordinates; raises InvariantError for one that it does not send."""
    header, packet = _read(data, ToOtherHost)
    if isinstance(header, ForkHostMessage):
        _refuse_unless(0 <= header.worker < header.num_lines <= _MOST_WORKERS, "a worker that has a line of the board")
    elif isinstance(header, SignalHostMessage):
        _refuse_unless(0 <= header.number <= _MOST_SIGNAL, "a signal")
    return header, packet


def _read(data: bytes, of: type[Message]) -> Packets:
    header, packet = read_frame(data)
    if not isinstance(header, of):
        raise InvariantError(f"a frame {type(header).__name__} goes the other way")
    if isinstance(header, ControlHostMessage):
        _refuse_unless(0 < len(packet) <= MAX_BYTES, f"a control message of 1 to {MAX_BYTES} bytes")
    for each in fields(header):  # type: ignore[arg-type]
        _check_numbers(getattr(header, each.name))
    return header, packet


def _check_numbers(value: object) -> None:
    if isinstance(value, int):
        _refuse_unless(-_MOST <= value < _MOST, "a number of 64 bits")
    elif isinstance(value, tuple):
        for each in value:
            _check_numbers(each)


def _check_sign(sign: WorkerSign) -> None:
    place = sign.place or (0, 0, 0)
    _refuse_unless(all(-_MOST_PLACE <= number < _MOST_PLACE for number in place[:3]), "a place in a step")
    state = sign.times[0] if sign.times else ""
    _refuse_unless(f"{sign.heartbeat}{sign.progress[2]}{state}".isascii(), "plain text")
    if sign.heartbeat:
        _refuse_unless(isinstance(decode(sign.heartbeat.encode()), HeartbeatMessage), "a heartbeat")


def _refuse_unless(is_so: bool, kind: str) -> None:
    if not is_so:
        raise InvariantError(f"a frame has something else than {kind}")


def shipped_frame(parts: Sequence[tuple[ShippedPart, bytes]], *, is_last: bool = False) -> bytes:
    """Returns the frame of some parts and their bytes; `is_last`: the host has nothing more."""
    header = ShippedHostMessage(tuple(part for part, _ in parts), is_last)
    return frame(header, zlib.compress(b"".join(data for _, data in parts), _FAST))


def shipped_parts(header: ShippedHostMessage, packet: bytes) -> list[tuple[ShippedPart, bytes]]:
    """Returns the parts of a frame and their bytes; raises InvariantError for any other form."""
    for part in header.parts:
        if not (NAME.fullmatch(part.node) and is_shipped(part.file) and part.begin >= 0 and part.length >= 0):
            raise InvariantError(f"this is no part of the records of a host: {part!r:.200}")
    total = sum(part.length for part in header.parts)
    if total > MOST_SHIPPED_BYTES:
        raise InvariantError(f"{total} bytes of records come in one frame, and at most {MOST_SHIPPED_BYTES} may")
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(packet, total + 1)  # a few bytes can stand for millions
    except zlib.error as error:
        raise InvariantError(f"records of a host cannot be read: {error}") from error
    if len(data) != total or not inflating.eof or inflating.unused_data:
        raise InvariantError(f"records of a host do not have the {total} bytes of their parts")
    parts = []
    for part in header.parts:
        parts.append((part, data[: part.length]))
        data = data[part.length :]
    return parts
