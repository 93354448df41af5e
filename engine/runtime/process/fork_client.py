"""The launcher's side of the fork server: starts it, forks children through it, signals them by pidfd.

Rules: the forked processes become children of this process, which reaps them; they survive the server. A server that
has ended or does not answer is replaced at the next fork. Every wait has a timeout.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from engine.core.errors import EnvironmentLacksError, required
from engine.core.message_kinds import Message, Plain
from engine.core.messages import (
    BeginMessage,
    CaseMessage,
    DoneMessage,
    ForkedMessage,
    ForkMessage,
    HeartbeatMessage,
    LeaveMessage,
    LeftMessage,
    UnforkedMessage,
)
from engine.core.protocol.events import Sight
from engine.files.atomic_write import open_to_append
from engine.runtime.process import descendants, subprocesses
from engine.runtime.process.interrupts import RunInterruptedError, breakable
from engine.runtime.process.kernel import ProcessAccount, ProcessTimes, process_state
from engine.runtime.process.link import Link
from engine.runtime.process.locks import folder_used
from engine.runtime.process.prctl import adopting
from engine.runtime.process.progress_board import Progress, ProgressBoard
from engine.runtime.process.spawner import Spawner, start_linked
from engine.runtime.process.subprocesses import is_readable

_START_S = 60.0  # for the first answer of a server, which first imports all modules
_WAIT_S = 1.0
_ANSWER_S = 5.0  # for a later answer; shorter than the lease of this host
_GONE_S = 2.0  # from SIGKILL to the end of the process; one that does not end is left behind
_MAX_STARTS = 3  # servers that are started for one child


class Child:
    """A process that this launcher started; `pidfd` becomes readable when the process has ended."""

    lost = ""
    is_unseen = False

    def __init__(self, name: str, pid: int, pidfd: int):
        self.name = name
        self.pid = pid
        self.pidfd = pidfd
        self.is_closed = False
        self._code: int | None = None
        self._account: ProcessAccount | None = None  # from the first look at its times

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def state(self) -> str | None:
        """Returns the state of its main thread as a letter, None if it has ended."""
        return process_state(self.pid, self.pidfd)

    def progress(self, worker: int, board: ProgressBoard) -> Progress:
        """Returns where it is as a worker."""
        return board.read(worker)

    def sight(self, worker: int, board: ProgressBoard) -> Sight | None:
        """Returns the findings of a look at it, and at its line of the board; None if there are none."""
        place, times = board.place_of(worker), self.times()
        if place is None or times is None:
            return None
        inside_ns = max(0, time.monotonic_ns() - place.since_ns) if place.inside else 0
        at = (place.epoch, place.step, place.number, place.inside)
        return Sight(*at, inside_ns, place.slowest_ns, place.loading, *times)

    def word(self) -> tuple[int, HeartbeatMessage | None] | None:
        """Returns None: a worker of this host speaks for itself."""
        return None

    def times(self) -> ProcessTimes | None:
        """Returns its times, None if it has ended or nothing is known of them."""
        if self._account is None:
            self._account = ProcessAccount(self.pid)
        times = self._account.times()
        return None if is_readable(self.pidfd) else times

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None if the process does not end within `timeout_s`."""
        if self._code is None and is_readable(self.pidfd, timeout_s):
            self._code = _reap(self.pidfd)
        return self._code

    def close(self, patience_s: float = _GONE_S) -> None:
        """Kills the process if it has not ended, and closes its descriptor; waits `patience_s` for its end."""
        if not self.is_closed:
            self.signal(signal.SIGKILL)
            self.wait(patience_s)
            os.close(self.pidfd)
            if self._account is not None:
                self._account.close()
            self.is_closed = True


