"""The words of a worker that the next coordinator has to hear again: that it has joined, its notice, its last words.

It hears too what the workers of a host were told, as a newcomer is told the same.

Rule: in the epoch of a take-over all members report again, and vote again; the rest is said once only. The hashes of
the last steps may not have been told to other hosts when a host was lost, and no worker writes a part of a checkpoint
a second time. A worker that has come to the moment of a fault stands still until it is answered.
"""

from __future__ import annotations

from collections import deque

from engine.core.checkpoints.part_messages import KeptMessage, UnkeptMessage
from engine.core.message_codec import decode, kind_of
from engine.core.messages import (
    AuditMessage,
    BorderMessage,
    FailedMessage,
    PartitionMessage,
    RaisedMessage,
    ReadyMessage,
    RefusedMessage,
    StrikeMessage,
    SufferedMessage,
    WaitingMessage,
    WelcomeMessage,
)
from engine.core.process_messages import NoticeMessage

_ONCE = tuple(
    f'{{"kind":"{kind_of(each)}"'.encode()
    for each in (
        ReadyMessage,
        WaitingMessage,
        NoticeMessage,
        StrikeMessage,
        SufferedMessage,
        RaisedMessage,
        FailedMessage,
        RefusedMessage,
    )
)
_PARTS = tuple(f'{{"kind":"{kind_of(each)}"'.encode() for each in (KeptMessage, UnkeptMessage))
_HASHES = f'{{"kind":"{kind_of(AuditMessage)}"'.encode()
_WELCOME = f'{{"kind":"{kind_of(WelcomeMessage)}"'.encode()
_PLACE = tuple(f'{{"kind":"{kind_of(each)}"'.encode() for each in (PartitionMessage, BorderMessage))
_MOST_HASHES = 64  # messages: those of two steps, of a worker with many slots


class SaidAgain:
    """The words of one worker that are said again."""

    def __init__(self) -> None:
        self._once: list[bytes] = []
        self._hashes: deque[bytes] = deque(maxlen=_MOST_HASHES)
        self._parts: list[bytes] = []
        self._step = -1  # of these parts

    def add(self, packet: bytes) -> None:
        """Takes a control message of the worker."""
        if packet.startswith(_HASHES):
            self._hashes.append(packet)
        elif packet.startswith(_ONCE):
            self._once.append(packet)
        elif packet.startswith(_PARTS) and isinstance(told := decode(packet), KeptMessage | UnkeptMessage):
            if told.step > self._step:
                self._step, self._parts = told.step, []
            self._parts += [packet] * (told.step == self._step)

    @property
    def packets(self) -> list[bytes]:
        """The words, each kind in its order."""
        return [*self._once, *self._hashes, *self._parts]


class TaughtWorkers:
    """What the workers of a host were told since they were started last: their welcomes, the cut and the borders.

    Workers that begin again have another start.
    """

    def __init__(self) -> None:
        self._start = ""
        self._packets: dict[bytes, None] = {}

    def add(self, packet: bytes) -> None:
        """Takes a control message to a worker."""
        if packet.startswith(_WELCOME) and isinstance(welcome := decode(packet), WelcomeMessage):
            if welcome.start != self._start:
                self._start = welcome.start
                self._packets.clear()
        elif not packet.startswith(_PLACE):
            return
        self._packets[packet] = None

    @property
    def packets(self) -> list[bytes]:
        """The messages, each once, in their order."""
        return [*self._packets]
