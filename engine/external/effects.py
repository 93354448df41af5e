"""Faults beyond signals: a full disk, memory at its limit, TCP connections that are cut.

Rules: each needs something of this host, and `missing` says before the start what that is. Each is undone at the end of
the fault or of the run, also of a killed one: a ballast without a name, and no state of the host's own network.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.core.errors import Problem
from engine.core.faults.external import ExternalFault, ExternalScenario
from engine.core.texts import counted, numbered
from engine.external.processes import JobProcess, tcp_connections

_MOST_FREE_BYTES = 1 << 30  # of a file system that is filled: a larger one is nobody's test disk
_LENT = "BAMBOO_CGROUP"  # names a cgroup in which groups of bamboo's own may be made
_SS_S = 10.0


class Effect(Protocol):
    """A fault that goes on."""

    def seen(self) -> str:
        """Returns how its effect shows; empty while it does not."""

    def end(self) -> None:
        """Undoes it."""


def missing(scenario: ExternalScenario, results: Path) -> Iterator[Problem]:
    """Yields what this host lacks for the faults of a scenario; `results` is the folder of runs."""
    for number, fault in enumerate(scenario.faults):
        place = f"faults.{number}"
        if fault.do == "disk-full":
            yield from _disk_problems(f"{place}.path", Path(str(fault.parameters["path"])), results)
        elif fault.do == "oom" and isinstance(lent := _lent_group(), str):
            yield Problem(f"{place}.do", "a memory cgroup that is lent", "oom", lent)
        elif fault.do == "cut" and (why := _why_no_cut()):
            yield Problem(f"{place}.do", "a host whose connections can be cut", "cut", why)


def begin_effect(fault: ExternalFault, victims: Sequence[JobProcess]) -> Effect | str:
    """Begins a fault, and returns it, or why it has no effect."""
    try:
        if fault.do == "disk-full":
            return DiskBallast(Path(str(fault.parameters["path"])))
        return LittleMemory(victims) if fault.do == "oom" else cut(victims)
    except OSError as error:
        return f"{error.strerror}: {error.filename or fault.do}"


# A full disk: a file without a name takes all that is free, and is gone when it is closed, or when bamboo is.


class DiskBallast:
    """A file system without a free byte."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        size, part = 0, 1 << 26
        while part:  # a part that does not fit is refused as a whole
            try:
                os.posix_fallocate(self._fd, size, part)
            except OSError:
                part //= 2
            else:
                size += part

    def seen(self) -> str:
        """Returns how much is free once that is nothing."""
        return "" if os.statvfs(self._path).f_bavail else f"no byte is free in {self._path}"

    def end(self) -> None:
        """Frees what was free before."""
        os.close(self._fd)


def _disk_problems(place: str, path: Path, results: Path) -> Iterator[Problem]:
    if not path.is_dir() or not os.access(path, os.W_OK):
        yield Problem(place, "a folder in which you may write", repr(str(path)))
        return
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    if free > _MOST_FREE_BYTES:
        hint = "such as a tmpfs of 64 MiB (mount -t tmpfs -o size=64m tmpfs DIR), in which the job writes"
        there = f"{free / 2**30:.1f} GiB in {str(path)!r}"
        yield Problem(place, f"a file system with at most {_MOST_FREE_BYTES >> 30} GiB free", there, hint)
    whole = results.absolute()
    existing = next(folder for folder in (whole, *whole.parents) if folder.is_dir())
    if path.stat().st_dev == existing.stat().st_dev:
        yield Problem(place, "another file system than that of --results", repr(str(path)), "the records would be lost")


# Memory at its limit: the victim goes into a group whose limit the next allocation exceeds, and the kernel ends it.


