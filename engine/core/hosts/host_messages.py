"""The messages between the coordinator's host and another host of the run; and frames, in which they travel.

    host                                  coordinator's host
    HelloHost ------------------------->  knows the host, by name and incarnation
    <----------------------- HailedHost   each sends again all that the other has not received
    HoldsHost ------------------------->  first of all: its processes, which another coordinator takes over
    ToldHost -------------------------->  the decisions that it was told, and the next coordinator may not have been
    TaughtHost ------------------------>  what its workers were told, and each newcomer is told too
    WordsHost, then SaidAllHost ------->  the words of these, as far as the one before may have lost it
    <------------------------- ForkHost   forks a worker; its process has a number of its own, as workers begin again
    ForkedHost, or UnforkedHost ------->
    <---------- WordsHost ------------->  a control message of a worker, or to one, which follows in the frame
    <----------------------- SignalHost
    EndedHost ------------------------->  after the last words of the worker, and its last sign of life
    SignsHost ------------------------->  four times a second: signs of life, places and times of all workers
    <------------------------- TickHost   four times a second
    <------------------------ HeardHost   a decision, as the coordinator's host has recorded it
    <--------- ShippedHost ------------>  parts of the files of records, when nothing else waits to be sent
    <---------- KeptHost -------------->  so much of these files is kept: the next part may come
    LeavesHost ------------------------>  the host ends, and has no worker any more
    <----------------------- OutcomeHost  the run has ended

Rules: a frame is a header, a line break, and the control message, the line, or the compressed bytes of files, if the
header is of one of these. All else is JSON, which has no line break. A frame that is longer than `MOST_BYTES`, or of
another form, ends the stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from struct import Struct
from typing import Any, NamedTuple

from engine.core.errors import InvariantError
from engine.core.history.record_lines import ENTRY_BYTES, FOLDER, step_file
from engine.core.hosts.host_options import NAME
from engine.core.message_codec import CUT, MAX_BYTES, Message, ToAgent, decode, encode, message
from engine.core.messages import BorderMessage, HeartbeatMessage, PartitionMessage, WelcomeMessage

MOST_BYTES = MAX_BYTES + 1_000  # of a frame: a control message and its header
_BREAK = b"\n"
_SIGNS, _SIGN_BYTES = 32, MAX_BYTES // 2  # in one frame; of their heartbeats


class FromOtherHost(Message):
    """A message of a host to the coordinator's host."""

    __slots__ = ()


class ToOtherHost(Message):
    """A message of the coordinator's host to another one."""

    __slots__ = ()


@message
class HelloHostMessage(FromOtherHost):
    """The first of a connection; `received` frames have come over the connections before."""

    name: str
    incarnation: str
    received: int


@message
class HailedHostMessage(ToOtherHost):
    """The answer."""

    received: int


@message
class HoldsHostMessage(FromOtherHost):
    """The processes of a host: number, worker, pid, the exit code of one that has ended; and its decisions."""

    processes: tuple[tuple[int, ...], ...]
    heard: int  # the number of decisions


@message
class SaidAllHostMessage(FromOtherHost):
    """All has been said again that another coordinator has to hear."""


@message
class ForkHostMessage(ToOtherHost):
    """Asks for the process of a worker, which has `num_lines` of its host's board."""

    process: int
    worker: int
    num_lines: int


@message
class ForkedHostMessage(FromOtherHost):
    """The process of a worker was forked."""

    process: int
    pid: int


@message
class UnforkedHostMessage(FromOtherHost):
    """The host could not fork a worker."""

    cut_note = CUT
    process: int
    error: str


@message
class WordsHostMessage(FromOtherHost, ToOtherHost):
    """A control message of a process, or to one, follows in the frame."""

    process: int


@message
class SignalHostMessage(ToOtherHost):
    """Sends a signal to a process, if it has not ended; with 0 its handle is closed, and it is killed."""

    process: int
    number: int


@message
class EndedHostMessage(FromOtherHost):
    """A process has ended; a negative `code` is the number of a signal."""

    process: int
    code: int


@message
class SignsHostMessage(FromOtherHost):
    """The signs of life of the processes of a host, each as plain values of `WorkerSign`."""

    received: int
    sent_ns: int
    signs: tuple[tuple[int, str, tuple[int, int, str], tuple[int, ...], tuple[str | int, ...], int, int], ...]


@message
class TickHostMessage(ToOtherHost):
    """The coordinator's host lives, and has received so many frames; the times compare the clocks of both.

    `heard` has the time of sending of the last `SignsHost`, and that of its arrival; none if none has come.
    """

    received: int
    sent_ns: int
    heard: tuple[int, ...] = ()


@message
class HeardHostMessage(ToOtherHost):
    """The coordinator's host has recorded a decision; each host keeps it, so no disk has the only copy.

    Its line follows in the frame. A take-over numbers no decision anew.
    """

    number: int


