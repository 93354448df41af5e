"""The notice of a worker by SIGTERM.

    thread that blocks it    the signal waits, and the thread `notice` takes it
    thread that does not     of a library or of the user: a handler writes a byte, and the thread `notice-byte` reads it

Rules: the process blocks the signal before it has other threads, so threads that start later do. A thread may still
take it out of its mask: without a handler the signal would end the process there. A handler in Python runs in the main
thread, which may compute for long, so the byte is written by the handler of the interpreter itself. A process that the
worker forks gives no notice to the worker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

NOTICE = signal.SIGTERM  # its sender is going to end the worker soon


def give_notice_of_sigterm(give: Callable[[], None]) -> None:
    """Starts threads that give notice at each SIGTERM, also while the main thread is blocked; it calls this."""
    bytes_of, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(NOTICE, lambda number, frame: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)

    def listen() -> None:
        while True:
            signal.sigwait({NOTICE})
            give()

    def read() -> None:
        while byte := os.read(bytes_of, 1):
            if byte[0] == NOTICE:  # other signals that have a handler write theirs, too
                give()

    threading.Thread(target=listen, name="notice", daemon=True).start()
    threading.Thread(target=read, name="notice-byte", daemon=True).start()


def _forget() -> None:
    """Leaves the signal to the forked process; its byte would be a notice for the worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(NOTICE, signal.SIG_DFL)
