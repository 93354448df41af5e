"""The processes of a job of another launcher: which ones belong to it, which rank each is, and signals to them.

Rules: a process belongs to the job if its environment has the mark of this run, or if its parent belongs to it. It is
held by a pidfd, opened before anything is read about it, so a signal never reaches a process that has its number by
now. A rank is the uppermost process with its number, but for shells; forks of it, such as loaders of data, are not.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.core.checks.silence import RankSign
from engine.core.faults.launchers import Launcher
from engine.runtime.process.kernel import process_state
from engine.runtime.process.subprocesses import is_readable

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
_SETTLED_NS = 10_000_000_000  # until then a process may be a fork that executes a rank, with the environment of one
_ESTABLISHED = "01"  # the state of a connection in /proc/net/tcp
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class JobProcess:
    """A process of the job; `rank` is None unless it is a rank, `number` the one in its environment."""

    pid: int
    pidfd: int
    parent: int
    began_ns: int  # on the monotonic clock
    number: int | None = None
    rank: int | None = None
    group: int | None = None  # of ranks, such as those of an agent of torchrun
    is_below: bool = False  # below a rank, with its environment

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return is_readable(self.pidfd)

    @property
    def state(self) -> str | None:
        """The state as a letter, such as T for stopped; None behind its end."""
        return process_state(self.pid, self.pidfd)

    def send(self, number: int) -> bool:
        """Sends a signal; returns whether the process had not ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def sign(self, step: int) -> RankSign | None:
        """Returns what the kernel shows of it now, beside its newest step; None behind its end."""
        fields = _read(self.pid, "stat").rpartition(")")[2].split()
        unread = sum(each.unread for each in tcp_connections(self.pid))
        if len(fields) < 20 or self.has_ended:
            return None
        return RankSign(self.pid, (int(fields[11]) + int(fields[12])) * _TICK_NS, fields[0], unread, step)

    def words(self) -> str:
        """Returns its command, empty behind its end."""
        return _read(self.pid, "cmdline").replace("\0", " ").strip()


