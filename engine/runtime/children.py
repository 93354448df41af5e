"""The launcher's side of the fork server: starts it, forks children through it, signals them by pidfd only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from engine.core.errors import EnvironmentLacksError
from engine.runtime.interrupts import ctrl_c_held
from engine.runtime.link import Link, Message


@dataclass(frozen=True, slots=True)
class Child:
    """A process that this launcher started; `pidfd` becomes readable when it has ended."""

    name: str
    pid: int
    pidfd: int

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class ForkServer:
    """A running fork server, as a context. `exited` messages arrive on `link` and are taken with `next_exit`."""

    def __init__(self) -> None:
        self.link, far = Link.pair()
        self._exits: list[Message] = []
        # One thread per numeric library until a worker sets its own count: idle pools would be lost in a fork.
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "engine.runtime.forkserver", str(far.fileno()), str(os.getpid())]
        with ctrl_c_held():
            self._process = subprocess.Popen(
                command, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        far.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Forks a child into `role`; it writes to `log_fd` and owns copies of `fds`, which stay open here."""
        self.link.send("fork", fds=[log_fd, *fds], role=role, name=name)
        while True:
            reply = self.link.receive()
            if reply is None:
                raise EnvironmentLacksError(f"the fork server ended at start with code {self._process.wait()}")
            if reply["kind"] == "forked":
                return Child(name, reply["pid"], reply["fds"][0])
            self._exits.append(reply)

    def has_early_exits(self) -> bool:
        """Returns whether children ended while others were being forked: `link` will not become readable for them."""
        return bool(self._exits)

    def next_exit(self) -> Message | None:
        """Returns the next ``exited`` message (pid; code, negative for a signal), or None if the server is gone."""
        return self._exits.pop(0) if self._exits else self.link.receive()

    def close(self) -> None:
        """Ends the server and every child it still has."""
        self.link.close()
        self._process.wait()
