"""The workers of another host, as the coordinating host has them: their processes, the server that forks them."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.codec.messages import decode, encode
from engine.codec.records import decoded
from engine.core.deadlines import BACK, SILENT, RoundTrips
from engine.core.errors import KILLED, EnvironmentLacksError, ensure, required
from engine.core.history.process_records import NetworkRecord
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
    ShippedHostMessage,
    SignalHostMessage,
    SignsHostMessage,
    StoredSizesHostMessage,
    TickHostMessage,
    WorkerSign,
)
from engine.core.hosts.host_options import RegisteredHost
from engine.core.message_kinds import Message, ToWorker
from engine.core.messages import HeartbeatMessage, PingMessage
from engine.core.protocol.events import Loading, Sight
from engine.core.protocol.succession import ProcessOnHost
from engine.runtime.agent.frames import frame
from engine.runtime.agent.record_shipping import RecordReceiver, RecordShipper
from engine.runtime.agent.wire import HostPeer, StreamEnd
from engine.runtime.process.clock import TICK_S, now_ns
from engine.runtime.process.interrupts import breakable
from engine.runtime.process.kernel import ProcessTimes
from engine.runtime.process.link import WorkerLink
from engine.runtime.process.link import packet as packet_of
from engine.runtime.process.progress_board import Progress, ProgressBoard
from engine.runtime.process.spawner import HostMailbox, Spawner, Started, WorkerProcess

# The process of a worker on another host, as this host sees it.
#
#     event loop --- `RemoteLink` ------> stream ---> the agent of the other host --- link --- worker
#     event loop <-- `HostMailbox` <-------- stream <--- that agent: words, signs of life, ends
#
# Rules: the last words of a worker come before its end. If its host is lost, `lost` says so, and nothing saw the end. A
# state that was read before the last signal proves nothing about it: it counts as unknown.


_PING = encode(PingMessage())  # the agent of its host asks for signs of life
_UNSEEN_NS = 600_000_000  # without two signs
CLOSED = 0  # in the place of the number of a signal
UNKNOWN = "?"  # the state of a process that its host has not looked at since the last signal
Send = Callable[[bytes], None]


class RemoteLink(WorkerLink):
    """The link to a process on another host: each message goes to the stream at once."""

    takes_fds = False

    def __init__(self, number: int, send: Send):
        self._header, self._send = ControlHostMessage(number), send

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Sends one message, without descriptors."""
        return self.send_packet(packet_of(message), fds)

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends one message, without descriptors; the agent of the other host asks for signs of life by itself."""
        ensure(not fds, "no descriptor travels to another host")
        if data != _PING:
            self._send(frame(self._header, data))
        return True

    def close(self) -> None:
        """Does nothing: the stream stays."""


class RemoteProcess(WorkerProcess):
    """A worker of another host; its words and its end come to the `mailbox`."""

    def __init__(self, number: int, worker: int, send: Send, mailbox: HostMailbox, pid: int = 0):
        self.number, self.worker, self.pid, self.lost = number, worker, pid, ""
        self.link = RemoteLink(number, send)
        self._send, self._mailbox = send, mailbox
        self._is_closed = False
        self._progress = Progress(0, 0, "")
        self._place: tuple[int, ...] = ()  # as in its last sign
        self._since_ns = 0  # since when it has been there
        self._times: ProcessTimes | None = None
        self._seen_ns = now_ns()
        self._num_signals = self._num_seen = self._age_ns = 0
        self._heartbeat = ""
        self._code: int | None = None
        self._has_ended = threading.Event()
        self._ending = threading.Lock()

    def hear(self, packet: bytes) -> None:
        """Takes a message of the worker."""
        if not self._has_ended.is_set():
            self._mailbox.put(self, packet)

    def sees(self, sign: WorkerSign) -> None:
        """Takes a sign of life: the last heartbeat, the line of the board, the times of the process."""
        with self._ending:
            if self._has_ended.is_set():
                return
            self._seen_ns = at_ns = now_ns()
            self._age_ns = sign.age_ns
            self._heartbeat = sign.heartbeat or self._heartbeat
            step, num_computed, action = sign.progress
            self._progress = Progress(step, num_computed, action)
            if sign.place:
                self._place, self._since_ns = sign.place, at_ns - sign.place[4]
            if sign.times:
                self._times = ProcessTimes(*sign.times)
                self._num_seen = sign.num_signals

    def ended(self, code: int, lost: str = "") -> None:
        """Takes the end of the process."""
        with self._ending:
            if self._has_ended.is_set():
                return
            self._code, self.lost = code, lost
            self._has_ended.set()
        self._mailbox.put(self, code)

    @property
    def is_unseen(self) -> bool:
        """Whether no sign of life of it has come for a while."""
        return now_ns() - self._seen_ns > _UNSEEN_NS

    def word(self) -> tuple[int, HeartbeatMessage | None]:
        """Returns how long ago it spoke, by its last sign of life, and takes its heartbeat."""
        with self._ending:
            heartbeat, self._heartbeat = self._heartbeat, ""
        beat = decode(heartbeat.encode()) if heartbeat else None
        return self._age_ns, beat if isinstance(beat, HeartbeatMessage) else None

    def state(self) -> str | None:
        """Returns its state as its host saw it last, `UNKNOWN` before a look; None if it has ended."""
        with self._ending:
            if self._has_ended.is_set():
                return None
            return UNKNOWN if self._times is None or self._num_seen != self._num_signals else self._times.state

    def progress(self, worker: int, board: ProgressBoard) -> Progress:
        """Returns where it was at its last sign of life."""
        return self._progress

    def sight(self, worker: int, board: ProgressBoard) -> Sight | None:
        """Returns the findings of its host's last look at it."""
        with self._ending:
            if self._has_ended.is_set() or self._times is None or not self._place:
                return None
            epoch, step, number, inside, _, slowest_ns, loading = self._place
            inside_ns = max(0, self._seen_ns - self._since_ns) if inside else 0
            return Sight(epoch, step, number, bool(inside), inside_ns, slowest_ns, Loading(loading), *self._times)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process has not ended."""
        if not self._has_ended.is_set():
            self._num_signals += 1
            self._send(frame(SignalHostMessage(self.number, int(number))))

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None if no end is known within `timeout_s`."""
        return self._code if self._has_ended.wait(timeout_s) else None

    def close(self, patience_s: float = 2.0) -> None:
        """Kills the process if it has not ended, and lets its host release it."""
        if not self._is_closed:
            self._is_closed = True
            self.signal(signal.SIGKILL)
            self.wait(patience_s)
            self._has_ended.set()
            self._send(frame(SignalHostMessage(self.number, CLOSED)))


