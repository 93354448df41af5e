"""Starts `bamboo` as a user would, and finds all its processes, sockets and files, also after their parent is gone.

Every process of a launch inherits a unique variable of the environment. It tells the process from those of other runs
on the same machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from engine.codec.records import decoded
from engine.core.history.evidence import unlinked
from engine.files.events_file import read_history
from engine.files.evidence import proof_of
from engine.files.run_folder import RunFolder
from tests.e2e.recorded import events_of
from tests.e2e.warm_start import start

ROOT = Path(__file__).parents[2]
_POLL_S = 0.02
_GONE_WITHIN_S = 5.0  # an idle machine needs far less; a busy one ends processes slowly
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a launch; `code` is the exit code, negative for a signal."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket of a launch; its inode tells it from a later socket with the same port."""

    process: str
    address: str
    port: int


class Launcher:
    """One launch of `bamboo` with arguments, in its own folder and environment; `files` (name, text) lie there.

    With `on_terminal` it is the foreground process group of a terminal of its own, which is its stdin and stderr.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_terminal: bool = False,
        files: Mapping[str, str] = MappingProxyType({}),
    ):
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._mark = uuid.uuid4().hex
        self._shared_memory = _shared_memory()
        self._known: dict[Path, tuple[int, list[dict[str, Any]]]] = {}  # events file -> bytes read, events
        own = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LAUNCH": self._mark,
        }
        for name, text in files.items():
            (folder / name).write_text(text)
        self._terminal, far = os.openpty() if on_terminal else (-1, -1)
        everything = {**own, **environment, **({"TERM": "xterm"} if on_terminal else {})}
        stdin = far if on_terminal else os.open(os.devnull, os.O_RDONLY)
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            streams = (stdin, stdout.fileno(), far if on_terminal else stderr.fileno())
            self.process = start(arguments, folder, everything, streams, on_terminal=on_terminal)
        os.close(stdin)
        if on_terminal:
            os.set_blocking(self._terminal, False)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Sends a signal to the launcher alone; on a terminal presses Ctrl-C, which reaches the whole group."""
        if self._terminal < 0:
            self.process.send_signal(number)
        else:
            os.write(self._terminal, b"\x03")

    def stderr(self) -> str:
        """Returns the output to stderr so far; also of a terminal, which would else block the launcher."""
        if self._terminal >= 0:
            with (self.folder / "stderr").open("ab") as file, contextlib.suppress(OSError):  # none yet, or closed
                while part := os.read(self._terminal, 65536):
                    file.write(part)
        return (self.folder / "stderr").read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0) -> Done:
        """Waits for the end of the launcher itself."""
        code = self.process.wait(timeout_s)
        return Done(code, (self.folder / "stdout").read_text(), self.stderr())

    def processes(self) -> dict[str, int]:
        """Returns the live processes of this launch: name -> pid; the launcher's own name is ``launcher``."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.owns(pid := int(entry.name)):
                    name = "launcher" if pid == self.process.pid else (entry / "comm").read_text().strip()
                    found[name if name.startswith(("bamboo-", "launcher")) else f"{name}-{pid}"] = pid
        return found

    def owns(self, pid: int) -> bool:
        """Returns whether a live process belongs to this launch."""
        try:
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def listeners(self) -> set[Listener]:
        """Returns the sockets that this launch's processes listen on."""
        found = set()
        for name, pid in self.processes().items():
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(pid).net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        found.add(Listener(name, each.laddr.ip, each.laddr.port))
        return found

    @property
    def run_folder(self) -> Path:
        """The folder of the run, by the link to the newest."""
        return self.folder / "results" / "latest"

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Returns the events so far, of one kind or all but actions; a half-written line is left out.

        Tests that wait ask often, so each call reads only the new bytes.
        """
        path = (self.run_folder / "events.jsonl").resolve()
        if kind == "action":
            return [event for event in events_of(path) if event["event"] == kind] if path.exists() else []
        start, known = self._known.get(path, (0, []))
        try:
            with path.open("rb") as file:
                file.seek(start)
                lines, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        for line in lines.splitlines():
            text, _ = unlinked(line.decode())
            decoded(text)
            known.append(json.loads(text))
        self._known[path] = start + len(lines) + len(end), known
        return [event for event in known if kind in ("", event["event"])]

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 100.0) -> None:
        """Waits for a condition; fails if the launcher ends before."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.wait()}"
            assert time.monotonic() < deadline_s, f"still waiting after {timeout_s} s"
            if self._terminal >= 0:
                self.stderr()
            time.sleep(_POLL_S)

    def leftovers(self) -> list[str]:
        """Returns the leftovers after the end: processes, shared memory, temporary files, files of private stores."""
        deadline_s = time.monotonic() + _GONE_WITHIN_S
        while found := [
            *map(str, self.processes().items()),
            *map(str, _shared_memory() - self._shared_memory),
            *map(str, self.temporary.iterdir()),
            *_private_stores(self.folder / "results"),
        ]:
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return found + self.flaws()

    def flaws(self) -> list[str]:
        """Returns the flaws in the evidence of the newest run: an unharmed one has none, however it went."""
        folder = RunFolder(self.run_folder.resolve())
        return [*map(str, proof_of(folder, read_history(folder.events)).flaws)] if folder.events.exists() else []

    def kill_all(self) -> None:
        """Kills every remaining process of this launch."""
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1


def _private_stores(results: Path) -> list[str]:
    """Returns the folders of private stores; a walk bears folders that are deleted meanwhile, other searches do not."""
    return [f"{folder}/etcd" for folder, inner, _ in os.walk(results) if folder.endswith("/logs") and "etcd" in inner]


def _shared_memory() -> set[Path]:
    """Returns all pieces but named semaphores: other programs of the host make them, bamboo makes none."""
    return {each for each in _SHARED_MEMORY.iterdir() if not each.name.startswith("sem.")}


def on_a_terminal(folder: Path, *arguments: str) -> str:
    """Runs `bamboo` with a terminal for its stderr, in `folder`; returns its output. The exit code must be 0."""
    near, far = os.openpty()
    command = [sys.executable, "-m", "bamboo_cli", *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    size = {"COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        command, cwd=folder, env=environment | size, stdin=far, stdout=subprocess.PIPE, stderr=far
    ) as process:
        os.close(far)
        shown = b""
        with contextlib.suppress(OSError):  # the sign of a closed terminal
            while part := os.read(near, 65536):
                shown += part
        os.close(near)
        assert process.wait(30) == 0
    return shown.decode()
