"""The kernel's side of processes: their accounts in `/proc`, and the network namespace of a run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine.runtime.process.subprocesses import is_readable

# The kernel's accounts of a process: its times, and its state as a letter such as R (running) or T (stopped).

_READS_FOR = 32  # steps behind one with waits
_FEW = 50  # a wait is of note if it is more than this part of a step
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_ACCOUNT_BYTES = 1024  # more than any of these files has


def process_state(pid: int, pidfd: int) -> str | None:
    """Returns the state of the main thread of a child, or None if the child has ended."""
    letter = _letter(pid)
    # If the child has ended, its pid may belong to another process. Its pidfd tells, after the read.
    return None if letter is None or is_readable(pidfd) else letter


class ProcessTimes(NamedTuple):
    """The state of the main thread; its nanoseconds on a core and waiting for one; those of all threads on a core."""

    state: str
    thread_ns: int
    process_ns: int


# Rule: the descriptors stay open. To open a file of `/proc` takes ten times as long as to read it.


class ProcessAccount:
    """The kernel's account of a child, which has not been waited for yet."""

    def __init__(self, pid: int):
        self._files: list[int] = []
        with contextlib.suppress(OSError):  # the kernel keeps no account of waiting, or the child has ended
            for name in ("stat", f"task/{pid}/schedstat"):
                self._files.append(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC))

    def times(self) -> ProcessTimes | None:
        """Returns the times of the child, or None if it has been waited for or nothing is known of them."""
        try:
            stat, schedstat = (os.pread(file, _ACCOUNT_BYTES, 0) for file in self._files)
        except (OSError, ValueError):
            return None
        fields, (ran_ns, waited_ns, _) = _fields(stat), schedstat.split()
        ticks = int(fields[11]) + int(fields[12])
        return ProcessTimes(fields[0].decode(), int(ran_ns) + int(waited_ns), ticks * _TICK_NS)

    def close(self) -> None:
        """Closes its files."""
        while self._files:
            os.close(self._files.pop())


def allow_files(count: int) -> None:
    """Lets this process and its later children have so many files open, as far as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count and soft != resource.RLIM_INFINITY:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )


class CoreWaits:
    """The time that the thread that makes this could have run and had no core.

    Behind some steps without waits nothing is read but once a step, until there are some again.
    """

    def __init__(self) -> None:
        self._left = _READS_FOR
        self._waited_ns = self._begun_ns = 0
        try:
            self._account = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel keeps no account
            self._account = -1
        self.are_read = self._account >= 0
        weakref.finalize(self, _close, self._account)

    def begin_step(self) -> None:
        """Decides by the waits since the last call whether those of the coming step are read."""
        if self._account >= 0:
            waited_ns, now_ns = self.total_ns(), time.monotonic_ns()
            has_waited = (waited_ns - self._waited_ns) * _FEW > now_ns - self._begun_ns
            self._waited_ns, self._begun_ns = waited_ns, now_ns
            self._left = _READS_FOR if has_waited else max(0, self._left - 1)
            self.are_read = self._left > 0

    def total_ns(self) -> int:
        """Returns the nanoseconds up to now; 0 if the kernel keeps no account."""
        return int(os.pread(self._account, _ACCOUNT_BYTES, 0).split()[1]) if self._account >= 0 else 0


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that has ended and that its parent has not waited for does not."""
    return _letter(pid) not in (None, "Z", "X")


def _letter(pid: int) -> str | None:
    try:
        return _fields(Path(f"/proc/{pid}/stat").read_bytes())[0].decode()
    except OSError:
        return None


def _fields(stat: bytes) -> list[bytes]:
    """Returns the fields of `/proc/PID/stat` behind the name, which may have spaces."""
    return stat.rpartition(b")")[2].split()


# The network namespace of a run: sockets that are made in it stay in it, and no other process can reach them.
#
# The kernel makes one for a process with CAP_SYS_ADMIN. A process without it would need a user namespace, in which the
# user's code would be another one: see docs/decisions.md. A namespace belongs to threads: one thread of a worker makes
# the sockets of its group inside, while the user's code keeps the network of the host.

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_AND_RUNNING = 0x41
_OWN = "/proc/thread-self/ns/net"


def new_network() -> int:
    """Returns a descriptor of a new network namespace that has loopback only; raises OSError if the kernel refuses."""
    outcome: list[int | OSError] = []

    def make() -> None:
        try:
            _call("unshare", _CLONE_NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_AND_RUNNING))
            outcome.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            outcome.append(error)

    # A thread of its own, which ends with the call: this thread stays in the network of the host.
    thread = threading.Thread(target=make, name="network")
    thread.start()
    thread.join()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """Puts this thread, and threads that it starts, into a namespace; the thread is back behind the block."""
    before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", network, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
