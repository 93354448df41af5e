"""The few requests to the Linux kernel that Python does not wrap."""

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
    """Has this process killed when `parent` ends, and ends at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def die_with_launcher() -> None:
    """Has this process killed with the launcher, also while it is stopped: in a child, once the launcher has spoken."""
    die_with_parent(os.getppid())


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Has a process whose parent ends meanwhile, among all that stem from this one, become a child of this one."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def sleep_exactly() -> None:
    """Lets sleeps of this thread, and of the threads it starts, end within microseconds instead of 50 us later."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def name_process(name: str) -> None:
    """Sets the name that ps and top show; 15 bytes are kept."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))
