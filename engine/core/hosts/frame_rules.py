"""The rules of frames of another host beyond their form: numbers that a host can have, and words of workers alone.

Rule: a frame that has passed can be carried out. A frame that has not passed proves that the other end is
no agent of this version, so its host is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from engine.core.errors import InvariantError
from engine.core.hosts.host_messages import (
    ForkHostMessage,
    FromOtherHost,
    HoldsHostMessage,
    SignalHostMessage,
    SignsHostMessage,
    TaughtHostMessage,
    ToldHostMessage,
    ToOtherHost,
    WordsHostMessage,
    WorkerSign,
    read_frame,
)
from engine.core.message_codec import MAX_BYTES, Message, ToAgent, decode
from engine.core.messages import BorderMessage, HeartbeatMessage, PartitionMessage, WelcomeMessage

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
