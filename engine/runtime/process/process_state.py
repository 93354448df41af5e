"""The kernel's accounts of a process: its times, and its state as a letter such as R (running) or T (stopped)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from engine.runtime.process.subprocesses import is_readable

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


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


def process_times(pid: int, pidfd: int) -> ProcessTimes | None:
    """Returns the times of a child, or None if it has ended or the kernel keeps no account of waiting."""
    try:
        fields = _fields(pid)
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    ticks = int(fields[11]) + int(fields[12])
    times = ProcessTimes(fields[0], int(ran_ns) + int(waited_ns), ticks * _TICK_NS)
    return None if is_readable(pidfd) else times


def core_wait_ns() -> int:
    """Returns the nanoseconds that this thread could have run and had no core; 0 if the kernel keeps no account."""
    try:
        account = os.open(
            "/proc/thread-self/schedstat", os.O_RDONLY
        )  # twice for each action: a Path takes twice as long
    except OSError:
        return 0
    try:
        return int(os.read(account, 100).split()[1])
    finally:
        os.close(account)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that has ended and that its parent has not waited for does not."""
    return _letter(pid) not in (None, "Z", "X")


def _letter(pid: int) -> str | None:
    try:
        return _fields(pid)[0]
    except OSError:
        return None


def _fields(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` behind the name, which may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
