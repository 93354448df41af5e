"""The notice source: asks a command or a URL for a notice, in a thread of its own; the agent takes the answers.

A worker that is named gets SIGTERM, as from a cloud. A notice for all workers of the host is one for the launcher: no
other host could take over, so the run ends as after SIGTERM, with the last commit kept.

Rules: the command is no shell's, and it and its children end with each answer. A URL is asked without a proxy; no
redirection is followed, because a metadata address answers itself. Neither may take long or say much. A question that
cannot be answered so is told once: who believes to be warned must know.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import NO_CONTENT, NOT_FOUND, OK
from typing import Any, Protocol
from urllib.error import HTTPError

from engine.core.hosts.notice_answer import MOST_BYTES, NoticeAnswer, NoticeFrom, answer_of
from engine.core.protocol.rebalancing import can_wait_for_joiners
from engine.core.texts import numbered
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.process.subprocesses import is_readable, module, start

_COMMAND_S, _URL_S, _LOOK_S = 5.0, 1.0, 0.1
_MOST_LINES = 10  # of a source that errs in another way each time
_SILENT = (OK, NO_CONTENT, NOT_FOUND)  # statuses by which a metadata address says that no end is near
_TOKEN, _TOKEN_LASTS = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # two clouds answer to requests with theirs only


class NoticeTarget(Protocol):
    """The agent, as its notice source sees it."""

    @property
    def members(self) -> Mapping[int, WorkerHandle]:
        """The workers of this host."""

    @property
    def node(self) -> Any:
        """The host's place in the job."""

    @property
    def grace_ns(self) -> int:
        """The time that a worker has to leave."""

    @property
    def run_state(self) -> Any:
        """The lines for the user."""

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends now."""


class NoticeSource:
    """One command or URL, and its answers that were not taken."""

    def __init__(self, source: NoticeFrom):
        self.source = source
        self._ended = threading.Event()
        self._answers: queue.SimpleQueue[NoticeAnswer | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._lines: set[str] = set()  # lines for the user
        self._notified: set[int] = set()  # process ids
        self._is_over = False
        self._machine = ""  # its name, once it is known

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
                data = self._of_url() if self.source.url else self._of_command(self.source.command)
                answer = answer_of(data, self._machine)
                if answer is not None:
                    self._answers.put(answer)
            except (OSError, ValueError) as error:
                self._says(f"cannot poll {self.source.name}: {error}")
            self._ended.wait(self.source.every_s)

    def _says(self, text: str) -> None:
        if text not in self._lines and len(self._lines) < _MOST_LINES:
            self._lines.add(text)
            self._answers.put(text)

    def _of_url(self) -> bytes:
        """Returns the answer of the address; asks for the name of this machine first, once."""
        if self.source.name_url and not self._machine:
            self._machine = _over_http(self.source.name_url).decode("utf-8", "replace").strip()
        return _over_http(self.source.url, self._token())

    def _token(self) -> str:
        """Returns a token for the address; empty where it wants none."""
        if not self.source.token_url:
            return ""
        with contextlib.suppress(OSError):  # an older service has no tokens, and the address itself answers then
            return _over_http(self.source.token_url, wants_token=True).decode("ascii", "replace").strip()
        return ""

    def _of_command(self, command: Sequence[str]) -> bytes:
        """Returns the output of the command, nothing if it fails; raises OSError if it takes too long or says much."""
        program = shutil.which(command[0]) or command[0]
        guarded = [*module("engine.runtime.process.exec_with_parent", str(os.getpid())), program, *command[1:]]
        reads, writes = os.pipe()
        try:
            os.set_blocking(reads, False)
            try:
                process = start(guarded, log=subprocess.DEVNULL, out=writes)
            finally:
                os.close(writes)
            try:
                output = self._printed(process.pid, reads)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too; it is not reaped yet
                code = process.wait()
            return output if code == 0 else b""
        finally:
            os.close(reads)

    def _printed(self, pid: int, reads: int) -> bytes:
        """Returns what a command prints until it ends; a child of it that keeps the pipe open does not count."""
        pidfd, until_s, output, has_ended = os.pidfd_open(pid), time.monotonic() + _COMMAND_S, b"", False
        try:
            while not (has_ended or self._ended.is_set()):
                has_ended = is_readable(pidfd, _LOOK_S)
                with contextlib.suppress(BlockingIOError):
                    while len(output) <= MOST_BYTES and (part := os.read(reads, MOST_BYTES)):
                        output += part
                if len(output) > MOST_BYTES:
                    raise OSError(f"it prints more than {MOST_BYTES // 1024} KiB")
                if not has_ended and time.monotonic() > until_s:
                    raise OSError(f"it took longer than {_COMMAND_S:g} s and was killed")
        finally:
            os.close(pidfd)
        return output

    def look(self, agent: NoticeTarget) -> None:
        """Passes on the answers that have come, in the thread of the agent."""
        while not self._answers.empty():
            answer = self._answers.get()
            if isinstance(answer, str):
                agent.run_state.note(answer)
            elif not agent.is_stopping:
                self._tell(agent, answer)

    def _tell(self, agent: NoticeTarget, notice: NoticeAnswer) -> None:
        """Passes a notice on to the workers that it names, once per process; if it names all, the run may end."""
        state = agent.node.state
        members, waiting = set(state.members), set(state.able_to_join)
        here = {worker: each.child for worker, each in agent.members.items() if each.exit_code is None}
        notified = {worker for worker, child in here.items() if child.pid in self._notified}
        named = members | waiting if notice.workers is None else {*notice.workers}
        new, others = named & {*here} - notified, waiting - named - notified
        take_over = others and (not new or can_wait_for_joiners(state, agent.grace_ns))
        if not members <= named | notified or take_over:
            for worker in sorted(new):
                self._notified.add(here[worker].pid)
                here[worker].signal(signal.SIGTERM)
            if absent := sorted(named - {*here} - {*agent.members}):
                self._says(f"{self.source.name}: a notice for {numbered('worker', absent)}, but no such worker is here")
        elif not self._is_over:
            self._is_over = True
            why = f"{agent.grace_ns / 1e9:g} s are not enough for {numbered('worker', sorted(others))}, which waits"
            why = why if others else "which no other host takes over"
            agent.run_state.note(f"{self.source.name}: a notice for all workers, {why}: the run ends")
            signal.raise_signal(signal.SIGTERM)


def asked_for(stack: contextlib.ExitStack, wanted: NoticeFrom | None) -> NoticeSource | None:
    """Returns the source of a run, which is asked until the stack ends; None if the user names none."""
    if wanted is None:
        return None
    source = NoticeSource(wanted)
    stack.enter_context(source.asking())
    return source


def _over_http(url: str, token: str = "", *, wants_token: bool = False) -> bytes:
    """Returns the answer of a URL; nothing for another status than 200. Raises OSError for one that says nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection)
    headers = _HEADERS | ({_TOKEN: token} if token else {}) | ({_TOKEN_LASTS: "60"} if wants_token else {})
    method = "PUT" if wants_token else "GET"
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - its scheme was checked
    try:
        with opener.open(request, timeout=_URL_S) as response:
            content: bytes = response.read(MOST_BYTES) if response.status == OK else b""
            return content
    except HTTPError as error:
        error.close()
        if error.code not in _SILENT:
            raise OSError(f"it answered {error.code} {error.reason}, which is not a notice") from None
        return b""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it is an error like any other status."""

    def redirect_request(self, *words: Any) -> None:
        """Returns no request."""
