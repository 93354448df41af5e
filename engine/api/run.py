"""The handle of a run started by a program.

Rules: it reads the records of the run, like reports, so both agree. The run ends with the process that has the handle.
A Ctrl-C during `wait` stops the run gracefully, and is raised again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from engine.core.errors import BambooError, NothingMatchedError, Problem, UserError, error_of_code, nearest, required
from engine.core.history.run_records import Record
from engine.core.texts import counted, printable
from engine.files.events_file import GrowingEvents, StepReader, read_history
from engine.files.run_folder import RunFolder
from engine.observers.loggers import Logger, StepDone
from engine.observers.observers import DRAIN_S, LoggerFeed
from engine.runtime.process import subprocesses

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from engine.core.history.run_history import RunHistory
    from engine.core.job.job import Job
    from engine.core.protocol.run_status import RunStatus
    from engine.files.jobs.scenario_file import LoadedScenario


# Callbacks of a program are called like loggers, in a thread of its process.
#
# Rules: the run is another process and never waits for a callback. An exception in a callback is reported once, on
# stderr, and ends only that callback.

Callback = Callable[[StepDone], object] | Logger

_POLL_S = 0.1
_HOOKS = ("start", "step", "recovery", "cover", "validation", "finish")


class _Steps:
    """A logger that calls a function with each committed step."""

    def __init__(self, function: Callable[[StepDone], object]):
        self.step = function


class Callbacks:
    """The callbacks of a run, each with its own place in the events."""

    def __init__(self, callbacks: Sequence[Callback], events: Path, is_over: Callable[[], bool]):
        self._is_over = is_over
        has_hooks = [any(callable(getattr(callback, name, None)) for name in _HOOKS) for callback in callbacks]
        loggers = [
            callback if is_logger else _Steps(callback)  # type: ignore[arg-type]
            for callback, is_logger in zip(callbacks, has_hooks, strict=True)
        ]
        self._following = [LoggerFeed(logger, events) for logger in loggers]
        self._thread = threading.Thread(target=self._follow, name="bamboo-callbacks", daemon=True)
        if self._following:
            self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits, `timeout_s` at most, until each callback has had the end of the run."""
        if self._following:
            self._thread.join(timeout_s)

    def _follow(self) -> None:
        left = self._following
        with contextlib.suppress(OSError):
            while left:
                is_last = self._is_over()
                left = [feed for feed in left if self._goes_on(feed)]
                if is_last:
                    return
                time.sleep(_POLL_S)

    def _goes_on(self, following: LoggerFeed) -> bool:
        try:
            following.read_on()
        except Exception:
            print("a callback raised, and is not called again:", file=sys.stderr)
            traceback.print_exc()
            return False
        return not following.is_over


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The end of a run, as `bamboo run --json` prints it: outcome, exit code, committed steps, last figures.

    `recoveries` has the figures of each recovery, `twin` the comparison with the twin of a run with kills, and `plain`
    all keys of the JSON.
    """

    folder: Path
    outcome: str
    exit_code: int
    error: str | None
    steps: int
    loss: float | None
    validation_loss: float | None
    validation_metric: float | None
    trajectory: str | None
    recoveries: tuple[Mapping[str, Any], ...] = ()
    twin: Mapping[str, Any] | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Returns the result in a line; a program reads the fields."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        recoveries = f", {counted(len(self.recoveries), 'recovery', 'recoveries')}" if self.recoveries else ""
        error = f", {self.error}" if self.error else ""
        return f"<TrainingResult {self.folder.name}: {self.outcome}, {self.steps} steps{loss}{recoveries}{error}>"


def result_of(folder: Path, word: Mapping[str, Any]) -> TrainingResult:
    """Returns the result from the last object printed by a command; a refusal has no figures."""
    return TrainingResult(
        folder=folder,
        outcome=str(word["outcome"]),
        exit_code=int(word["exit_code"]),
        error=word.get("error"),
        steps=int(word.get("steps") or 0),
        loss=word.get("loss_last"),
        validation_loss=word.get("validation_loss"),
        validation_metric=word.get("validation_metric"),
        trajectory=word.get("trajectory"),
        recoveries=tuple(word.get("recoveries") or ()),
        twin=word.get("twin"),
        plain=word,
    )


def error_of(word: Mapping[str, Any]) -> BambooError:
    """Returns the error in the last object printed by a command, with its exit code."""
    problems = word.get("problems") or ()
    if problems:
        return UserError(Problem(**problem) for problem in problems)
    code, text = int(word["exit_code"]), str(word["error"] or f"{word['outcome']}, exit code {word['exit_code']}")
    return error_of_code(code, text)


# The child process of a run: `bamboo run` with the keywords of a call.
#
# Rules: the child's stdin stays open while this process lives, so the run ends with it, even after SIGKILL. A Ctrl-C in
# the terminal reaches only this process, which then asks the child to end. Its stderr is for people and is printed
# here, unless quiet; its stdout is for programs.

WITHIN = "_BAMBOO_TRAINS"  # in the environment of a run started from a program; BAMBOO_* are fields of a job
_ERROR = b"bamboo: "  # the prefix of a line that the exception in this process repeats
_END_S = 20.0  # from the second request to end until SIGKILL


class RunChild:
    """A run in a process of its own; `options` are those of `bamboo run`, and `keywords` are values of fields."""

    def __init__(
        self,
        options: Sequence[str],
        keywords: Mapping[str, Any],
        folders: Iterable[str] = (),
        *,
        quiet: bool = False,
        command: str = "run",
    ):
        request = _request(keywords)
        words = subprocesses.module("bamboo_cli", command, *options, "--json", "--keywords")
        self._quiet = quiet
        self._words: list[dict[str, Any]] = []  # the objects on its stdout
        self._has_word = threading.Event()
        self._process = subprocess.Popen(
            words,
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
        for thread in self._threads:
            thread.start()
        atexit.register(self._say_that_it_ends)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def folder(self) -> Path:
        """Waits until the run has a folder, and returns it; raises the error of a run that does not start."""
        while not self._has_word.wait(0.1):
            if self.is_over:
                self._close()
                if not self._words:
                    self.word()
        if "outcome" in self._words[0]:
            raise error_of(self.word())
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
        """Waits for the end, and returns the last object printed by the command; raises BambooError without one."""
        self._process.wait()
        self._close()
        if not self._words or "outcome" not in self._words[-1]:
            raise BambooError(f"the run ended without a message, with exit code {self._process.returncode}")
        return self._words[-1]

    def stop(self) -> None:
        """Asks the run to end, like Ctrl-C, which finishes the open step; kills it after a while."""
        if self.is_over:
            return
        self._process.send_signal(signal.SIGINT)
        if not self.wait(_END_S):
            self.kill()

    def kill(self) -> None:
        """Ends the run at once; the kernel ends its workers."""
        self._process.kill()
        self.wait()

    def _say_that_it_ends(self) -> None:
        if not self.is_over:
            text = "bamboo: this program ends, and its run with it; wait() on what train() returns lets it finish"
            print(text, file=sys.stderr, flush=True)

    def _close(self) -> None:
        atexit.unregister(self._say_that_it_ends)
        for thread in self._threads:
            thread.join(1.0)
        with contextlib.suppress(OSError):
            self._input.close()

    def _hear(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a user's layer may print there
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
    """Returns the environment of the child, where Python finds the same user modules as here."""
    paths = [*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, WITHIN: "1"}
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)} if paths else environment


def print_program(options: Sequence[str], keywords: Mapping[str, Any], folders: Iterable[str] = ()) -> str:
    """Returns the output of `bamboo run --dry-run`, which starts no process of a run; raises its error."""
    command = subprocesses.module("bamboo_cli", "run", *options, "--dry-run", "--keywords")
    done = subprocess.run(
        command, input=_request(keywords), capture_output=True, env=_environment(folders), check=False
    )
    if done.returncode:
        lines = (line.removeprefix("bamboo: ") for line in done.stderr.decode(errors="replace").splitlines())
        raise error_of({"exit_code": done.returncode, "error": "\n".join(lines)})
    return done.stdout.decode()


class TrainingRun:
    """A live or finished run; as a context manager, it waits for the run, or stops it after an error."""

    def __init__(self, child: RunChild, folder: Path, callbacks: Sequence[Callback] = ()):
        self.folder = folder
        self._child = child
        self._files = RunFolder(folder)
        self._result: TrainingResult | None = None
        self._callbacks = Callbacks(callbacks, self._files.events, lambda: child.is_over)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            self.stop()

    def __repr__(self) -> str:
        state = "goes on" if self.result is None else self.result.outcome
        return f"<TrainingRun {self.name}: {state}>"

    @property
    def name(self) -> str:
        """The name of the run's folder, which `bamboo report` and the other commands take."""
        return self.folder.name

    @property
    def job(self) -> Job:
        """The job of the run with all its fields; the values of secret arguments are masked."""
        return self._events().read_on().job

    @property
    def result(self) -> TrainingResult | None:
        """The result of the run; None while it is running."""
        if self._result is None and self._child.is_over:
            self._result = result_of(self.folder, self._child.word())
        return self._result

    def wait(self, timeout_s: float | None = None, *, check: bool = True) -> TrainingResult:
        """Waits for the end of the run, and returns its result.

        Raises:
            BambooError: the run ended with another exit code than 0, unless `check` is false; the class tells why.
            TimeoutError: the run continues after `timeout_s`.
        """
        try:
            has_ended = self._child.wait(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not has_ended:
            raise TimeoutError(f"the run {self.name} goes on after {timeout_s:g} s")
        self._callbacks.join(DRAIN_S)
        result = self.result
        if result is None:
            raise NothingMatchedError(f"the run {self.name} left no result")
        if check and result.exit_code:
            raise error_of(result.plain)
        return result

    def stop(self) -> TrainingResult:
        """Ends the run like Ctrl-C, after the open step. Returns its result; does not raise the run's error."""
        self._child.stop()
        return self.wait(check=False)

    def status(self) -> RunStatus:
        """Returns the phase of the run, its last step and loss, the owners of its stages and the verdicts so far."""
        from engine.core.protocol.run_status import status_of_history

        history = self._events(last_commits=True).read_on()
        history.last_action |= StepReader(self.folder).last_actions({})
        return status_of_history(self.name, history)

    def events(self, *, follow: bool = False) -> Iterator[Record]:
        """Yields the records of the run so far, in their order; with `follow`, until its end."""
        growing = self._events()
        while True:
            is_over = self._child.is_over
            yield from growing.news()
            if is_over or not follow:
                return
            time.sleep(_POLL_S)

    def table(self, name: str) -> pd.DataFrame:
        """Returns a table of the run: the same as `bamboo report --table NAME`; raises UserError for another name."""
        from engine.files.evidence import proof_of
        from engine.report.actions import MOST_ACTIONS
        from engine.report.load import PROVED, TABLES, load

        if name not in TABLES:
            raise UserError([Problem("table", f"one of {', '.join(TABLES)}", repr(name), nearest(name, TABLES))])
        is_whole = name == "actions"
        history = read_history(self._files.events)
        proof = {"proof": proof_of(self._files, history)} if name in PROVED else {}  # it reads every file of the run
        return load(history, self.name, None if is_whole else MOST_ACTIONS, **proof).table(name)

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the state_dict in the newest checkpoint of the run, or in that of a step.

        Raises:
            NothingMatchedError: there is no such checkpoint (yet).
            StorageError: none is good.
        """
        from engine.api.weights import load_weights

        return load_weights(self.folder, step, self.folder.parent)

    def kill(self, worker: int) -> dict[str, Any]:
        """Kills a worker with SIGKILL as soon as it computes; returns the case when the run has recovered or ended.

        The case has the verdict, the checks and the recoveries, as printed by `bamboo inject --json`.

        Raises:
            UserError: there is no such worker, or it owns no stage.
            BambooError: the run has ended, or takes no faults.
        """
        from engine.core.faults.kill_text import kill_scenario
        from engine.files.jobs.scenario_file import JobSource, LoadedScenario

        history = self._in_training()
        slots = sorted(slot for slot, owner in history.owners.items() if owner == worker)
        if not slots:
            expected = f"one of {', '.join(map(str, sorted(set(history.owners.values()))))}"
            raise UserError([Problem("worker", expected, repr(worker), "the workers that own a stage now")])
        pipeline, stage = slots[0]
        scenario = kill_scenario([f"0:{stage}@{pipeline}"], history.job)
        return self._inject(LoadedScenario(Path("kill"), scenario, scenario.job.seed, (), JobSource(), {}))

    def inject(self, scenario: str, *, seed: int | None = None, settings: Iterable[str] = ()) -> dict[str, Any]:
        """Injects the faults of a scenario, as `bamboo inject SCENARIO --run` does; returns the case as `kill` does."""
        self._in_training()
        from engine.files.jobs.scenario_file import load_scenario
        from engine.harness.job_checks import findable
        from engine.runtime.faults.registry import kinds

        return self._inject(load_scenario(scenario, kinds(), seed, settings, findable))

    def _in_training(self) -> RunHistory:
        """Waits until training has begun, and returns the history of the run; raises NothingMatchedError at its end."""
        growing = self._events()
        while not (history := growing.read_on()).is_training:
            if self._child.is_over:
                raise NothingMatchedError(f"the run {self.name} has ended")
            time.sleep(_POLL_S)
        return history

    def _inject(self, loaded: LoadedScenario) -> dict[str, Any]:
        from engine.harness.attach import attach

        return attach(loaded, self._files, lambda line: None).as_dict()

    def _events(self, *, last_commits: bool = False) -> GrowingEvents:
        return GrowingEvents(self._files.events, last_commits=last_commits)