@message
class ShippedHostMessage(FromOtherHost, ToOtherHost):
    """Parts of files of records, each as plain values of `ShippedPart`, whose bytes follow in the frame."""

    parts: tuple[tuple[str, str, int, int], ...]
    is_last: bool  # the host has nothing more


@message
class KeptHostMessage(FromOtherHost, ToOtherHost):
    """The answer: the bytes that are kept of each file, which is named by its host and its path."""

    sizes: tuple[tuple[str, str, int], ...]
    is_last: bool


@message
class ToldHostMessage(FromOtherHost):
    """A decision that the host was told, and the one that takes over may lack; its line follows in the frame."""

    number: int


@message
class TaughtHostMessage(FromOtherHost):
    """A control message to workers of the host that the one that takes over may not know; it follows in the frame."""


@message
class LeavesHostMessage(FromOtherHost):
    """The host leaves: all its workers have ended."""


@message
class OutcomeHostMessage(ToOtherHost):
    """The run has ended, with this exit code."""

    cut_note = CUT
    code: int
    words: str


_WITH_PACKET = (WordsHostMessage, HeardHostMessage, ToldHostMessage, TaughtHostMessage, ShippedHostMessage)


class WorkerSign(NamedTuple):
    """A process as its host sees it. `place` is the fields of a `BoardPlace`, with an age in the place of a time."""

    process: int
    heartbeat: str  # the last one since the sign before, as it travels; empty for none
    progress: tuple[int, int, str]
    place: tuple[int, ...] = ()  # empty if there is none
    times: tuple[str | int, ...] = ()  # empty if there are none
    num_signals: int = 0  # that this coordinator has sent to it, and that it had got before its state was read
    age_ns: int = 0  # since its last word


def sign_frames(received: int, sent_ns: int, signs: Sequence[WorkerSign]) -> Iterator[bytes]:
    """Yields the frames with signs of life, one without any too: a heartbeat is longer the more workers there are."""
    first, num_bytes = 0, 0
    for place, each in enumerate(signs):
        num_bytes += len(each.heartbeat)
        if place - first >= _SIGNS or (num_bytes > _SIGN_BYTES and place > first):
            yield frame(SignsHostMessage(received, sent_ns, _plain(signs[first:place])))
            first, num_bytes = place, len(each.heartbeat)
    yield frame(SignsHostMessage(received, sent_ns, _plain(signs[first:])))


def _plain(signs: Sequence[WorkerSign]) -> Any:
    return tuple(tuple(each) for each in signs)


def frame(header: Message, packet: bytes = b"") -> bytes:
    """Returns a frame; raises InvariantError for one of bamboo's own that is too long."""
    found = encode(header) + (_BREAK + packet if packet else b"")
    if len(found) > MOST_BYTES:
        raise InvariantError(f"a frame {type(header).__name__} of {len(found)} bytes is too long")
    return found


def read_frame(data: bytes) -> tuple[Message, bytes]:
    """Returns the header of a frame and the packet behind it; raises InvariantError for another form."""
    if len(data) > MOST_BYTES:
        raise InvariantError(f"a frame has {len(data)} bytes, and at most {MOST_BYTES}")
    header, found, packet = data.partition(_BREAK)
    read = decode(header)
    if not isinstance(read, FromOtherHost | ToOtherHost):
        raise InvariantError(f"a frame begins with a message between hosts, not with {type(read).__name__}")
    if bool(found) is not isinstance(read, _WITH_PACKET):
        raise InvariantError("a control message, a line, or bytes, follow a header that says so, and no other")
    return read, packet


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
    found, place = list[bytes](), 0
    while place < len(data) or not found:
        begin = place + _LENGTH.size
        place = begin + (_LENGTH.unpack_from(data, place)[0] if begin <= len(data) else 0)
        if place > len(data):
            raise InvariantError(f"a bundle of {len(data)} bytes ends inside of a frame")
        found.append(data[begin:place])
    return found


# The rules of frames of another host beyond their form: numbers that a host can have, and words of workers alone.
#
# Rule: a frame that has passed can be carried out. A frame that has not passed proves that the other end is
# no agent of this version, so its host is lost.

_MOST = 1 << 63  # of any number, as it may get into memory that is shared with workers
_MOST_PLACE = 1 << 31  # of the first numbers of a place
_MOST_WORKERS = 1 << 16
_MOST_SIGNAL = 64
_PLACE, _TIMES = 7, 3  # the parts of a sign, where they are there
_OF_PROCESS = (3, 4)

Packets = tuple[Message, bytes]


