"""The streams and events of the double of a GPU, as recorded calls with a rule for races.

Each operation has a place: the stream on which it was launched, and its number there. A stream is ordered behind what
it waited for by events, and behind what the host had waited for when the operation was launched. Two uses of the same
memory, one of which writes, need that order; so does the host, and the next tensor in memory that is given free.

An operation takes `op_ns` of the device's time, so that events come late. `waits` counts the places where the host
waits: for the whole device, for a stream, for an event, for a value, for a copy that is not asynchronous.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

Clock = dict[int, int]  # stream -> the number of its last operation that is over
_COMPUTE = 0
_NS = 1e9


class StreamRaceError(RuntimeError):
    """Two uses of one memory without an event between."""


class FakeStreams:
    """All streams of a device. Memory is named by a number; the caller holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.op_ns = 0
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self.sleep_ns: Callable[[int], None] = _sleep
        self.waits: Counter[tuple[str, str]] = Counter()  # (what, name of the thread)
        self.on_wait: Callable[[str], None] = lambda what: None  # called in the thread that waits
        self.calls: Counter[str] = Counter()
        self.behind: list[Clock] = [{}]  # of each stream
        self.busy_until_ns: list[int] = [0]
        self.maker = [""]  # of each stream: the name of the thread
        self.host: Clock = {}
        self._written: dict[int, tuple[int, int]] = {}  # memory -> stream and number
        self._read: dict[int, Clock] = {}
        self._home: dict[int, int] = {}  # memory of the device -> the stream that it was allocated on
        self._recorded: dict[int, set[int]] = {}
        self.used_elsewhere: set[int] = set()  # memory that another stream than its own uses
        self._local = threading.local()

    @property
    def present(self) -> int:
        """The present stream of this thread."""
        return getattr(self._local, "stream", _COMPUTE)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Makes a stream the present one of this thread."""
        if not getattr(self._local, "has_entered", threading.current_thread() is threading.main_thread()):
            name = threading.current_thread().name
            raise StreamRaceError(f"thread {name!r} begins a block of a stream, and its device is GPU 0")
        before, self._local.stream = self.present, stream.number
        try:
            yield
        finally:
            self._local.stream = before

    def enter(self) -> None:
        """Sets the device of this thread."""
        self._local.has_entered = True

    def new_stream(self) -> int:
        """Returns the number of a new stream."""
        with self.lock:
            self.behind.append({})
            self.busy_until_ns.append(0)
            self.maker.append(threading.current_thread().name)
            return len(self.behind) - 1

    def operation(self, reads: Iterable[int], writes: Iterable[int], what: str) -> None:
        """Launches an operation on the present stream; raises StreamRaceError."""
        stream = self.present
        own = self.behind[stream]
        _join(own, self.host)
        own[stream] = number = own.get(stream, 0) + 1
        self.busy_until_ns[stream] = max(self.busy_until_ns[stream], self.now_ns()) + self.op_ns
        for memory in (*reads, *writes):
            self._ordered(own, self._written.get(memory), f"{what} on stream {stream} uses what", "writes")
        for memory in writes:
            for other in self._read.pop(memory, {}).items():
                self._ordered(own, other, f"{what} on stream {stream} overwrites what", "reads")
            self._written[memory] = stream, number
        for memory in reads:
            self._read.setdefault(memory, {})[stream] = number
        for memory in (*reads, *writes):
            if self._home.get(memory, stream) != stream:
                self.used_elsewhere.add(memory)

    def host_uses(self, reads: Iterable[int], writes: Iterable[int], what: str) -> None:
        """Lets the host use memory; raises StreamRaceError if a copy to it, or from it, is not known to be over."""
        for memory in (*reads, *writes):
            self._ordered(self.host, self._written.get(memory), f"the host uses in {what} what", "writes")
        for memory in writes:
            for other in self._read.pop(memory, {}).items():
                self._ordered(self.host, other, f"the host overwrites in {what} what", "reads")
            self._written.pop(memory, None)

    def _ordered(self, clock: Clock, other: tuple[int, int] | None, one: str, does: str) -> None:
        if other is not None and clock.get(other[0], 0) < other[1]:
            raise StreamRaceError(f"{one} stream {other[0]} {does}, without an event between")

    def allocated(self, memory: int) -> None:
        """Takes new memory of the device, from the present stream."""
        self.forget(memory)
        self._home[memory] = self.present

    def forget(self, memory: int) -> None:
        """Takes memory that another tensor has now."""
        for known in (self._written, self._read, self._home, self._recorded):
            known.pop(memory, None)
        self.used_elsewhere.discard(memory)

    def freed(self, memory: int) -> None:
        """Gives memory free; raises StreamRaceError if a stream may use it that was not recorded.

        What a recorded stream, or its own, waits for is over when the memory has another use.
        """
        home, recorded = self._home.get(memory), self._recorded.get(memory, set())
        uses = {**self._read.get(memory, {}), **dict([self._written[memory]] if memory in self._written else [])}
        self.forget(memory)
        if home is None:
            return
        ordered = self.behind[home] | {}
        for clock in (self.host, *(self.behind[stream] for stream in recorded)):
            _join(ordered, clock)
        for stream, number in uses.items():
            if stream not in (home, *recorded):
                self._ordered(ordered, (stream, number), "memory is free again which", "uses")

    def record(self, memory: int, stream: FakeStream) -> None:
        """Keeps memory, when it is given free, until the stream is done with it."""
        self._recorded.setdefault(memory, set()).add(stream.number)

    def await_host(self, what: str, clock: Clock, until_ns: int) -> None:
        """Lets the host wait for operations."""
        self.on_wait(what)
        self.sleep_ns(max(0, until_ns - self.now_ns()))
        with self.lock:
            self.waits[what, threading.current_thread().name] += 1
            _join(self.host, clock)

    def await_present(self, what: str) -> None:
        """Lets the host wait for the present stream."""
        self.await_host(what, self.behind[self.present], self.busy_until_ns[self.present])

    def await_all(self) -> None:
        """Lets the host wait for the whole device."""
        whole: Clock = {}
        for each in self.behind:
            _join(whole, each)
        self.await_host("device", whole, max(self.busy_until_ns))

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Puts the streams in the place of those of CUDA."""
        streams = self

        class Stream(FakeStream):
            def __init__(self, device: Any = None):
                super().__init__(streams, streams.new_stream())

        class Event(FakeEvent):
            def __init__(self, enable_timing: bool = False, blocking: bool = False):
                super().__init__(streams, is_timed=enable_timing)

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda place=None: FakeStream(streams, streams.present))
        patch.setattr(torch.cuda, "synchronize", lambda place=None: streams.await_all())