# The fork server of another host, as the agent of the coordinator's host uses it: it forks over the stream.
_FORK_S = 90.0  # for the first one the other host imports torch
_WAIT_S = 1.0


class RemoteSpawner(Spawner):
    """The processes of one other host. With `takes_over` that host has processes already, from another coordinator."""

    def __init__(self, registered: RegisteredHost, *, takes_over: bool = False):
        self.host, self.address = registered.name, registered.address
        self.registered = registered
        self.peer = HostPeer(registered.incarnation, self._deliver)
        self.mailbox = HostMailbox()
        self._while_waiting: Callable[[], object] = lambda: None
        self._number = 0
        self._away: dict[int, RemoteProcess] = {}
        self._answers: queue.SimpleQueue[ForkedHostMessage | ForkFailedHostMessage | None] = queue.SimpleQueue()
        self._losing = threading.Lock()
        self.has_left = False
        self.keeper: RecordReceiver | None = None  # of the records of hosts
        self.shipper: RecordShipper | None = None  # of those of the host that coordinates
        self.has_shipped = False  # its last records
        self.inherited: tuple[tuple[int, ...], ...] = ()  # as the host told them
        self.num_decisions = 0  # decisions, before it served this coordinator
        self.past_decisions: dict[int, str] = {}  # those of them that this host may lack
        self.past_orders: list[ToWorker] = []  # its workers
        self.resent = threading.Event()
        self._is_early = takes_over  # no handle of the processes is there yet
        self._early: list[tuple[int, str, tuple[Any, ...]]] = []
        self._hearing = threading.Lock()
        self._why_lost = ""
        self._heard: tuple[int, ...] = ()  # when the last signs were sent, and when they came
        self._echo_ns = 0
        self.round_trips = RoundTrips()
        self.reported_ns: int | None = None  # the worst of them in the last record

    @property
    def is_there(self) -> bool:
        """Whether workers can be started on the host: it is not lost, and has not left."""
        return not (self.peer.is_lost or self.has_left)

    def start_worker(
        self, worker: int, log: Path, fds: Sequence[int], board: ProgressBoard, role: str = "worker"
    ) -> Started:
        """Starts a worker there, with its files; it ends with the host. Raises EnvironmentLacksError if it cannot."""
        ensure(role == "worker", f"another host runs workers, and no {role}")
        self._number += 1
        process = RemoteProcess(self._number, worker, self.peer.end.send, self.mailbox)
        with self._losing:
            self._away[process.number] = process
        self.peer.end.send(frame(ForkHostMessage(process.number, worker, board.num_lines)))
        answer = self._answer()
        if isinstance(answer, ForkedHostMessage):
            process.pid = answer.pid
        elif self.peer.is_lost:
            process.ended(KILLED, self._why_lost)
        else:
            process.ended(KILLED)
            process.close()
            why = f"it did not answer within {_FORK_S:g} s" if answer is None else answer.error
            raise EnvironmentLacksError(f"cannot start a process on host {self.host}: {why}")
        return process, process.link

    def _answer(self) -> ForkedHostMessage | ForkFailedHostMessage | None:
        until_s = time.monotonic() + _FORK_S
        while time.monotonic() < until_s and not self.peer.is_lost:
            try:
                with breakable():
                    return self._answers.get(timeout=_WAIT_S)
            except queue.Empty:
                self._while_waiting()
        return None

    def _deliver(self, header: Message, packet: bytes) -> None:
        """Takes a frame of the other host, in the thread of its stream."""
        match header:
            case SignsHostMessage(sent_ns=sent_ns, signs=signs, echo=echo):
                self._measure(echo, at_ns := now_ns())
                self._heard = (sent_ns, at_ns)
                for sign in signs:
                    self._with(sign.process, "sees", sign)
            case ControlHostMessage(process=process):
                self._with(process, "hear", packet)
            case EndedHostMessage(process=process, code=code):
                self._with(process, "ended", code)
            case ForkedHostMessage() | ForkFailedHostMessage():
                self._answers.put(header)
            case LeavesHostMessage():
                self.has_left = True
            case ProcessesHostMessage(processes=processes, heard=num_decisions):
                self.inherited, self.num_decisions = processes, num_decisions
            case PastDecisionHostMessage(number=number) if not self.resent.is_set():
                decoded(line := packet.decode())  # raises InvariantError for one that is no record
                self.past_decisions[number] = line
            case PastControlHostMessage() if isinstance(sent := decode(packet), ToWorker) and not self.resent.is_set():
                self.past_orders.append(sent)
            case ResendDoneHostMessage():
                self.resent.set()
            case ShippedHostMessage():
                self._keep_lines(header, packet)
            case StoredSizesHostMessage() if self.shipper is not None:
                self.shipper.kept(header)

    def _measure(self, echo: tuple[int, ...], now_ns: int) -> None:
        """Learns the round trip of a tick; half of the time by which these signs come late counts like one."""
        late_ns = (now_ns - self._heard[1] - TICK_S * 1e9) / 2 if self._heard else 0
        if echo and echo[0] != self._echo_ns:
            self._echo_ns = echo[0]
            self.round_trips = self.round_trips.with_one(max(now_ns - sum(echo), round(late_ns)))

    def network_record(self) -> NetworkRecord | None:
        """Returns the record of the round trips and the deadlines that follow them, where these have changed."""
        trips = self.round_trips
        if not trips.differs_from(self.reported_ns):
            return None
        self.reported_ns = worst_ns = trips.worst_ns
        silent_ns, back_ns, lease_s = SILENT.after(worst_ns), BACK.after(worst_ns), self.registered.lease_s
        return NetworkRecord(
            of=self.host, worst_ns=worst_ns or 0, silent_ns=silent_ns, back_ns=back_ns, lease_s=lease_s
        )

    def _keep_lines(self, header: ShippedHostMessage, packet: bytes) -> None:
        """Keeps records; the last answer is on its way when the host has shipped all."""

        def answer(data: bytes) -> None:
            self.peer.end.send(data)
            self.has_shipped = header.is_last

        parts = required(self.keeper, "a host is admitted after its keeper is there").take(header, packet, answer)
        for part in parts:
            if self.shipper is not None:
                self.shipper.knows(part.node, part.file, part.begin + part.length)

    def _with(self, process: int, name: str, *arguments: Any) -> None:
        with self._hearing:
            child = self._away.get(process)
            if self._is_early:
                self._early.append((process, name, arguments))
            elif child is not None:
                getattr(child, name)(*arguments)

    def adopt(self, inherited: ProcessOnHost) -> Started:
        """Returns a handle of a process that another coordinator has had."""
        process = RemoteProcess(inherited.number, inherited.worker, self.peer.end.send, self.mailbox, inherited.pid)
        with self._losing:
            self._number = max(self._number, inherited.number)
            self._away[inherited.number] = process
            is_lost = self.peer.is_lost
        if inherited.ended or is_lost:
            process.ended(inherited.ended[0] if inherited.ended else KILLED, "" if inherited.ended else self._why_lost)
        return process, process.link

    def end_held(self) -> None:
        """Ends the processes that the host has from another coordinator: all workers begin again."""
        with self._hearing:
            for number, *_ in self.inherited:
                self._number = max(self._number, number)
                self.peer.end.send(frame(SignalHostMessage(number, CLOSED)))
            self._early, self._is_early = [], False

    def words(self) -> list[tuple[int, bytes]]:
        """Returns the words of processes before they were adopted, each with its number."""
        with self._hearing:
            return [(number, packet) for number, name, (packet, *_) in self._early if name == "hear"]

    def hear_again(self) -> None:
        """Lets all come to the handles that has come before them, and from now on all at once."""
        with self._hearing:
            for number, name, arguments in self._early:
                if (process := self._away.get(number)) is not None:
                    getattr(process, name)(*arguments)
            self._early, self._is_early = [], False

    def tick(self) -> None:
        """Tells the other host that this one lives."""
        self.peer.end.send(frame(TickHostMessage(self.peer.end.received, now_ns(), self._heard)))

    def lose(self, why: str) -> None:
        """Counts the host as lost, because of `why`, with all its processes; its words count for nothing any more."""
        with self._losing:
            self.peer.is_lost, self._why_lost = True, why
            self.peer.end.connect()  # which ends the stream
            children = [*self._away.values()]
        for child in children:
            child.ended(KILLED, why)
        self._answers.put(None)
        self.resent.set()

    def leave(self) -> None:
        """Forgets the processes, which go on; no order reaches them any more."""
        self.mailbox.close()
        self.peer.end.close()
        for child in self._away.values():
            child.ended(0)

    @contextlib.contextmanager
    def adopting(
        self, preload: tuple[str, ...] = (), while_waiting: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Calls `while_waiting` in waits; the agent of the other host does the rest."""
        self._while_waiting = while_waiting
        yield

    def keep(self, number: int, line: str) -> None:
        """Lets the other host keep a decision."""
        self.peer.end.send(frame(DecisionHostMessage(number), line.encode()))

    def tell(self, code: int, words: str) -> None:
        """Tells the other host the outcome of the run."""
        self.peer.end.send(frame(OutcomeHostMessage(code, words)))

    @property
    def pid(self) -> int:
        """Returns 0: there is none on this host."""
        return 0

    def has_ended(self) -> bool:
        """Returns whether the host is lost."""
        return self.peer.is_lost

    def close(self) -> None:
        """Ends the processes that are not closed."""
        self.mailbox.close()
        for child in self._away.values():
            child.close()


# Which host ships its records to which: each one to the host that coordinates, and that one to another.
#
#     a host that serves      its own, and the copies that it keeps of hosts that do not coordinate
#     the one that coordinates   its own, and the copies of lost hosts, to the first other host that lives
#
# Rules: so the records of each host are on two hosts, as long as there are two, and the host that goes on has all of
# them. An answer is about the stream over which it comes: it counts for no shipper of the next one.

_LAST_S = 2.0  # from the end of a run until all hosts have shipped their last records
_LOOK_S = 0.01


class ServedLines:
    """The records of a host that does not coordinate, in the folder `run` of host `own`; and copies of others."""

    def __init__(self, own: str, run: Path):
        self._own, self._run, self._chief = own, run, ""
        self._keeper = RecordReceiver()
        self._keeper.begin(run)
        self._end: StreamEnd | None = None
        self._shipper: RecordShipper | None = None

    def follow(self, chief: str, end: StreamEnd) -> None:
        """Ships to host `chief` from now on; nothing if that is this host."""
        self.leave()
        self._chief, self._end = chief, end
        if chief != self._own:
            self._shipper = RecordShipper(self._own, self._run, end, lambda name: name != chief)
            self._shipper.begin()

    def leave(self) -> None:
        """Ships nothing more over the present stream; returns when no frame of it is being taken, or will be."""
        self.close_shipper()
        if self._end is not None:
            self._end.close()
            self._end.settle()

    def take(self, header: Message, packet: bytes) -> bool:
        """Takes a frame with parts, or an answer; returns whether it is one."""
        shipper, end = self._shipper, self._end
        if isinstance(header, ShippedHostMessage) and end is not None:
            for part in self._keeper.take(header, packet, end.send):
                if shipper is not None:
                    shipper.knows(part.node, part.file, part.begin + part.length)
        elif isinstance(header, StoredSizesHostMessage) and shipper is not None:
            shipper.kept(header)
        return isinstance(header, ShippedHostMessage | StoredSizesHostMessage)

    def finish(self) -> None:
        """Ships the last records."""
        if self._shipper is not None:
            self._shipper.finish(_LAST_S)

    def close_shipper(self) -> None:
        """Ships nothing more."""
        if self._shipper is not None:
            self._shipper.close()
            self._shipper = None

    def close(self) -> None:
        """Ships and keeps nothing more."""
        self.close_shipper()
        self._keeper.close()


class CoordinatorLines:
    """The records of the hosts of a run, on the host `own` that coordinates; `away` has the other ones by name."""

    def __init__(self, own: str, away: Mapping[str, RemoteSpawner]):
        self._own, self._away = own, away
        self._keeper = RecordReceiver()
        self._run: Path | None = None
        self._to: RemoteSpawner | None = None
        for each in away.values():
            each.keeper = self._keeper

    def begin(self, run: Path) -> None:
        """Keeps and ships records in the folder of the run from now on."""
        if self._run is None:  # that of the job, not of its twin
            self._run = run
            self._keeper.begin(run)

    def look(self) -> None:
        """Chooses the host that keeps the records of this one, if there is none that lives."""
        if self._run is None or (self._to is not None and not self._to.peer.is_lost):
            return
        self._leave()
        self._to = next((each for each in self._away.values() if self._can_keep(each)), None)
        if self._to is not None:
            self._to.shipper = RecordShipper(self._own, self._run, self._to.peer.end, self._is_lost)
            self._to.shipper.begin()

    def _can_keep(self, away: RemoteSpawner) -> bool:
        return away.host != self._own and away.resent.is_set() and not away.peer.is_lost and not away.has_left

    def _is_lost(self, name: str) -> bool:
        return name not in self._away or self._away[name].peer.is_lost

    def finish(self) -> None:
        """Waits until the hosts have shipped their last records."""
        until_s = time.monotonic() + _LAST_S
        for spawner in self._away.values():
            while self._is_shipping(spawner) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Ships and keeps nothing more."""
        self._leave()
        self._keeper.close()

    def _is_shipping(self, away: RemoteSpawner) -> bool:
        return self._run is not None and self._can_keep(away) and not away.has_shipped and away.peer.ended_ns is None

    def hand_over(self) -> None:
        """Ships the last records of this host: it leaves."""
        if self._to is not None and self._to.shipper is not None:
            self._to.shipper.finish(_LAST_S)
        self.close()

    def _leave(self) -> None:
        if self._to is not None and self._to.shipper is not None:
            self._to.shipper.close()
            self._to.shipper = None
        self._to = None
