"""The processes that the workers of a launcher leave behind: found by a mark that each descendant inherits, and ended.

A child of a worker, such as a loader of data, does not get the death signal of the worker. It may also have left the
session of the worker, and its parent.

    a worker ends     its descendants become children of the launcher (see `prctl.adopting`), which ends them
    SIGKILL of the    the workers end; ``python .../descendants.py FD MARK``, which outlives the launcher, ends every
    launcher          process with its mark

Rules: the mark is a random number in the environment of the fork server. No other process has it, so a process with the
mark descends from this launcher. A process is pinned by a pidfd before its mark is read, so no signal goes to another.
Like `cleanup_after_death.py` this file imports little and is run as a file, because it starts beside every run.
"""

from __future__ import annotations

import os
import select
import sys

TYPE_CHECKING = False  # from typing: its import takes longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

VARIABLE = "_BAMBOO_LAUNCHER"
PATIENCE_S = 2.0  # for the ends of processes after SIGKILL
_POLL_S = 0.005


def end_adopted(mark: str, own: Collection[int], sessions: Collection[int], patience_s: float = PATIENCE_S) -> None:
    """Kills and reaps the adopted children of this process, and their descendants, which become its children then.

    An adopted child is none of the `own` pids, and has the mark or is in the session of a worker. A process that does
    not end within `patience_s` is reaped at the end of this process.
    """

    def is_left(pid: int) -> bool:
        return pid not in own and (has_mark(pid, mark) or _session(pid) in sessions)

    _end_all(_children, is_left, patience_s, reap=True)


def has_mark(pid: int, mark: str) -> bool:
    """Returns whether the environment with which a process was started has the mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{VARIABLE}={mark}\0".encode() in b"\0" + file.read()
    except OSError:  # it has ended, or belongs to another user
        return False


def _end_all(
    pids: Callable[[], Iterable[int]], is_left: Callable[[int], bool], patience_s: float, *, reap: bool
) -> None:
    """Kills the processes that are left until there is none; gives up after `patience_s`."""
    import signal
    import time

    until_s = time.monotonic() + patience_s
    while (left := [pid for pid in pids() if is_left(pid)]) and time.monotonic() < until_s:
        for pid in left:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if is_left(pid):  # pid and pidfd are one process, or the pidfd is of one that has ended
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    if reap and select.select([pidfd], [], [], max(0.0, until_s - time.monotonic()))[0]:
                        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except OSError:  # it has ended, or has become another user's
                pass
            finally:
                os.close(pidfd)
        if not reap:
            time.sleep(_POLL_S)


def _children() -> Iterator[int]:
    """Yields the children of this process."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                yield from map(int, file.read().split())
        except FileNotFoundError:  # the thread has ended, or this kernel has no such list
            continue


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def main(fd: int, mark: str) -> None:
    """Waits for the end of the pipe, which the launcher holds open; then ends every process with the mark."""
    os.read(fd, 1)
    _end_all(_processes, lambda pid: has_mark(pid, mark), PATIENCE_S, reap=False)


if __name__ == "__main__":
    with open("/proc/self/comm", "w", encoding="ascii") as name:  # as `name_process` does, but without ctypes
        name.write("bamboo-sweeper")
    main(int(sys.argv[1]), sys.argv[2])
