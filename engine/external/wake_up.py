"""Lets the processes of a foreign job that were stopped go on when the process that stopped them is gone.

A program of its own, which reads their pids from a pipe until that ends. It holds each by a pidfd from then on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

if __name__ == "__main__":
    stopped: dict[int, int] = {}  # pid -> pidfd
    with os.fdopen(int(sys.argv[1])) as lines:
        for line in lines:
            with contextlib.suppress(ProcessLookupError):
                if int(line) not in stopped:
                    stopped[int(line)] = os.pidfd_open(int(line))
    for pidfd in stopped.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
