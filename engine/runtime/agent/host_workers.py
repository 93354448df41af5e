"""The workers of a host that does not coordinate: its agent forks, relays, signals and sees ends, and decides nothing.

    coordinator's host   ForkHost, SignalHost, ControlHost ->  this process  ---> link of the worker
                         <-- EndedHost, ControlHost, SignsHost               <--- link, pidfd, board, /proc

They outlive the host that coordinates: `follow` reports them to the next one, and resends what may have been lost.

Rules: the words of a worker come before its end, and so does the place that it had come to. A thread
of `HeartbeatReporter` asks all workers for signs of life and sends them, so that no fork holds them up. SIGTERM to this
process is a notice for all its workers; a second one kills them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.codec.messages import encode
from engine.core.errors import EnvironmentLacksError, ExitCode
from engine.core.history.merging import OffsetBounds, OffsetWatch
from engine.core.history.process_records import ClockRecord, HeardRecord
from engine.core.history.run_records import AuditRecord, Record
from engine.core.hosts.host_messages import (
    ControlHostMessage,
    DecisionHostMessage,
    EndedHostMessage,
    ForkedHostMessage,
    ForkFailedHostMessage,
    ForkHostMessage,
    LeavesHostMessage,
    OutcomeHostMessage,
    PastControlHostMessage,
    PastDecisionHostMessage,
    ProcessesHostMessage,
    ResendDoneHostMessage,
    SignalHostMessage,
    TickHostMessage,
    WorkerSign,
)
from engine.core.job.job import Job
from engine.core.message_kinds import Message, head_of
from engine.core.messages import HeartbeatMessage, PingMessage, StopMessage
from engine.core.protocol.events import unwatched_ns
from engine.runtime.agent.frames import frame, sign_frames
from engine.runtime.agent.host_registry import HostOutcome
from engine.runtime.agent.host_servers import ReplayBuffer, ReplicatedResults, WelcomeCache, hashes_of
from engine.runtime.agent.remote_workers import ServedLines
from engine.runtime.agent.run_state import audit_record
from engine.runtime.agent.wire import StreamEnd
from engine.runtime.agent.worker_handles import LocalWorkers
from engine.runtime.process.clock import TICK_S, now_ns
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.interrupts import Interrupts
from engine.runtime.process.link import Link, LinkPairs
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder

# A process of a worker on this host, as its agent keeps it for the host that coordinates, and for the next one.


_STOP = head_of(StopMessage)


@dataclass(slots=True)
class LocalProcess:
    """The process of a worker; `code` is there when it has ended."""

    number: int
    worker: int
    child: Child
    link: Link
    heartbeat: bytes = b""  # the last one that no sign has told
    code: int | None = None
    heard_ns: int = field(default_factory=now_ns)  # when it spoke last
    num_signals: int = 0  # from the host that coordinates now
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)
    was_stopped: bool = False

    def tell(self, packet: bytes) -> None:
        """Passes on a message of the host that coordinates."""
        self.was_stopped = self.was_stopped or packet.startswith(_STOP)
        self.link.send_packet(packet)

    @property
    def has_left(self) -> bool:
        """Whether it has ended, and the run continues without it: the run was not over, and did not stop it."""
        return self.has_ended and self.code != ExitCode.OK and not self.was_stopped

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or this agent has no handle of it any more."""
        return self.code is not None or self.child.is_closed

    def to_plain(self) -> tuple[int, ...]:
        """Returns the facts of it that the next host needs."""
        return (self.number, self.worker, self.child.pid, *(() if self.code is None else (self.code,)))

    def sign(self, board: ProgressBoard) -> WorkerSign:
        """Returns its sign of life, and takes its heartbeat for that."""
        heartbeat, self.heartbeat = self.heartbeat.decode(), b""
        num_signals = self.num_signals  # before the look at the process, which they may have changed
        at, place, times = board.read(self.worker), board.place_of(self.worker), self.child.times()
        where: Any = place and tuple(map(int, place._replace(since_ns=now_ns() - place.since_ns)))
        progress = (at.step, at.num_computed, at.action)
        return WorkerSign(self.number, heartbeat, progress, where, times, num_signals, now_ns() - self.heard_ns)