class ForkServer(Spawner):
    """A running fork server of this host."""

    def __init__(self, environment: Mapping[str, str] = {}, host: str = "", address: str = "127.0.0.1") -> None:
        """`environment` is that of the children beside the one of this process."""
        self.host, self.address = host, address
        # One thread per numeric library until a worker sets its own count: a fork does not copy pool threads.
        # One seed for the hashes of texts: the order of a set is the same in a run, in its twin and on another day.
        self._mark = secrets.token_hex(16)
        self._environment = (
            {"PYTHONHASHSEED": "0"}
            | subprocesses.inherited()
            | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            | {descendants.VARIABLE: self._mark}
            | dict(environment)
        )
        self.preload: tuple[str, ...] = ()  # modules that the server imports before the next forks
        self._preloaded: tuple[str, ...] = ()
        self._children: list[Child] = []
        self._is_forking = False
        self._while_waiting: Callable[[], object] = lambda: None
        self._start()
        self._sweeper, self._alive_fd = subprocesses.start_sweeper(self._mark)

    def _start(self) -> None:
        self._link, far = Link.pair()
        self._has_served = self._has_begun = False
        self._preloaded = ()
        command = subprocesses.module("engine.runtime.process.forkserver", str(far.fileno()), str(os.getpid()))
        self._process = subprocesses.start(command, fd=far.fileno(), environment=self._environment)
        far.close()

    @property
    def pid(self) -> int:
        """The pid of the present server; the next fork may replace the server."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether the server has ended; the next fork then starts another."""
        return self._process.poll() is not None

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Forks inside the block share one intermediate process, which is faster; it is gone behind the block."""
        if self._is_forking:
            yield
            return
        self._is_forking = True
        with adopting():
            try:
                yield
            finally:
                self._is_forking = False
                self._settle()

    @contextlib.contextmanager
    def adopting(
        self, preload: tuple[str, ...] = (), while_waiting: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """As any spawner; from now on the server has imported the modules `preload` before it forks."""
        self.preload, self._while_waiting = preload, while_waiting
        with adopting():
            try:
                yield
            finally:
                self._while_waiting = lambda: None
                self.end_descendants()

    def end_descendants(self, patience_s: float = descendants.PATIENCE_S) -> None:
        """Ends the processes that were left behind by children that are closed; waits `patience_s` for their ends."""
        closed = {child.pid for child in self._children if child.is_closed}
        self._children = [child for child in self._children if not child.is_closed]
        own = {self._process.pid, *(child.pid for child in self._children)}
        descendants.end_adopted(self._mark, own, closed, patience_s)

    def start_worker(
        self, worker: int, log: Path, fds: Sequence[int], board: ProgressBoard, role: str = "worker"
    ) -> tuple[Child, Link]:
        """Forks a worker, which gets its link before `fds`; raises EnvironmentLacksError as `fork` does."""
        return start_linked(self.fork, role, worker, log, fds)

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Forks a child that runs `role`; it writes to `log_fd` and gets copies of `fds`, which stay open here.

        Raises EnvironmentLacksError if no server answers, or no process can be forked.
        """
        with self.forking():
            for _ in range(_MAX_STARTS):
                reply, came_along = self._ask(role, name, [log_fd, *fds])
                if reply is None:
                    self._replace()
                elif isinstance(reply, UnforkedMessage):
                    raise EnvironmentLacksError(f"cannot start a process: {reply.error}")
                elif isinstance(reply, ForkedMessage):
                    self._children.append(Child(name, reply.pid, came_along[0]))
                    return self._children[-1]
        raise EnvironmentLacksError(f"no fork server answers; {_MAX_STARTS} were started one after the other")

    def kill_all(self) -> None:
        """Kills every child that has not ended; any thread may call, when nothing else counts any more."""
        for child in self._children:
            if not child.is_closed:
                child.signal(signal.SIGKILL)

    def _replace(self) -> None:
        code = self._end()
        if code >= 0 and not self._has_served:
            raise EnvironmentLacksError(f"the fork server ended at start with code {code}")
        self._start()

    def _ask(self, role: str, name: str, fds: list[int]) -> tuple[Message | None, list[int]]:
        """Asks the server for a fork; returns its answer and the descriptors with it, or None if it does not answer."""
        if not self._has_begun:
            self._link.send(BeginMessage(self.preload))
            self._has_begun = True
        gate, tell = os.pipe()  # the child waits for a byte, so that it does not run unless this process knows it
        try:
            self._link.send(ForkMessage(role, name), [gate, *fds])
            is_ready = self._has_served and self._preloaded == self.preload
            reply, came_along = self._reply(_ANSWER_S if is_ready else _START_S)
            self._has_begun = reply is not None and not isinstance(reply, LeftMessage)
            if reply is not None:
                self._has_served, self._preloaded = True, self.preload
                os.write(tell, b"!")
        finally:
            os.close(gate)
            os.close(tell)
        return reply, came_along

    def _settle(self) -> None:
        """Waits for the end of the intermediate process; kills the server if it does not come."""
        if self._has_begun:
            self._has_begun = False
            self._link.send(LeaveMessage())
            if self._reply(_ANSWER_S)[0] is None:
                self._process.kill()
                self._reply(_GONE_S)  # returns at the end of file

    def _reply(self, timeout_s: float) -> tuple[Message | None, list[int]]:
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            with breakable():
                has_come = is_readable(self._link.fileno(), min(left_s, _WAIT_S))
            if has_come:
                return self._link.receive_with_fds()
            self._while_waiting()
        return None, []

    def _end(self) -> int:
        """Ends the server and returns its exit code, negative for a signal."""
        self._link.close()
        return subprocesses.end(self._process, _GONE_S)

    def close(self) -> None:
        """Ends the server, which may be busy with imports, and every child that is not closed."""
        self._process.kill()
        self._end()
        for child in self._children:
            child.close()
        self.end_descendants()
        self._sweeper.kill()  # its work is done
        subprocesses.end(self._sweeper, _GONE_S)
        os.close(self._alive_fd)