def read_from_host(data: bytes) -> Packets:
    """Returns a frame to the host that coordinates; raises InvariantError for one that no host sends."""
    header, packet = _read(data, FromOtherHost)
    if isinstance(header, WordsHostMessage):
        _refuse_unless(isinstance(decode(packet), ToAgent), "a message that a worker sends")
    elif isinstance(header, SignsHostMessage):
        for each in header.signs:
            _check_sign(WorkerSign._make(each))
    elif isinstance(header, HoldsHostMessage):
        for facts in header.processes:
            _refuse_unless(len(facts) in _OF_PROCESS and min(facts[:3]) >= 0, "a number, a worker and a pid")
            _refuse_unless(facts[1] < _MOST_WORKERS, f"at most {_MOST_WORKERS} workers")
        _refuse_unless(header.heard >= 0, "a number of decisions")
    elif isinstance(header, TaughtHostMessage):
        is_taught = isinstance(decode(packet), WelcomeMessage | PartitionMessage | BorderMessage)
        _refuse_unless(is_taught, "a message that each newcomer is told")
    elif isinstance(header, ToldHostMessage):
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
    if isinstance(header, WordsHostMessage):
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
    _refuse_unless(len(sign.place) in (0, _PLACE), f"a place of {_PLACE} numbers")
    _refuse_unless(all(-_MOST_PLACE <= each < _MOST_PLACE for each in sign.place[:3]), "a place in a step")
    _refuse_unless([*map(type, sign.times)] in ([], [str, int, int]), f"times of {_TIMES} parts")
    texts: Iterable[object] = (sign.heartbeat, sign.progress[2], *sign.times[:1])
    _refuse_unless(all(str(each).isascii() for each in texts), "plain text")
    if sign.heartbeat:
        _refuse_unless(isinstance(decode(sign.heartbeat.encode()), HeartbeatMessage), "a heartbeat")


def _refuse_unless(is_so: bool, wanted: str) -> None:
    if not is_so:
        raise InvariantError(f"a frame has something else than {wanted}")


# Parts of the files of records as they travel from one host to another: a frame has parts of several files.
#
# Rules: files of records only grow, so a copy is a beginning of its file. The host that keeps a copy says how many
# bytes it has, and the next part begins there: after a take-over as well. A part has whole lines and whole entries, so
# a copy ends between two records. A part without bytes says that its host has left the file out. Bytes of any other
# form, and names of any other file, are refused.

EVENTS = "events.jsonl"
MOST_SHIPPED_BYTES = 1 << 16  # of files in one frame: control messages wait for no more than that
_FAST = 1  # of zlib: events become a sixth, entries of actions a third, in 3 ms for a megabyte


class ShippedPart(NamedTuple):
    """So many bytes of a file of a host; `file` is its path in the folder of the run on that host."""

    node: str
    file: str
    begin: int
    length: int


def is_shipped(file: str) -> bool:
    """Whether a path in the folder of a run is one of the files of its records."""
    folder, _, name = file.rpartition("/")
    return file == EVENTS or (folder == FOLDER and step_file(name) is not None)


def whole_bytes(file: str, begin: int, data: bytes) -> int:
    """Returns how many of the bytes behind `begin` are whole lines or entries; all of a line that fills a frame."""
    if file.endswith(".bin"):
        return max(0, (begin + len(data)) // ENTRY_BYTES * ENTRY_BYTES - begin)
    end = data.rfind(b"\n") + 1
    return end or (len(data) if len(data) == MOST_SHIPPED_BYTES else 0)


def shipped_frame(parts: Sequence[tuple[ShippedPart, bytes]], *, is_last: bool = False) -> bytes:
    """Returns the frame of some parts and their bytes; `is_last`: the host has nothing more."""
    header = ShippedHostMessage(tuple((*part,) for part, _ in parts), is_last)
    return frame(header, zlib.compress(b"".join(data for _, data in parts), _FAST))


def shipped_parts(header: ShippedHostMessage, packet: bytes) -> list[tuple[ShippedPart, bytes]]:
    """Returns the parts of a frame and their bytes; raises InvariantError for any other form."""
    parts = [*map(ShippedPart._make, header.parts)]
    for each in parts:
        if not (NAME.fullmatch(each.node) and is_shipped(each.file) and each.begin >= 0 and each.length >= 0):
            raise InvariantError(f"this is no part of the records of a host: {each!r:.200}")
    total = sum(each.length for each in parts)
    if total > MOST_SHIPPED_BYTES:
        raise InvariantError(f"{total} bytes of records come in one frame, and at most {MOST_SHIPPED_BYTES} may")
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(packet, total + 1)  # a few bytes can stand for millions
    except zlib.error as error:
        raise InvariantError(f"records of a host cannot be read: {error}") from error
    if len(data) != total or not inflating.eof or inflating.unused_data:
        raise InvariantError(f"records of a host do not have the {total} bytes of their parts")
    found = []
    for each in parts:
        found.append((each, data[: each.length]))
        data = data[each.length :]
    return found
