"""The programs that this process starts: their start in a session of their own, and their end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from engine.core.errors import BambooError
from engine.runtime.process import descendants
from engine.runtime.process.interrupts import ctrl_c_held

_GRACE_S = 1.0  # from an answer to the end of the program that gives it
_ROOT = str(Path(__file__).parents[3])
_OF_LAUNCHER = "BAMBOO_ETCD"  # the variables that begin so name the launcher's store, its user and the password


def inherited() -> dict[str, str]:
    """Returns the environment of a child: that of this process, without the password of the store and what is with it.

    Every process of a user can read it in /proc, and no child of the launcher asks the store. In a tree that is not
    installed it leads to bamboo's modules, which `-P` would not find.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHER)}
    return environment if _ROOT in sys.path[1:] else environment | {"PYTHONPATH": python_path()}


def python_path() -> str:
    """Returns PYTHONPATH with the folder of bamboo's modules in front of what the environment has."""
    there = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return os.pathsep.join(there if _ROOT in there else [_ROOT, *there])


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of bamboo's modules; a file of the current folder replaces no module of it."""
    return [sys.executable, "-P", "-m", name, *arguments]


def start(
    command: Sequence[str],
    *,
    fd: int | None = None,
    log: IO[bytes] | int | None = None,
    out: IO[bytes] | int | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program that inherits `fd`, without standard input; a Ctrl-C of the terminal does not reach it.

    It prints to `log`, its standard output to `out` if that is given.
    """
    with ctrl_c_held():
        return subprocess.Popen(
            command,
            pass_fds=() if fd is None else (fd,),
            cwd=folder,
            env=inherited() if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=log if out is None else out,
            stderr=log,
            start_new_session=True,
        )


def start_sweeper(mark: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the process that ends all processes with a mark after SIGKILL of this process.

    Returns it with the descriptor whose end it waits for.
    """
    ended_fd, alive_fd = os.pipe()
    command = [sys.executable, "-I", "-S", descendants.__file__, str(ended_fd), mark]
    # It has no other variable: it is no process of a run, and its environment has no mark.
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    sweeper = start(command, fd=ended_fd, log=subprocess.DEVNULL, environment=environment)
    os.close(ended_fd)
    return sweeper, alive_fd


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Waits for the end of a program, and kills it after `grace_s`; returns its exit code, negative for a signal."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # SIGKILL does not end an uninterruptible process
        process.wait(grace_s)
    return -signal.SIGKILL


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Returns whether `fd` becomes readable within `timeout_s`; a pidfd is readable if its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def ask(module_name: str, question: Any) -> Any:
    """Returns the answer of a module to a question, both JSON; raises BambooError if it ends without one.

    It runs as a program of its own, which may import torch and a user's code; its argument is the descriptor of a
    socket.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = module("engine.runtime.process.exec_with_parent", str(os.getpid()), sys.executable)
        command += [*module(module_name, str(theirs.fileno()))[1:]]
        environment = {"PYTHONHASHSEED": "0"} | inherited()  # as in a worker
        program = start(command, fd=theirs.fileno(), log=subprocess.DEVNULL, environment=environment)
        theirs.close()
        try:
            ours.sendall(json.dumps(question).encode())
            ours.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: ours.recv(65536), b""))
        finally:
            code = end(program, _GRACE_S)
    if not answer:
        raise BambooError(f"{module_name} ended with code {code}, without an answer")
    return json.loads(answer)


# The standard output and error of a worker: text that a full disk does not take is lost, and no layer fails for it.
class _Lossy(io.FileIO):
    def write(self, data: Any) -> int:
        """Writes all of the data, and drops the part that the file does not take."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += super().write(view[written:]) or 0
        except OSError:
            pass
        return len(view)


def log_stream(fd: int) -> TextIO:
    """Returns a stream on a descriptor that writes each line at once: a line of a killed worker must not be lost."""
    raw = io.BufferedWriter(_Lossy(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
