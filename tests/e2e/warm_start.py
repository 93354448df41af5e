"""Starts `bamboo` without its imports: each start is a fork of one process that has imported torch and bamboo already.

    test process -> template -> launcher -> fork server -> workers

A launcher that is forked is what a started one is after its imports: a process in a session of its own, with its
arguments, folder, environment (also the one that /proc shows), streams and signals, and the limits of the test process.
Its fork server is forked beside it before there is any thread, and takes the place of the first one that the launcher
would start; a second one is started as always. So a launch costs a third of the processor time, and the suite has
hundreds.

Not for tests of what is imported, or of variables that are read before: those start `bamboo` as a user does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
_ROOM = 32768  # bytes for the environment that /proc shows of a fork
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)  # that tests set around a start
_FORK_SERVER = "engine.runtime.process.forkserver"
# What the fork server of a launcher has, and what torch, numpy or Python read only once.
_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(ROOT),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "ATEN_", "ONEDNN_", "KMP_", "OPENBLAS_", "CUDA_", "GRPC_", "TZ")


def fits(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a fork would do the same as a start of its own."""
    own = {name: value for name, value in environment.items() if _ENVIRONMENT.get(name) != value}
    return "--isa" not in arguments and not any(name.startswith(_READ_ONCE) for name in own)


class WarmProcess:
    """A forked launcher, with the interface of `subprocess.Popen` as far as tests use it."""

    def __init__(self, template: _Template, pid: int, pidfd: int):
        self.pid = pid
        self.returncode: Any = None  # as `Popen` has it: None until the end is noticed
        self._template = template
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None if it has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code, negative for a signal; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("bamboo", timeout or 0.0)
            self.returncode = self._template.code_of(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it has not ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Template:
    """The process that is forked, as the test process sees it."""

    def __init__(self) -> None:
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.e2e.warm_start", str(far.fileno())],
            env=_ENVIRONMENT | {"ROOM": " " * _ROOM},
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._link.close()
        self._process.wait()

    def fork(self, launch: Mapping[str, Any], streams: Sequence[int]) -> WarmProcess:
        """Forks a launcher, whose descriptors 0, 1 and 2 are `streams`."""
        with self._lock:
            socket.send_fds(self._link, [json.dumps(launch).encode()], list(streams))
            answer, (pidfd,), *_ = socket.recv_fds(self._link, 64, 1)
        return WarmProcess(self, int(answer), pidfd)

    def code_of(self, pid: int) -> int:
        """Returns the exit code of a launcher that has ended."""
        with self._lock:
            self._link.send(json.dumps(pid).encode())
            return int(self._link.recv(64))


@functools.cache
def _template() -> _Template:
    return _Template()


def start(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    streams: Sequence[int],
    *,
    on_terminal: bool = False,
) -> WarmProcess | subprocess.Popen[bytes]:
    """Starts ``bamboo ARGUMENTS`` in `folder`, as a fork where that is the same.

    Its descriptors 0, 1 and 2 are `streams`; with `on_terminal` the first is its terminal.
    """
    if fits(arguments, environment):
        launch = {"arguments": [*arguments], "folder": str(folder), "environment": {**environment}}
        limits = {number: resource.getrlimit(number) for number in _LIMITS}
        return _template().fork({**launch, "terminal": on_terminal, "limits": limits}, streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [sys.executable, "-m", "bamboo_cli", *arguments],
        cwd=folder,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_control_terminal if on_terminal else None,  # noqa: PLW1509 - this process has one thread
    )


def _control_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# In the template.


def main(link: socket.socket) -> None:
    """Forks launchers on request, until the test process has ended."""
    import engine.runtime.agent.session
    import engine.runtime.worker.worker  # noqa: F401 - and all that the workers of a launch need

    gc.collect()
    gc.freeze()
    while (packet := socket.recv_fds(link, 1 << 20, 3))[0]:
        asked = json.loads(packet[0])
        if isinstance(asked, int):
            link.send(str(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])).encode())
            continue
        if (pid := os.fork()) == 0:
            link.close()
            _launch(asked, packet[1])
        for fd in packet[1]:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(link, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _launch(launch: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Becomes the launcher."""
    os.setsid()
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
    os.closerange(3, max(streams) + 1)
    if launch["terminal"]:
        _control_terminal()
    for number, limits in launch["limits"].items():
        resource.setrlimit(int(number), limits)
    os.chdir(launch["folder"])
    _replace_environment(launch["environment"])
    _replace_streams()
    sys.path.insert(0, launch["folder"])  # as `python -m` does
    sys.argv = [str(ROOT / "bamboo_cli" / "__main__.py"), *launch["arguments"]]
    from engine.runtime.process import subprocesses

    server = _ReadyServer(subprocesses.start)
    subprocesses.start = server
    code: object = 1
    try:
        runpy.run_module("bamboo_cli", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    server.end()
    os._exit(code if isinstance(code, int) else code is not None)


class _ReadyServer:
    """Starts programs as `subprocesses.start` does, but for the first fork server, which waits beside the launcher."""

    def __init__(self, start: Any):
        self._start = start
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._link.close()
            _serve(far, launcher)
        far.close()

    def __call__(self, command: Sequence[str], *, fd: int | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Returns the waiting server if the command is that of one; else starts the command."""
        if _FORK_SERVER not in command or not self._pid or fd is None:
            return self._start(command, fd=fd, **options)
        from engine.runtime.process.subprocesses import inherited

        given = {"environment": dict(options.get("environment") or inherited()), "arguments": [*command[-2:]]}
        socket.send_fds(self._link, [json.dumps(given).encode()], [fd])
        self._link.close()
        process = _Adopted(self._pid, command)
        self._pid = 0
        return process

    def end(self) -> None:
        """Ends the server that was not wanted: nothing may be left when the launcher has ended."""
        if self._pid:
            self._link.close()
            with contextlib.suppress(ChildProcessError):  # reaped with the processes of another job
                os.waitpid(self._pid, 0)


class _Adopted(subprocess.Popen[bytes]):
    """A child of this process that was not started by `subprocess`."""

    def __init__(self, pid: int, command: Sequence[str]):
        self.pid, self.args, self.returncode = pid, command, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._communication_started = False
        self._input = None
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25


def _serve(link: socket.socket, launcher: int) -> NoReturn:
    """Becomes the fork server when the launcher wants one."""
    from engine.runtime.process.prctl import die_with_parent

    die_with_parent(launcher)
    os.setsid()  # before it is wanted: a Ctrl-C of the launcher's terminal is not for it
    packet, fds, *_ = socket.recv_fds(link, 1 << 20, 1)
    if not packet:
        os._exit(0)
    link.close()
    given = json.loads(packet)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    _replace_environment(given["environment"])
    sys.path.pop(0)  # as -P does
    sys.argv = [_FORK_SERVER, str(fds[0]), given["arguments"][1]]
    from engine.runtime.process import forkserver

    try:
        forkserver.main()
    finally:
        os._exit(1)


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Replaces the environment, also where /proc shows it: in the memory that this process was started with."""
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    assert len(shown) < end - begin, "the environment of a launch has no room"
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _replace_streams() -> None:
    """Makes the streams anew: whether a stream is a terminal, Python asks when it makes it."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(fd, "w", closefd=False)
        errors, lines = ("backslashreplace", True) if fd == 2 else ("strict", os.isatty(fd))
        stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