# Signs of life of the workers of this host, for the host that coordinates: four times a second, in few messages.
#
# Rule: a sign tells how many signals the worker had got when its process was looked at, so that no older look can
# confirm a fault. After a signal that stops a worker a sign goes at once. Time in which this host stood still is no
# silence of its workers.

_STOPS_S = 0.02  # until a worker stands still after a signal; a later sign tells it too
_STOPPED = ("T", None)  # None: it has ended
_PING = encode(PingMessage())


class HeartbeatReporter:
    """Tells the signs of the processes that `all_of` returns, and asks them for heartbeats, in a thread of its own."""

    def __init__(self, board: ProgressBoard, all_of: Callable[[], Sequence[LocalProcess]]):
        self._board, self._all_of = board, all_of
        self.ticked: tuple[int, int] | None = None  # when the last tick was sent, by the other clock, and when it came
        self._end: StreamEnd | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._tell_all, name="signs", daemon=True).start()

    def follow(self, end: StreamEnd) -> None:
        """Tells them over this stream from now on, to a host that has sent no signal yet."""
        for each in self._all_of():
            each.num_signals = 0
        self._end, self.ticked = end, None

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()

    def _tell_all(self) -> None:
        looked_ns = now_ns()
        while not self._is_over.wait(TICK_S):
            living, end = [process for process in self._all_of() if not process.has_ended], self._end
            late_ns, looked_ns = unwatched_ns(looked_ns, at_ns := now_ns()), at_ns
            for process in living:
                process.heard_ns = min(at_ns, process.heard_ns + late_ns)
            if end is None:
                continue
            self._send(end, living)
            for process in living:
                with contextlib.suppress(OSError):  # it was released meanwhile
                    process.link.send_packet(_PING)

    def tell(self, of: LocalProcess) -> None:
        """Tells the sign of one process at once."""
        if self._end is not None:
            self._send(self._end, [of])

    def signal(self, of: LocalProcess, number: signal.Signals) -> None:
        """Sends a signal to a worker; tells at once that it stands still, for which a fault may wait."""
        of.child.signal(number)
        of.num_signals += 1
        if number is signal.SIGSTOP:
            until_s = time.monotonic() + _STOPS_S
            while of.child.state() not in _STOPPED and time.monotonic() < until_s:
                time.sleep(_STOPS_S / 20)
            self.tell(of)

    def _send(self, end: StreamEnd, of: Sequence[LocalProcess]) -> None:
        signs, at_ns = [process.sign(self._board) for process in of], now_ns()
        echo = () if self.ticked is None else (self.ticked[0], at_ns - self.ticked[1])
        for each in sign_frames(end.received, at_ns, signs, echo):
            end.send(each)


_LOOK_S = 1.0  # between the records of the clock
_ALONE_S = 0.02  # between looks for another host that coordinates, while there is no stream
_HEARTBEAT = head_of(HeartbeatMessage)


