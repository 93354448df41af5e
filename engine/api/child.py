"""The child process of a run: `bamboo run` with the keywords of a call, its output, and its end.

Rules: the standard input of the child is open while this process lives, so that the run ends with it, also after
SIGKILL. A Ctrl-C of the terminal reaches this process only, which then asks the child to end. Lines for people come on
its stderr and are printed here, unless they are not wanted; a program's words come on its stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from engine.core.errors import BambooError, Problem, UserError, required
from engine.core.texts import printable
from engine.runtime.process import subprocesses

WITHIN = "_BAMBOO_TRAINS"  # in the environment of a run that was started so; BAMBOO_* are fields of a job
_ERROR = b"bamboo: "  # begins a line that the exception in this process tells too
_END_S = 20.0  # from the second request to end until SIGKILL


class RunChild:
    """A run in a process of its own; `options` are those of `bamboo run`, and `keywords` have values of fields."""

    def __init__(
        self, options: Sequence[str], keywords: Mapping[str, Any], folders: Iterable[str] = (), *, quiet: bool = False
    ):
        request = _request(keywords)
        command = subprocesses.module("bamboo_cli", "run", *options, "--json", "--keywords")
        self._quiet = quiet
        self._words: list[dict[str, Any]] = []  # the objects on its stdout
        self._has_word = threading.Event()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(folders),
            start_new_session=True,
        )
        self._input = required(self._process.stdin, "a pipe")  # kept open
        with contextlib.suppress(BrokenPipeError):  # then its end tells why
            self._input.write(request)
            self._input.flush()
        readers = ((self._process.stdout, self._hear), (self._process.stderr, self._show))
        self._threads = [threading.Thread(target=read, args=(stream,), daemon=True) for stream, read in readers]
        for each in self._threads:
            each.start()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def folder(self) -> Path:
        """Waits until the run has a folder, and returns it; raises the error of a run that does not start."""
        self._wait_for_word()
        if "outcome" in self._words[0]:
            raise _error(self.word())
        return Path(self._words[0]["run_dir"]).resolve()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the process has ended, at most `timeout_s`; returns whether it has."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close()
        return True

    def word(self) -> dict[str, Any]:
        """Waits for the end, and returns the last object that the command has printed; raises BambooError without."""
        self._process.wait()
        self._close()
        if not self._words or "outcome" not in self._words[-1]:
            raise BambooError(f"the run ended without a word, with exit code {self._process.returncode}")
        return self._words[-1]

    def stop(self) -> None:
        """Asks the run to end as by Ctrl-C, which finishes the open step; kills what is left after a while."""
        if self.is_over:
            return
        self._process.send_signal(signal.SIGINT)
        if not self.wait(_END_S):
            self.kill()

    def kill(self) -> None:
        """Ends the run at once; the kernel ends its workers."""
        self._process.kill()
        self.wait()

    def _wait_for_word(self) -> None:
        while not self._has_word.wait(0.1):
            if self.is_over:
                self._close()
                if not self._words:
                    self.word()

    def _close(self) -> None:
        for each in self._threads:
            each.join(1.0)
        with contextlib.suppress(OSError):
            self._input.close()

    def _hear(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a layer of the user's may print in this process
                    word = json.loads(line)
                    if isinstance(word, dict) and "run_dir" in word:
                        self._words.append(word)
                        self._has_word.set()

    def _show(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                if not self._quiet and not line.startswith(_ERROR):
                    with contextlib.suppress(OSError, ValueError):  # nothing reads the output any more
                        print(printable(line.decode(errors="replace")), end="", file=sys.stderr, flush=True)


def _error(word: Mapping[str, Any]) -> BambooError:
    from engine.api.errors_of_runs import error_of

    return error_of(word)


def _request(keywords: Mapping[str, Any]) -> bytes:
    problems = []
    for name, value in keywords.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            expected = "text, a number, true or false, or a mapping of these"
            problems.append(Problem(name, expected, type(value).__name__, "", "train()"))
    if problems:
        raise UserError(problems)
    return json.dumps(dict(keywords)).encode() + b"\n"


def _environment(folders: Iterable[str]) -> dict[str, str]:
    """Returns the environment of the child, in which Python finds the modules of the user's that it finds here."""
    paths = [*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {**os.environ, WITHIN: "1"}
    return {**found, "PYTHONPATH": os.pathsep.join(paths)} if paths else found


def print_program(options: Sequence[str], keywords: Mapping[str, Any], folders: Iterable[str] = ()) -> str:
    """Returns the output of `bamboo run --dry-run`, which starts no process of a run; raises its error."""
    command = subprocesses.module("bamboo_cli", "run", *options, "--dry-run", "--keywords")
    done = subprocess.run(
        command, input=_request(keywords), capture_output=True, env=_environment(folders), check=False
    )
    if done.returncode:
        lines = (line.removeprefix("bamboo: ") for line in done.stderr.decode(errors="replace").splitlines())
        raise _error({"exit_code": done.returncode, "error": "\n".join(lines)})
    return done.stdout.decode()
