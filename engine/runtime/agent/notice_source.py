"""The notice source: asks a command or a URL for a notice, in a thread of its own; the agent takes the answers.

A worker that is named gets SIGTERM, as from a cloud. A notice for all workers of the host is one for the launcher: no
other host could take over, so the run ends as after SIGTERM, with the last commit kept.

Rules: the command is no shell's, and it and its children end with each answer. A URL is asked without a proxy; no
redirection is followed, because a metadata address answers itself. Neither may take long.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import OK
from typing import Any, Protocol
from urllib.error import HTTPError

from engine.core.agent.notice_answer import MOST_BYTES, NoticeAnswer, NoticeFrom, answer_of
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.subprocesses import is_readable, module, start

_COMMAND_S, _URL_S, _LOOK_S = 5.0, 1.0, 0.1
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # two clouds answer to requests with theirs only


class Noticed(Protocol):
    """The agent, as its notice source sees it."""

    @property
    def members(self) -> Mapping[int, WorkerHandle]:
        """The workers of this host."""

    @property
    def node(self) -> Any:
        """The host's place in the job."""

    @property
    def run_state(self) -> Any:
        """The lines for the user."""

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends now."""


class NoticeSource:
    """One command or URL, and its answers that were not taken."""

    def __init__(self, wanted: NoticeFrom):
        self.wanted = wanted
        self._ended = threading.Event()
        self._answers: queue.SimpleQueue[NoticeAnswer | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._told = ""  # the last failure
        self._given: set[int] = set()
        self._is_over = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Asks inside the block; at its end no program is left."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(_URL_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                said = _over_http(self.wanted.url) if self.wanted.url else self._of_command(self.wanted.command)
                answer = answer_of(said)
                if answer is not None:
                    self._answers.put(answer)
            except (OSError, ValueError) as error:
                self._fails(f"{self.wanted.name} cannot be asked: {error}")
            self._ended.wait(self.wanted.every_s)

    def _fails(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._answers.put(text)

    def _of_command(self, command: Sequence[str]) -> bytes:
        """Returns the output of the command; nothing if it fails or takes too long."""
        program = shutil.which(command[0]) or command[0]
        guarded = [*module("engine.runtime.process.exec_with_parent", str(os.getpid())), program, *command[1:]]
        with tempfile.TemporaryFile() as printed:
            process = start(guarded, log=subprocess.DEVNULL, out=printed)
            try:
                self._await_end(process.pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too; it is not reaped yet
                code = process.wait()
            printed.seek(0)
            return printed.read(MOST_BYTES) if code == 0 else b""

    def _await_end(self, pid: int) -> None:
        pidfd, until_s = os.pidfd_open(pid), time.monotonic() + _COMMAND_S
        try:
            while not self._ended.is_set() and time.monotonic() < until_s and not is_readable(pidfd, _LOOK_S):
                pass
        finally:
            os.close(pidfd)

    def look(self, agent: Noticed) -> None:
        """Passes on the answers that have come, in the thread of the agent."""
        while not self._answers.empty():
            found = self._answers.get()
            if isinstance(found, str):
                agent.run_state.note(found)
            elif not agent.is_stopping:
                self._tell(agent, found)

    def _tell(self, agent: Noticed, notice: NoticeAnswer) -> None:
        members = set(agent.node.state.members)
        named = members if notice.workers is None else members.intersection(notice.workers)
        if not members <= named | self._given:
            for worker in sorted(named - self._given):
                self._given.add(worker)
                agent.members[worker].child.signal(signal.SIGTERM)
        elif not self._is_over:
            self._is_over = True
            agent.run_state.note(
                f"{self.wanted.name}: a notice for all workers, which no other host takes over: the run ends"
            )
            signal.raise_signal(signal.SIGTERM)


def asked_for(stack: contextlib.ExitStack, wanted: NoticeFrom | None) -> NoticeSource | None:
    """Returns the source of a run, which is asked until the stack ends; None if the user names none."""
    if wanted is None:
        return None
    source = NoticeSource(wanted)
    stack.enter_context(source.asking())
    return source


def _over_http(url: str) -> bytes:
    """Returns the answer of a URL; nothing for a status above 299."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection)
    request = urllib.request.Request(url, headers=_HEADERS)  # noqa: S310 - its scheme was checked
    try:
        with opener.open(request, timeout=_URL_S) as response:
            found: bytes = response.read(MOST_BYTES) if response.status == OK else b""
            return found
    except HTTPError as error:
        error.close()
        return b""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it is an error like any other status."""

    def redirect_request(self, *words: Any) -> None:
        """Returns no request."""