class HostWorkers:
    """The workers of this host. `end` is this host's end of the stream, whose frames come to `deliver`."""

    def __init__(
        self,
        server: ForkServer,
        recorder: Recorder,
        record_fds: Sequence[int],
        board: ProgressBoard,
        logs: Path,
        job: Job,
    ):
        self.outcome: HostOutcome | None = None
        self.has_left = False  # all workers, after a notice to this host
        self._is_ending = False  # the run: a worker has ended with it
        self.results = ReplicatedResults(job)
        self.lines = ServedLines(server.host, logs.parent)
        self._end: StreamEnd | None = None
        self._recorder, self._chief, self._is_own = recorder, "", False
        self._offset = OffsetWatch()  # of the clock of that host; used by the thread of the stream alone
        self._bounds: OffsetBounds | None = None
        self._server, self._record_fds, self._board, self._logs = server, record_fds, board, logs
        self._orders: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._processes: dict[int, LocalProcess] = {}
        self._workers = LocalWorkers(server)
        self.num_notices = 0  # to this host
        self._welcomes = WelcomeCache()
        self._pairs = LinkPairs(self._living)
        self._workers.add(self._wake_fd, self._obey)
        self._signs = HeartbeatReporter(board, lambda: [*self._processes.values()])

    def leave(self) -> None:
        """Serves no host from now on; the next one's stream may begin before `follow`, so its orders are kept."""
        self.lines.leave()
        while not self._orders.empty():  # orders of the host before count for nothing, its decisions count
            header, packet = self._orders.get()
            if isinstance(header, DecisionHostMessage):
                self._hear(header.number, packet.decode())
            elif isinstance(header, OutcomeHostMessage):
                self.outcome = HostOutcome(header.code, header.words)

    def follow(self, chief: str, end: StreamEnd, num_decisions: int = 0, *, is_own: bool = False) -> None:
        """Serves host `chief` from now on, over a new stream, of which `end` is this host's end.

        That host knows the first `num_decisions` decisions. If it `is_own`, it records what its workers say itself.
        """
        self._chief, self._is_own = chief, is_own
        self._offset, self._bounds = OffsetWatch(), None
        living = [*self._processes.values()]
        end.send(frame(ProcessesHostMessage(tuple(process.to_plain() for process in living), self.results.count)))
        for number, line in self.results.last_since(num_decisions).items():
            end.send(frame(PastDecisionHostMessage(number), line.encode()))
        for packet in self._welcomes.packets:
            end.send(frame(PastControlHostMessage(), packet))
        for process in living:
            for packet in process.replay.packets:
                end.send(frame(ControlHostMessage(process.number), packet))
        self.lines.follow(chief, end)
        end.send(frame(ResendDoneHostMessage()))
        self._end = end
        self._signs.follow(end)

    def wake(self) -> None:
        """Lets the loop look at its stream at once, from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def deliver(self, header: Message, packet: bytes) -> None:
        """Takes a frame of the coordinator's host, in the thread of the stream."""
        if isinstance(header, TickHostMessage):
            self._offset.received(header.sent_ns, at_ns := now_ns())
            self._signs.ticked = (header.sent_ns, at_ns)
            if header.heard:
                self._offset.sent(*header.heard)
            self._bounds = self._offset.at(at_ns)
        elif not self.lines.take(header, packet):
            self._orders.put((header, packet))
            self.wake()

    def run(
        self,
        interrupts: Interrupts | None,
        is_alone: Callable[[], bool],
        is_over: Callable[[], bool],
        each_second: Callable[[str], None] = lambda chief: None,
    ) -> None:
        """Runs until the outcome has come, all workers have left, or, while `is_alone`, `is_over` says so.

        Without `interrupts` another loop handles signals; `each_second` gets the name of the coordinating host.
        """
        if interrupts is not None:
            self._workers.add(interrupts, partial(self._interrupted, interrupts))
        try:
            self._run(is_alone, is_over, each_second)
        finally:
            if interrupts is not None:
                self._workers.remove(interrupts)

    def _run(
        self, is_alone: Callable[[], bool], is_over: Callable[[], bool], each_second: Callable[[str], None]
    ) -> None:
        looked_s = time.monotonic()
        is_timed = False  # the first record comes at once: a host that is lost within a second has times too
        while self.outcome is None:
            self._workers.wait(_ALONE_S if is_alone() else TICK_S)
            if self.num_notices and not self._is_ending and all(each.has_left for each in [*self._processes.values()]):
                self._send(LeavesHostMessage())
                self.has_left = True
                return
            is_due = time.monotonic() - looked_s >= _LOOK_S
            if is_due or not is_timed:
                is_timed = (bounds := self._bounds) is not None
                if bounds is not None:
                    self._recorder.write(ClockRecord(of=self._chief, least_ns=bounds.least_ns, most_ns=bounds.most_ns))
            if is_due:
                looked_s = time.monotonic()
                each_second(self._chief)
            if is_alone() and is_over():
                return

    def close(self) -> None:
        """Ends all workers, and keeps no records any more."""
        self._signs.close()
        self.lines.close()
        self.end_workers()
        self._workers.close()

    def end_workers(self) -> None:
        """Ends all workers."""
        for each in [*self._processes]:
            self._release(each)

    def _send(self, header: Message, packet: bytes = b"") -> None:
        if self._end is not None:
            self._end.send(frame(header, packet))

    def _obey(self) -> None:
        os.eventfd_read(self._wake_fd)
        while not self._orders.empty():
            header, packet = self._orders.get()
            match header:
                case ForkHostMessage():
                    self._fork(header)
                case ControlHostMessage(process=number) if number in self._processes:
                    self._processes[number].tell(packet)
                    self._welcomes.add(packet)
                case SignalHostMessage(process=number, number=0):
                    self._release(number)
                case SignalHostMessage(process=number, number=which) if number in self._processes:
                    self._signs.signal(self._processes[number], signal.Signals(which))
                case DecisionHostMessage(number=number):
                    self._hear(number, packet.decode())
                case OutcomeHostMessage(code=code, words=words):
                    self.outcome = HostOutcome(code, words)

    def _hear(self, number: int, line: str) -> None:
        self._record(line, self.results.take(number, line), self._chief)

    def complete(self, stored: Iterable[Mapping[int, str]], chief: str) -> None:
        """Takes the decisions of the lost `chief` that other hosts have heard, and this one has not."""
        for line, record in self.results.complete(stored):
            self._record(line, record, chief)

    def _record(self, line: str, record: Record | None, chief: str) -> None:
        if record is not None and not isinstance(record, AuditRecord):  # the host of the worker has recorded hashes
            self._recorder.write(HeardRecord(of=chief, line=line))
            self._recorder.hear(record)

    def _fork(self, order: ForkHostMessage) -> None:
        self._is_ending = False
        self._board.grow(order.num_lines)
        self._board.clear(order.worker)  # of a worker before the workers began again
        log, fds = self._logs / f"worker-{order.worker}.log", (*self._record_fds, self._board.fd)
        try:
            with self._server.forking():
                child, link = self._server.start_worker(order.worker, log, fds, self._board)
        except EnvironmentLacksError as error:
            self._send(ForkFailedHostMessage(order.process, str(error)))
            return
        process = LocalProcess(order.process, order.worker, child, link)
        self._processes[order.process] = process
        self._send(ForkedHostMessage(order.process, child.pid))
        hear, end = partial(self._hear_worker, process), partial(self._see_end, process)
        self._workers.watch(child, link, read=bytes, hear=hear, end=end)

    def _hear_worker(self, of: LocalProcess, packet: bytes) -> None:
        of.heard_ns = now_ns()
        if packet.startswith(_HEARTBEAT):
            of.heartbeat = packet
        elif not self._pairs.hears(of, packet):
            of.replay.add(packet)
            if not self._is_own and (hashes := hashes_of(packet)) is not None:
                self._recorder.write(audit_record(of.worker, hashes))
            self._send(ControlHostMessage(of.number), packet)

    def _see_end(self, of: LocalProcess, code: int) -> None:
        of.code = code
        self._signs.tell(of)  # its line of the board outlives it
        self._send(EndedHostMessage(of.number, of.code))

    def _living(self, worker: int) -> LocalProcess | None:
        processes = self._processes.values()
        return next((each for each in processes if each.worker == worker and not each.has_ended), None)

    def _release(self, number: int) -> None:
        of = self._processes.pop(number, None)
        if of is not None:
            self._is_ending = self._is_ending or (of.has_ended and not of.has_left)
            self._workers.forget(of.child, of.link)
            of.link.close()
            of.child.close()

    def _interrupted(self, interrupts: Interrupts) -> None:
        interrupts.take()
        self.num_notices += 1
        number = signal.SIGTERM if self.num_notices == 1 else signal.SIGKILL
        for process in self._processes.values():
            if not process.has_ended:
                process.child.signal(number)