def _reap(pidfd: int) -> int:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:  # an embedding program has reaped it, so its exit code is lost
        return -signal.SIGKILL
    ended = required(result, "a process that has ended was reaped")
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


# Lanes: a pool of processes that run cases; each lane keeps its fork server warm from case to case.
#
# Rules: a lane gets its next case when it has answered. A lane that exceeds the time limit is ended with all its
# children, and its case counts as hung. If a lane ends, its case fails and the next case gets a new lane. The kernel
# ends all lanes with this process.

_GRACE_S = 10.0
_INTERRUPTED_GRACE_S = 1.0

Task = TypeVar("Task", bound=Plain)


class Lane:
    """One process of the pool; it runs `module` with the number of its link's descriptor as the only argument."""

    def __init__(self, module: str, log: Path):
        self._grace_s = _GRACE_S
        command = subprocesses.module("engine.runtime.process.exec_with_parent", str(os.getpid()))
        with open(open_to_append(log), "ab") as file:
            self.link, far = Link.pair()
            command += subprocesses.module(module, str(far.fileno()))
            self._process = subprocesses.start(command, fd=far.fileno(), log=file)
        far.close()

    def ask(self, task: Plain) -> None:
        """Sends a case to the lane, if the lane has not ended."""
        with contextlib.suppress(OSError):
            self.link.send(CaseMessage(task))

    def close(self) -> int:
        """Ends the lane and returns its exit code, negative for a signal; an idle lane ends at once."""
        self.link.close()
        return subprocesses.end(self._process, self._grace_s)

    def interrupt(self, grace_s: float = _GRACE_S) -> None:
        """Sends SIGTERM, on which the running case cleans up within `grace_s`."""
        self._grace_s = grace_s
        self._process.send_signal(signal.SIGTERM)


class Lanes:
    """A pool of `count` lanes, as a context; `logs` is marked as used meanwhile."""

    def __init__(self, module: str, count: int, logs: Path):
        self._module = module
        self._logs = logs
        self._lanes: list[Lane | None] = [None] * count
        self._use = folder_used(logs)

    def __enter__(self) -> Lanes:
        self._use.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lanes = [lane for lane in self._lanes if lane is not None]
        for lane in lanes if kind is not None else ():
            lane.interrupt(_INTERRUPTED_GRACE_S if isinstance(error, RunInterruptedError) else _GRACE_S)
        for lane in lanes:
            lane.close()
        self._use.__exit__(None, None, None)

    def run(self, tasks: Iterable[Task], limit_s: float, take: Callable[[Task, Plain], None]) -> None:
        """Starts the tasks in order, one per free lane; calls `take` with each task and its answer.

        The answer is ``{"result": the lane's}``, or ``{"ended": "hang"}`` if the lane exceeded `limit_s` seconds, or
        ``{"ended": exit code}`` if the lane ended. Raises RunInterruptedError after a signal to this process.
        """
        left = iter(tasks)
        running: dict[int, tuple[Task, float]] = {}
        while True:
            for number in range(len(self._lanes)):
                if number not in running and (task := next(left, None)) is not None:
                    self._lane(number).ask(task)
                    running[number] = (task, time.monotonic() + limit_s)
            if not running:
                return
            for number, answer in self._answers(running):
                take(running.pop(number)[0], answer)

    def _lane(self, number: int) -> Lane:
        lane = self._lanes[number]
        if lane is None:
            lane = self._lanes[number] = Lane(self._module, self._logs / f"lane-{number}.log")
        return lane

    def _answers(self, running: Mapping[int, tuple[Plain, float]]) -> Sequence[tuple[int, Plain]]:
        """Waits for the first answers or the first deadline; returns (lane, answer) of each."""
        with selectors.DefaultSelector() as selector:
            for number in running:
                selector.register(self._lane(number).link, selectors.EVENT_READ, number)
            first_s = min(deadline for _, deadline in running.values())
            with breakable():
                ready = [key.data for key, _ in selector.select(max(0.0, first_s - time.monotonic()))]
        answers: list[tuple[int, Plain]] = []
        for number in ready:
            done = self._lane(number).link.receive()
            answer = {"result": done.result} if isinstance(done, DoneMessage) else {"ended": self._drop(number).close()}
            answers.append((number, answer))
        late = [number for number, (_, at_s) in running.items() if number not in ready and at_s <= time.monotonic()]
        for number in late:
            lane = self._drop(number)
            lane.interrupt()
            lane.close()
            answers.append((number, {"ended": "hang"}))
        return answers

    def _drop(self, number: int) -> Lane:
        lane = self._lane(number)
        self._lanes[number] = None
        return lane