class FakeStream:
    """One stream."""

    def __init__(self, streams: FakeStreams, number: int):
        self.streams, self.number = streams, number

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Records an event behind all operations so far."""
        event = FakeEvent(self.streams) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Lets later operations wait for an event."""
        streams = self.streams
        with streams.lock:
            streams.calls["wait_event"] += 1
            _join(streams.behind[self.number], event.clock)
            streams.busy_until_ns[self.number] = max(streams.busy_until_ns[self.number], event.at_ns)

    def query(self) -> bool:
        """Returns whether all operations so far are over."""
        return self.streams.now_ns() >= self.streams.busy_until_ns[self.number]

    def wait_stream(self, stream: FakeStream) -> None:
        """Lets later operations wait for all of another stream so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Lets the host wait for all operations so far."""
        streams = self.streams
        streams.await_host("stream", streams.behind[self.number], streams.busy_until_ns[self.number])


class FakeEvent:
    """A point in a stream."""

    def __init__(self, streams: FakeStreams, *, is_timed: bool = False):
        self._streams, self._is_timed = streams, is_timed
        self.clock: Clock = {}
        self.at_ns = 0

    def record(self, stream: FakeStream | None = None) -> None:
        """Records the event behind all operations of a stream so far."""
        streams = self._streams
        with streams.lock:
            streams.calls["record_event"] += 1
            number = streams.present if stream is None else stream.number
            self.clock = {**streams.behind[number]}
            self.at_ns = max(streams.busy_until_ns[number], streams.now_ns())
            streams.busy_until_ns[number] = self.at_ns

    def synchronize(self) -> None:
        """Lets the host wait for the event."""
        self._streams.await_host("event", self.clock, self.at_ns)

    def query(self) -> bool:
        """Returns whether the event is over; then the host knows it."""
        if self._streams.now_ns() < self.at_ns:
            return False
        with self._streams.lock:
            _join(self._streams.host, self.clock)
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        """Returns the milliseconds between two events that are over; raises RuntimeError if they are not."""
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if max(self.at_ns, end.at_ns) > self._streams.now_ns():
            raise RuntimeError("CUDA error: device not ready")
        return (end.at_ns - self.at_ns) / 1e6


def _sleep(ns: int) -> None:
    time.sleep(ns / _NS)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number
