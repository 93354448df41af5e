"""The launcher's end of its keeper, the process that works on the disk of checkpoints (`disk_work.py`).

One line of JSON asks, one answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.checkpoint_rules import keeps_any
from engine.core.errors import StorageError, required
from engine.core.job.job import Job
from engine.files.atomic_write import closing_fd
from engine.files.checkpoint_storage import is_url
from engine.files.run_folder import CHECKPOINTS_FOLDER
from engine.runtime.agent import disk_work
from engine.runtime.agent.orders import HelperProcess, StartAway, line, threaded
from engine.runtime.process import subprocesses
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.spawner import Spawner

_NAME = "bamboo-keeper"


def place_of(job: Job, run: str) -> str:
    """Returns the absolute path or the URL of a job's checkpoints, by default in folder `run`; empty for none."""
    if not run or not keeps_any(job.checkpoint_every):
        return ""
    if is_url(job.checkpoints):
        return job.checkpoints
    return str(Path(job.checkpoints or Path(run, CHECKPOINTS_FOLDER)).absolute())


class Keeper(HelperProcess):
    """The keeper of the checkpoints of a run in `folder`, as a context; `start` starts it with a descriptor.

    `heir` names the folder with which another host continues. The main thread starts it; any thread asks, one at a
    time.
    """

    def __init__(self, start: StartAway, job: Job, folder: str, heir: str = ""):
        super().__init__(start)
        self.job, self.place, self.run = job, place_of(job, folder), Path(folder).absolute().name
        self.number = 0  # of keepers that were started
        self._first_line = (asdict(job), self.place, self.run, heir)
        self._asking = threading.Lock()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Starts a keeper if there is none, or if the last one has ended or was given up; raises BambooError."""
        has_ended = self._child is not None and self._child.wait() is not None
        if self.near is not None and not has_ended and not self.why:
            return
        self.close()
        with self._asking:  # no question may come before the first line
            super().begin()
            self.number += 1
            required(self.near, "a keeper has begun").sendall(line([*self._first_line, self.number]))

    def ask(self, name: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Returns the answer of a function of `disk_work.WORK` in `limit_s`, else is given up; raises StorageError."""
        with self._asking:
            answer = self.exchange(line([name, *arguments]), self.place, limit_s)
        if not answer.endswith(b"\n"):
            raise StorageError(self.why or "the process that writes the manifests has ended")
        value, error = json.loads(answer)
        if error:
            raise StorageError(error)
        return value

    def stop_waiting(self, limit_s: float) -> str:
        """Gives the keeper up, which has not answered within the limit; returns its name if it is left behind."""
        return self.give_up(f"{self.place!r} has not answered for {limit_s:g} s")


def keeper_for(server: Spawner, job: Job, folder: str, heir: str) -> Keeper:
    """Returns the keeper of a run whose processes a server starts; a run in one process has a thread instead."""
    start: StartAway = start_thread
    if isinstance(server, ForkServer) and not server.host:
        start = partial(fork_keeper, server)
    elif server.pid != os.getpid():  # the one that coordinates several hosts starts workers only
        start = start_program
    return Keeper(start, job, folder, heir)


def start_program(fd: int) -> Child:
    """Starts a keeper as a program of its own, which ends with this process."""
    command = subprocesses.module("engine.runtime.process.exec_with_parent", str(os.getpid()), sys.executable)
    command += subprocesses.module(disk_work.__name__, str(fd))[1:]
    program = subprocesses.start(command, fd=fd, log=subprocess.DEVNULL)
    program.returncode = 0  # the child reaps it
    return Child(_NAME, program.pid, os.pidfd_open(program.pid))


start_thread = threaded("keeper", disk_work.main)  # of a run in one process
NO_KEEPER = Keeper(start_thread, Job(), "")  # of a run that keeps no checkpoints


def fork_keeper(server: ForkServer, fd: int) -> Child:
    """Starts a keeper as a process, which the launcher can give up."""
    with closing_fd(os.open(os.devnull, os.O_WRONLY)) as quiet:
        return server.fork("keeper", _NAME, quiet, [fd])
