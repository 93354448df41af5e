"""The launcher's end of its keeper, the process that works on the disk of checkpoints (`disk_work.py`).

Rule: no signal, and not even SIGKILL, ends a process that waits for a disk which has stopped. So the launcher waits for
its keeper instead, gives it up after a limit, and can end. One line of JSON asks, one answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.checkpoints.keeping import keeps_any
from engine.core.config.job import Job
from engine.core.errors import StorageError
from engine.files.checkpoints.place_text import is_url
from engine.files.run_folder import CHECKPOINTS_FOLDER
from engine.runtime.keeping import disk_work
from engine.runtime.process import subprocesses
from engine.runtime.process.fork_client import Child, ForkServer

_NAME = "bamboo-keeper"
_LEAVE_S = 0.3  # from the end of its work to the end of the process
_GONE_S = 1.0  # the same, from SIGKILL
StartKeeper = Callable[[int], Child | None]


def place_of(job: Job, run: str) -> str:
    """Returns the folder or the URL of the checkpoints of a job that runs in the folder `run`; empty if it keeps none.

    A path is absolute. Without a folder of the run there are none.
    """
    if not run or not keeps_any(job.checkpoint_every):
        return ""
    if is_url(job.checkpoints):
        return job.checkpoints
    return str(Path(job.checkpoints or Path(run, CHECKPOINTS_FOLDER)).absolute())


class Keeper:
    """The keeper of the checkpoints of a run, as a context; `start` starts one, which gets a descriptor.

    `folder` is that of the run, `heir` the name of the one with which another host goes on with it. The main thread
    starts a keeper. Any thread asks, one at a time.
    """

    def __init__(self, start: StartKeeper, job: Job, folder: str, heir: str = ""):
        self.job, self.place, self.run = job, place_of(job, folder), Path(folder).absolute().name
        self.number = 0  # of keepers that were started
        self._start, self._given = start, (asdict(job), self.place, self.run, heir)
        self._child: Child | None = None
        self._near: socket.socket | None = None
        self._why = ""  # it was given up
        self._asking = threading.Lock()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Starts a keeper if there is none, or if the last one has ended or was given up; raises BambooError."""
        has_ended = self._child is not None and self._child.wait() is not None
        if self._near is not None and not has_ended and not self._why:
            return
        self.close()
        self._near, far = socket.socketpair()
        with far:
            self._child = self._start(far.fileno())
        self._why, self.number = "", self.number + 1
        self._near.sendall(_line([*self._given, self.number]))

    def ask(self, name: str, *given: Any, limit_s: float | None = None) -> Any:
        """Returns the answer of a function of `disk_work.WORK`; raises StorageError for its error, and without answer.

        Without an answer within `limit_s` the keeper is given up.
        """
        with self._asking:
            line = self._answer(_line([name, *given]), limit_s)
        if not line.endswith(b"\n"):
            raise StorageError(self._why or "the process that writes the manifests has ended")
        value, error = json.loads(line)
        if error:
            raise StorageError(error)
        return value

    def give_up(self, limit_s: float) -> str:
        """Kills the keeper, and lets no thread wait for it; returns its name if SIGKILL does not end it."""
        self._why = f"{self.place!r} has not answered for {limit_s:g} s"
        if self._near is not None:
            with contextlib.suppress(OSError):
                self._near.shutdown(socket.SHUT_RDWR)
        if self._child is None:
            return ""
        self._child.signal(signal.SIGKILL)
        return f"{self._child.name} (pid {self._child.pid})" if self._child.wait(_GONE_S) is None else ""

    def close(self) -> None:
        """Ends the keeper, which releases its claims, unless it was given up."""
        if self._near is not None:
            self._near.close()
        if self._child is not None:
            self._child.wait(0.0 if self._why else _LEAVE_S)
            self._child.close(0.0)
        self._near = self._child = None

    def _answer(self, question: bytes, limit_s: float | None) -> bytes:
        if (near := self._near) is None:
            return b""
        answer = b""
        try:
            near.settimeout(limit_s)
            near.sendall(question)
            while not answer.endswith(b"\n") and (more := near.recv(1 << 16)):
                answer += more
        except TimeoutError:
            self.give_up(limit_s or 0.0)
        except OSError:  # it has ended, or was given up
            return b""
        return answer


def keeper_for(server: ForkServer, job: Job, folder: str, heir: str) -> Keeper:
    """Returns the keeper of a run whose processes a server starts; a run in one process has a thread instead."""
    start: StartKeeper = partial(fork_keeper, server)
    if server.host:  # the one that coordinates several hosts starts workers only, on each of them through its agent
        start = start_program
    elif server.pid == os.getpid():
        start = start_thread
    return Keeper(start, job, folder, heir)


def start_program(fd: int) -> Child:
    """Starts a keeper as a program of its own, which ends with this process."""
    command = subprocesses.module("engine.runtime.process.exec_with_parent", str(os.getpid()), sys.executable)
    command += subprocesses.module(disk_work.__name__, str(fd))[1:]
    program = subprocesses.start(command, fd=fd, log=subprocess.DEVNULL)
    program.returncode = 0  # the child reaps it
    return Child(_NAME, program.pid, os.pidfd_open(program.pid))


def start_thread(fd: int) -> None:
    """Starts a keeper as a thread of this process, which no limit can end."""
    threading.Thread(target=disk_work.main, args=(os.dup(fd),), name="keeper", daemon=True).start()


NO_KEEPER = Keeper(start_thread, Job(), "")  # of a run that keeps no checkpoints


def fork_keeper(server: ForkServer, fd: int) -> Child:
    """Starts a keeper as a process, which the launcher can give up."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    try:
        return server.fork("keeper", _NAME, quiet, [fd])
    finally:
        os.close(quiet)


def _line(plain: Any) -> bytes:
    return json.dumps(plain).encode() + b"\n"
