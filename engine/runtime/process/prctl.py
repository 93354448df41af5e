"""The `prctl` calls to the Linux kernel, which Python does not wrap."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: object) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when `parent` ends; exits at once if `parent` has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def adopt() -> None:
    """Makes this process the parent of descendants whose parent ends (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes this process the parent of descendants whose parent ends during the block (a child subreaper)."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    adopt()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def sleep_exactly() -> None:
    """Reduces the timer slack of this thread and of threads it starts: a sleep ends within 1 us instead of 50 us."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def blank_environment() -> None:
    """Blanks the environment with which this process began, a fork, where other tools read it: it may have passwords.

    `os.environ` stays.
    """
    with open("/proc/self/stat", encoding="ascii") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)


def name_process(name: str) -> None:
    """Sets the name that ps and top show; 15 bytes are kept."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))