@dataclass(slots=True)
class JobProcesses:
    """All processes of the job, found by `look`; `mark` is a line of the environment, or empty for a foreign job."""

    launcher: Launcher
    mark: str
    root: int
    alive: dict[int, JobProcess] = field(default_factory=dict)
    ranks: dict[int, JobProcess] = field(default_factory=dict)  # the newest process of each, which may have ended
    _others: set[int] = field(default_factory=set)  # processes that do not belong to the job

    def look(self) -> tuple[list[JobProcess], list[JobProcess]]:
        """Looks for processes; returns the ranks that have begun, and those that have ended, since the last look."""
        ended = [process for process in self.alive.values() if process.has_ended]
        for process in ended:
            del self.alive[process.pid]
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._others &= there
        # A parent has been there before its child, but its number may be higher.
        opened = map(self._opened, sorted(there - self._others - self.alive.keys()))
        new = [process for process in opened if process is not None]
        while members := [process for process in new if self._belongs(process)]:
            self.alive |= {process.pid: process for process in members}
            new = [process for process in new if process.pid not in self.alive]
        settled_ns = time.monotonic_ns() - _SETTLED_NS
        for process in new:
            os.close(process.pidfd)
            if process.began_ns < settled_ns:
                self._others.add(process.pid)
        begun = [process for process in self.alive.values() if self._becomes_rank(process)]
        for process in begun:
            self.ranks[process.rank or 0] = process
        return begun, [process for process in ended if process.rank is not None]

    def rank(self, number: int) -> JobProcess | None:
        """Returns the process of a rank that lives; None if there is none."""
        process = self.ranks.get(number)
        return None if process is None or process.has_ended else process

    def group(self, number: int) -> tuple[int, ...]:
        """Returns the ranks of a group whose processes live."""
        return tuple(
            rank for rank, process in sorted(self.ranks.items()) if process.group == number and not process.has_ended
        )

    def launching(self) -> JobProcess | None:
        """Returns the process that has started the ranks, the parent of the first one that lives; None without any."""
        parents = (self.alive.get(process.parent) for process in self.ranks.values() if not process.has_ended)
        return next((parent for parent in parents if parent is not None and parent.rank is None), None)

    def children(self, of: JobProcess, pattern: str) -> list[JobProcess]:
        """Returns the processes below a rank whose command a pattern fits."""
        below: list[JobProcess] = []
        level = {of.pid}
        while level:
            lower = [each for each in self.alive.values() if each.parent in level and not each.has_ended]
            below, level = below + lower, {each.pid for each in lower}
        return [process for process in below if re.search(pattern, process.words())]

    def take_rank(self, pid: int, rank: int) -> JobProcess | None:
        """Takes a process that reports as a rank for it, if no environment said so; returns it if it was not before."""
        process = self.alive.get(pid)
        if process is None or process.number is not None or process.rank == rank or rank < 0:
            return None
        before = self.rank(rank)
        if before is not None and before.number is not None:
            return None
        if process.rank is not None and self.ranks.get(process.rank) is process:  # its launcher counts ranks anew
            del self.ranks[process.rank]
        process.rank, self.ranks[rank] = rank, process
        return process

    def close(self) -> None:
        """Closes the descriptors."""
        for process in {id(each): each for each in (*self.alive.values(), *self.ranks.values())}.values():
            os.close(process.pidfd)
        self.alive.clear()
        self.ranks.clear()

    def _opened(self, pid: int) -> JobProcess | None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended, or is a thread
            return None
        fields = _read(pid, "stat").rpartition(")")[2].split()
        if len(fields) < 20 or is_readable(pidfd):
            os.close(pidfd)
            return None
        return JobProcess(pid, pidfd, int(fields[1]), int(fields[19]) * _TICK_NS - _boot_offset_ns())

    def _belongs(self, process: JobProcess) -> bool:
        parent = self.alive.get(process.parent)
        is_child = parent is not None and parent.began_ns <= process.began_ns and not parent.has_ended
        return is_child or process.pid == self.root or bool(self.mark and self.mark in _environment(process.pid))

    def _becomes_rank(self, process: JobProcess) -> bool:
        """Decides whether a process is a rank that was none at the last look: it may have forked, but not executed."""
        if process.rank is not None or process.is_below or process.has_ended:
            return False
        variables = dict(line.partition("=")[::2] for line in _environment(process.pid))
        title = _read(process.pid, "comm").strip()
        process.number = self.launcher.rank_of(variables, title)
        process.group = self.launcher.group_of(variables)
        number = process.number
        if number is None and process.pid == self.root:
            number = self.launcher.root_rank
        if number is None or title in _SHELLS:
            return False
        process.is_below = self._is_below(process, number)
        process.rank = None if process.is_below else number
        return not process.is_below

    def _is_below(self, process: JobProcess, number: int) -> bool:
        """Returns whether a process descends from a process of the same rank."""
        parent = self.alive.get(process.parent)
        while parent is not None:
            if parent.rank == number:
                return True
            parent = self.alive.get(parent.parent)
        return False


def _environment(pid: int) -> list[str]:
    return _read(pid, "environ").split("\0")


class TcpConnection(NamedTuple):
    """An established connection, with both addresses as the kernel writes them, and the bytes not read yet."""

    local: str
    remote: str
    unread: int


def tcp_connections(pid: int) -> list[TcpConnection]:
    """Returns the connections of a process; none behind its end, or of another user."""
    sockets = {_link(f"/proc/{pid}/fd/{fd}") for fd in _names(f"/proc/{pid}/fd")}
    lines = (line.split() for table in ("tcp", "tcp6") for line in _read(pid, f"net/{table}").splitlines()[1:])
    return [
        TcpConnection(fields[1], fields[2], int(fields[4].partition(":")[2], 16))
        for fields in lines
        if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in sockets
    ]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:  # it has ended, or belongs to another user
        return ""


def _boot_offset_ns() -> int:
    """Returns how far the clock of processes' beginnings is ahead of the monotonic one, which stops while suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