class LittleMemory:
    """Processes whose next page is one too many."""

    def __init__(self, victims: Sequence[JobProcess]) -> None:
        lent = _lent_group()
        if isinstance(lent, str):
            raise OSError(0, lent)
        self._group = lent / f"bamboo-{secrets.token_hex(4)}"
        self._group.mkdir()
        is_second = (self._group / "memory.max").exists()  # cgroup v2
        self._counts = self._group / ("memory.events" if is_second else "memory.oom_control")
        try:
            (self._group / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text("65536")
            for victim in victims:
                (self._group / "cgroup.procs").write_text(str(victim.pid))
        except OSError:
            self.end()
            raise

    def seen(self) -> str:
        """Returns what the kernel says once it has ended a process of the group."""
        match = re.search(r"^oom_kill (\d+)$", self._counts.read_text(), re.MULTILINE)
        return "the kernel has ended it: out of memory" if match and int(match[1]) else ""

    def end(self) -> None:
        """Takes the limit away, and the group if it is empty."""
        with contextlib.suppress(OSError):
            for line in (self._group / "cgroup.procs").read_text().split():
                (self._group.parent / "cgroup.procs").write_text(line)
        with contextlib.suppress(OSError):
            self._group.rmdir()


def _lent_group() -> Path | str:
    """Returns the cgroup in which a group with a limit can be made, or what to do for one."""
    named = os.environ.get(_LENT, "")
    own = re.search(r"^\d+:memory:/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    group = Path(named or f"/sys/fs/cgroup/memory/{own[1] if own else ''}")
    controllers = group / "cgroup.subtree_control"
    has_memory = "memory" in controllers.read_text().split() if controllers.is_file() else (group / "tasks").is_file()
    if has_memory and os.access(group, os.W_OK):
        return group
    return f"set {_LENT} to a cgroup in which you may make groups (v2: with memory in its cgroup.subtree_control)"


# A cut: the kernel destroys each TCP connection between two processes, as if a router had reset it.


@dataclass(frozen=True, slots=True)
class CutEdge:
    """Connections that were destroyed."""

    count: int
    ranks: tuple[int, ...]

    def seen(self) -> str:
        """Returns how many connections are gone."""
        return f"{counted(self.count, 'TCP connection')} of {numbered('rank', self.ranks, ' and ')} destroyed"

    def end(self) -> None:
        """Does nothing: the processes may connect again."""


def cut(victims: Sequence[JobProcess]) -> CutEdge | str:
    """Destroys all TCP connections between two processes of this host, or returns why there are none."""
    one, other = victims
    ranks = tuple(victim.rank or 0 for victim in victims)
    edges = _edges(one.pid, other.pid)
    if not edges:
        return f"no TCP connection joins {numbered('rank', ranks, ' and ')}"
    for local, remote in edges:
        _destroy(local, remote)
    left = len(edges & _edges(one.pid, other.pid))
    return f"the kernel kept {counted(left, 'connection')}" if left else CutEdge(len(edges), ranks)


def _edges(one: int, other: int) -> set[tuple[str, str]]:
    """Returns the connections between two processes, as the address and port of either side."""
    ours, theirs = (
        {(_address(each.local), _address(each.remote)) for each in tcp_connections(pid)} for pid in (one, other)
    )
    return {(local, remote) for local, remote in ours if (remote, local) in theirs}


def _address(text: str) -> str:
    """Returns an address and port as `ss` reads them: the kernel has each word of four bytes backwards."""
    host, _, port = text.partition(":")
    data = b"".join(bytes.fromhex(host[place : place + 8])[::-1] for place in range(0, len(host), 8))
    written = socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)
    return f"{written if len(data) == 4 else f'[{written}]'}:{int(port, 16)}"


def _destroy(local: str, remote: str) -> None:
    words = ["ss", "--kill", "--tcp", "--numeric", "src", local, "dst", remote]
    subprocess.run(words, capture_output=True, check=False, timeout=_SS_S)


def _why_no_cut() -> str:
    """Returns what a cut needs; empty if it works on a connection of this process."""
    if shutil.which("ss") is None:
        return "install iproute2, whose ss destroys connections"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as own:
        accepted = server.accept()[0]
        with accepted:
            _destroy(*("{}:{}".format(*of) for of in (own.getsockname(), own.getpeername())))
            try:
                own.send(b"x")
            except OSError:
                return ""
    return "it takes root (CAP_NET_ADMIN) and a kernel with INET_DIAG_DESTROY"
