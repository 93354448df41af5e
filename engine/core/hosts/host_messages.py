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

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.core.errors import InvariantError
from engine.core.message_codec import CUT, MAX_BYTES, Message, decode, encode, message

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
