"""The fork server of another host, as the agent of the coordinator's host uses it: it forks over the stream."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.core.errors import EnvironmentLacksError, ensure, required
from engine.core.history.record_lines import decoded
from engine.core.hosts.host_messages import (
    EndedHostMessage,
    ForkedHostMessage,
    ForkHostMessage,
    HeardHostMessage,
    HoldsHostMessage,
    KeptHostMessage,
    LeavesHostMessage,
    OutcomeHostMessage,
    SaidAllHostMessage,
    ShippedHostMessage,
    SignalHostMessage,
    SignsHostMessage,
    TaughtHostMessage,
    TickHostMessage,
    ToldHostMessage,
    UnforkedHostMessage,
    WordsHostMessage,
    WorkerSign,
    frame,
)
from engine.core.hosts.registered_host import RegisteredHost
from engine.core.message_codec import Message, ToWorker, decode
from engine.runtime.hosts.away_child import CLOSED, AwayChild
from engine.runtime.hosts.line_keeper import LineKeeper
from engine.runtime.hosts.shipper import Shipper
from engine.runtime.hosts.wire import HostPeer
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.process import descendants
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.interrupts import breakable

_FORK_S = 90.0  # for the first one the other host imports torch
_WAIT_S = 1.0
_KILLED = -9  # the code of a process whose end nothing saw


class AwayServer(ForkServer):
    """The processes of one other host. With `takes_over` that host has processes already, from another coordinator."""

    def __init__(self, known: RegisteredHost, *, takes_over: bool = False):
        self.host, self.address = known.name, known.address
        self.known = known
        self.peer = HostPeer(known.incarnation, self._deliver)
        self.while_waiting: Callable[[], None] = lambda: None
        self._number = 0
        self._away: dict[int, AwayChild] = {}
        self._answers: queue.SimpleQueue[ForkedHostMessage | UnforkedHostMessage | None] = queue.SimpleQueue()
        self._losing = threading.Lock()
        self.has_left = False
        self.keeper: LineKeeper | None = None  # of the records of hosts
        self.shipper: Shipper | None = None  # of those of the host that coordinates
        self.has_shipped = False  # its last records
        self.held: tuple[tuple[int, ...], ...] = ()  # as the host told them
        self.heard = 0  # decisions, before it served this coordinator
        self.told: dict[int, str] = {}  # those of them that this host may lack
        self.taught: list[ToWorker] = []  # its workers
        self.has_said = threading.Event()
        self._is_early = takes_over  # no handle of the processes is there yet
        self._early: list[tuple[int, str, tuple[Any, ...]]] = []
        self._hearing = threading.Lock()
        self._why_lost = ""
        self._heard: tuple[int, ...] = ()  # when the last signs were sent, and when they came

    @property
    def is_there(self) -> bool:
        """Whether workers can be started on the host: it is not lost, and has not left."""
        return not (self.peer.is_lost or self.has_left)

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Forks a worker on the other host; of `fds` it takes the link and the progress board, which come first.

        If the host is lost, the process counts as ended with it. Raises EnvironmentLacksError if the host cannot fork.
        """
        ensure(role == "worker", f"another host runs workers, and no {role}")
        self._number += 1
        number, worker = self._number, int(name.rpartition("-")[2])
        child = AwayChild(name, number, worker, fds[0], fds[3], self.peer.end.send)
        with self._losing:
            self._away[number] = child
        self.peer.end.send(frame(ForkHostMessage(number, worker, ProgressBoard.lines_in(fds[3]))))
        answer = self._answer()
        if isinstance(answer, ForkedHostMessage):
            child.pid = answer.pid
        elif self.peer.is_lost:
            child.ended(_KILLED, self._why_lost)
        else:
            child.ended(_KILLED)
            child.close()
            why = f"it did not answer within {_FORK_S:g} s" if answer is None else answer.error
            raise EnvironmentLacksError(f"no process can be started on host {self.host}: {why}")
        return child

    def _answer(self) -> ForkedHostMessage | UnforkedHostMessage | None:
        until_s = time.monotonic() + _FORK_S
        while time.monotonic() < until_s and not self.peer.is_lost:
            try:
                with breakable():
                    return self._answers.get(timeout=_WAIT_S)
            except queue.Empty:
                self.while_waiting()
        return None

    def _deliver(self, header: Message, packet: bytes) -> None:
        """Takes a frame of the other host, in the thread of its stream."""
        match header:
            case SignsHostMessage(sent_ns=sent_ns, signs=signs):
                self._heard = (sent_ns, now_ns())
                for each in map(WorkerSign._make, signs):
                    self._with(each.process, "sees", each)
            case WordsHostMessage(process=process):
                self._with(process, "hear", packet)
            case EndedHostMessage(process=process, code=code):
                self._with(process, "ended", code)
            case ForkedHostMessage() | UnforkedHostMessage():
                self._answers.put(header)
            case LeavesHostMessage():
                self.has_left = True
            case HoldsHostMessage(processes=processes, heard=heard):
                self.held, self.heard = processes, heard
            case ToldHostMessage(number=number) if not self.has_said.is_set():
                decoded(line := packet.decode())  # raises InvariantError for one that is no record
                self.told[number] = line
            case TaughtHostMessage() if isinstance(told := decode(packet), ToWorker) and not self.has_said.is_set():
                self.taught.append(told)
            case SaidAllHostMessage():
                self.has_said.set()
            case ShippedHostMessage():
                self._keep_lines(header, packet)
            case KeptHostMessage() if self.shipper is not None:
                self.shipper.kept(header)

    def _keep_lines(self, header: ShippedHostMessage, packet: bytes) -> None:
        """Keeps records; the last answer is on its way when the host has shipped all."""

        def answer(found: bytes) -> None:
            self.peer.end.send(found)
            self.has_shipped = header.is_last

        parts = required(self.keeper, "a host is admitted after its keeper is there").take(header, packet, answer)
        for each in parts:
            if self.shipper is not None:
                self.shipper.knows(each.node, each.file, each.begin + each.length)

    def _with(self, process: int, name: str, *given: Any) -> None:
        with self._hearing:
            child = self._away.get(process)
            if self._is_early:
                self._early.append((process, name, given))
            elif child is not None:
                getattr(child, name)(*given)

    def adopt(self, number: int, worker: int, pid: int, ended: Sequence[int], far: int, board_fd: int) -> Child:
        """Returns a handle of a process that another coordinator has had; `ended` has its exit code, or is empty."""
        child = AwayChild(f"bamboo-{worker}", number, worker, far, board_fd, self.peer.end.send)
        child.pid = pid
        with self._losing:
            self._number = max(self._number, number)
            self._away[number] = child
            is_lost = self.peer.is_lost
        if ended or is_lost:
            child.ended(ended[0] if ended else _KILLED, "" if ended else self._why_lost)
        return child

    def end_held(self) -> None:
        """Ends the processes that the host has from another coordinator: all workers begin again."""
        with self._hearing:
            for number, *_ in self.held:
                self._number = max(self._number, number)
                self.peer.end.send(frame(SignalHostMessage(number, CLOSED)))
            self._early, self._is_early = [], False

    def words(self) -> list[tuple[int, bytes]]:
        """Returns the words of processes before they were adopted, each with its number."""
        with self._hearing:
            return [(number, packet) for number, name, (packet, *_) in self._early if name == "hear"]

    def hear_again(self) -> None:
        """Lets all come to the handles that has come before them, and from now on all at once."""

        def replay() -> None:
            with self._hearing:
                for number, name, given in self._early:
                    if (child := self._away.get(number)) is not None:
                        getattr(child, name)(*given)
                self._early, self._is_early = [], False

        threading.Thread(target=replay, name=f"again {self.host}", daemon=True).start()

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
            child.ended(_KILLED, why)
        self._answers.put(None)
        self.has_said.set()

    def leave(self) -> None:
        """Forgets the processes, which go on; no order reaches them any more."""
        self.peer.end.close()
        for child in self._away.values():
            child.ended(0)

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """The agent of the other host does it."""
        yield

    @contextlib.contextmanager
    def adopting(self, preload: tuple[str, ...] = ()) -> Iterator[None]:
        """The agent of the other host does it."""
        yield

    def end_descendants(self, patience_s: float = descendants.PATIENCE_S) -> None:
        """The agent of the other host does it."""

    def keep(self, number: int, line: str) -> None:
        """Lets the other host keep a decision."""
        self.peer.end.send(frame(HeardHostMessage(number), line.encode()))

    def tell(self, code: int, words: str) -> None:
        """Tells the other host the outcome of the run."""
        self.peer.end.send(frame(OutcomeHostMessage(code, words)))

    @property
    def pid(self) -> int:
        """There is none on this host."""
        return 0

    def has_ended(self) -> bool:
        """Returns whether the host is lost."""
        return self.peer.is_lost

    def close(self) -> None:
        """Ends the processes that are not closed."""
        for child in self._away.values():
            child.close()
