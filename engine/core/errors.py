"""The tree of exceptions, the public exit codes of the program, and the form of a user's mistake.

Rules: a user's mistake is a `UserError` that lists every `Problem`, never only the first. A bug is an
`InvariantError`, never an `assert`, which ``python -O`` drops. The class of an exception decides the exit code of the
program. No message shows the value of a secret argument. Text is secret if a word of its name is one of `_SECRETS`,
such as ``hf_token``; a number is secret only if the last word is one, because ``key_dim`` is a size.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice
from typing import Literal, TypeVar

Value = TypeVar("Value")


class ExitCode(IntEnum):
    """Exit codes of `bamboo`, stable and public."""

    OK = 0
    EXPECTATION_FAILED = 1
    USAGE = 2
    NOT_RECOVERED = 3
    ENVIRONMENT = 4
    NOTHING_MATCHED = 5
    INVALID_CASE = 6
    NOT_FINITE = 7
    COORDINATOR_UNAVAILABLE = 69
    INTERNAL = 70
    STORAGE = 74
    STOPPED_RESUMABLE = 75
    STATE_LOST = 80
    FENCED = 85
    LEFT_WITH_NOTICE = 86
    DEVICE_FAILED = 87
    HUNG_UP = 129
    INTERRUPTED = 130
    UNHEARD = 141  # the reader of the program's output is gone: SIGPIPE
    TERMINATED = 143


MOST_PROBLEMS = 100  # in one report; a reader of files stops after these
_LONGEST_NAME, _MOST_NAMES = 100, 500  # that are compared for a hint: each pair takes microseconds
_MOST_SHOWN = 500, 2000  # characters in a message: of a name or a value; of a text that may list all fields
KILLED = -9  # the code of a process that SIGKILL has ended, and of a lost one whose end nothing saw
BY_SIGNAL = frozenset({ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.TERMINATED})  # of a run that was interrupted

MASK = "***"  # stands for a secret value in files and messages
_SECRETS = frozenset(
    """
    token key keys secret secrets password passwords passwd passphrase pwd credential credentials auth apikey apikeys
    """.split()
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def is_secret(name: str, value: object = "text") -> bool:
    """Returns whether the value of an argument of this name must not be written; without a value: whether a text is."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    words = [each.lower() for each in _WORDS.findall(name)]
    return not _SECRETS.isdisjoint(words if isinstance(value, str) else words[-1:])


def has_credentials(text: str) -> bool:
    """Returns whether a text has a URL with credentials, such as ``s3://user:word@bucket``."""
    return any("@" in each.partition("/")[0] for each in text.split("://")[1:])


@dataclass(frozen=True, slots=True)
class Problem:
    """A user's mistake: its place, the expected value, the value found, and a hint for the correction."""

    field: str
    expected: str
    found: str = ""
    hint: str = ""
    source: str = ""
    line: int = 0
    column: int = 0

    def __post_init__(self) -> None:
        args, _, name = self.field.rpartition(".")
        if args.endswith("_args") and self.found not in ("", repr(name)) and is_secret(name):
            object.__setattr__(self, "found", MASK)

    def __str__(self) -> str:
        place = self.source
        if self.line:
            place += f":{self.line}:{self.column}"
        # A flag is the name of its field already.
        name = "" if place == "--" + self.field.replace("_", "-") else self.field
        text = ": ".join(part for part in (place, _short(name)) if part)
        text += f": expected {_short(self.expected, _MOST_SHOWN[1])}"
        if self.found:
            text += f", found {_short(self.found)}"
        if self.hint:
            text += f" ({_short(self.hint, _MOST_SHOWN[1])})"
        return text


def _short(text: str, most: int = _MOST_SHOWN[0]) -> str:
    return f"{text[:most]}..." if len(text) > most else text


# not-finite: the loss or the norm of the gradients; replicas-differ: replicas of a layer have other weights or buffers.
NoticeKind = Literal["not-finite", "replicas-differ"]


class BambooError(Exception):
    """Base class of the exceptions that bamboo raises on purpose; `exit_code` may differ from that of the class.

    `notice` names the wrong numbers that a run has noticed; it is empty for all other errors.
    """

    exit_code = ExitCode.INTERNAL
    notice: NoticeKind | Literal[""] = ""

    def __init__(self, text: str = "", exit_code: int | None = None):
        super().__init__(text)
        if exit_code is not None:
            self.exit_code = ExitCode(exit_code)


class UserError(BambooError):
    """The user asked for something impossible; carries every problem found, or the first `MOST_PROBLEMS` of more."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        if len(self.problems) > MOST_PROBLEMS:
            rest = Problem(
                "", f"at most {MOST_PROBLEMS} mistakes", "more", "mend the others first", self.problems[0].source
            )
            self.problems = (*self.problems[:MOST_PROBLEMS], rest)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def problems_of(*checks: Callable[[], object]) -> list[Problem]:
    """Returns the problems of all checks, each of which may raise a `UserError`, to report them together."""
    problems: list[Problem] = []
    for check in checks:
        noting(problems, check)
    return problems


def explained(error: UserError, field: str, notes: Iterable[str]) -> UserError:
    """Returns an error with notes in the hints of the mistakes in a field."""
    hints = [("; ".join(filter(None, (*notes, problem.hint))), problem) for problem in error.problems]
    return UserError(replace(problem, hint=hint) if problem.field == field else problem for hint, problem in hints)


def noting(problems: list[Problem], check: Callable[[], Value]) -> Value | None:
    """Returns the result of a check; None if it raises a `UserError`, whose problems are added to `problems`."""
    try:
        return check()
    except UserError as error:
        problems += error.problems
        return None


class UserCodeError(BambooError):
    """The user's model, data or loss raised an exception before the first commit."""

    exit_code = ExitCode.USAGE


class ScheduleError(BambooError):
    """A program breaks a rule; the message names the worker, the position and the rule."""

    exit_code = ExitCode.USAGE


class DeadlockError(ScheduleError):
    """A program cannot finish: `cycle` is the path of (worker, action text) that wait for each other."""

    def __init__(self, cycle: tuple[tuple[int, str], ...]):
        self.cycle = cycle
        path = " -> ".join(f"worker {worker}: {action}" for worker, action in cycle)
        super().__init__(f"deadlock: {path}")


class EnvironmentLacksError(BambooError):
    """This machine lacks something that the job needs."""

    exit_code = ExitCode.ENVIRONMENT


class StorageError(BambooError):
    """Something on disk cannot be written or read."""

    exit_code = ExitCode.STORAGE


class DivergedError(BambooError):
    """The loss or the norm of the gradients is no finite number; `layer` is where that began, if it is known."""

    exit_code = ExitCode.NOT_FINITE
    notice = "not-finite"

    def __init__(self, text: str = "", layer: int | None = None):
        super().__init__(text)
        self.layer = layer


class WorkerFailedError(BambooError):
    """A worker died or raised, and the job could not go on."""

    exit_code = ExitCode.NOT_RECOVERED


class RepeatedExceptionError(WorkerFailedError):
    """Two workers have raised the same exception in one step: it comes from the user's code, and not from a worker."""


class TransferFailedError(WorkerFailedError):
    """A transfer with worker `peer` failed, or a group of workers was not formed, where `peer` is None."""

    def __init__(self, text: str, peer: int | None = None):
        super().__init__(text)
        self.peer = peer


class CoordinatorUnavailableError(BambooError):
    """The coordinator's store gave no answer within the deadline, or refused; the request may have been applied."""

    exit_code = ExitCode.COORDINATOR_UNAVAILABLE


class LeaseLostError(BambooError):
    """A write names a lease that has expired: the holder of the lease is fenced."""

    exit_code = ExitCode.FENCED


class NothingMatchedError(BambooError):
    """The user named a thing that does not exist."""

    exit_code = ExitCode.NOTHING_MATCHED

    def __init__(self, text: str, hint: str = ""):
        super().__init__(f"{text} ({hint})" if hint else text)


class InvariantError(BambooError):
    """A promise of the design was broken: a bug, or corrupted state."""

    exit_code = ExitCode.INTERNAL


class ReplicasDifferError(InvariantError):
    """Two replicas of a layer do not have the same bits."""

    notice = "replicas-differ"


_KINDS = (UserCodeError, WorkerFailedError, EnvironmentLacksError, NothingMatchedError)
_OF_CODE = {int(kind.exit_code): kind for kind in (*_KINDS, CoordinatorUnavailableError, StorageError)}


def error_of_code(code: int, text: str) -> BambooError:
    """Returns the error that another process has told by its exit code; an unknown code is an internal error."""
    error = _OF_CODE.get(code, BambooError)(text)
    error.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.INTERNAL
    return error


@dataclass(frozen=True, slots=True)
class Impossible:
    """A cell of a protocol's table for a pair of state and input that only a bug can cause, with the reason."""

    reason: str


def ensure(holds: bool, promise: str) -> None:
    """Raises InvariantError with the text of a promise of the design, if it does not hold."""
    if not holds:
        raise InvariantError(promise)


def required(value: Value | None, promise: str) -> Value:
    """Returns a value that a promise of the design says is there; raises InvariantError if it is None."""
    if value is None:
        raise InvariantError(f"not so: {promise}")
    return value


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns ``did you mean 'x'?`` for the nearest known spelling of `word`, in any case, or an empty string."""
    if len(word) > _LONGEST_NAME:
        return ""
    by_lower = {each.lower(): each for each in islice(names, _MOST_NAMES)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]!r}?" if close else ""


# An exception that ended a worker, as data: its text, its place in the job, and the line of the user's own code.
GPU_ERROR, GPU_MEMORY = "GPU error", "GPU out of memory"
INJECTED = ", injected by fault "  # behind one of them
_MOST_CHARACTERS = 300  # of the text of an exception in a sentence


@dataclass(frozen=True, slots=True)
class WorkerException:
    """One exception; a field is empty, and `line` 0, if it is not known.

    `error` is its type and text. `place` is the part of the job that raised it: ``layer 2 (fc2)``, ``the loss``, ``the
    data`` or ``the factory mine:small``. `file`, `line` and `function` name the innermost line of the user's own code.
    `frames` has the user's frames with their source, innermost first, and counts those of bamboo and torch.
    `microbatch` names the microbatch of a forward or a backward in training, and its samples. `gpu` describes the
    failure of the worker's GPU behind the exception, beginning with `GPU_ERROR` or `GPU_MEMORY`; else it is empty.
    """

    error: str
    place: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    frames: str = ""
    traceback: str = ""
    microbatch: str = ""
    gpu: str = ""

    @property
    def kind(self) -> str:
        """The text that two exceptions with one cause share; it leaves out the size that does not fit into a GPU."""
        return self.gpu.partition(":")[0] if self.gpu.startswith(GPU_MEMORY) else self.gpu or self.error

    @property
    def is_injected(self) -> bool:
        """Whether an injected fault made the GPU fail."""
        return INJECTED in self.gpu

    def in_step(self, step: int) -> str:
        """Returns the exception as words that follow "worker N", with the step and the line of code.

        A step below 0 means before training.
        """
        place = f", in {self.place}" if self._place_is_news() else ""
        when = ", before step 0" if step < 0 else f" of step {step}" if place else f", in step {step}"
        microbatch = f", {self.microbatch}" if self.microbatch else ""
        return f"{self._ended()}{place}{when}{microbatch}{self._line()}"

    def of_both(self, first: int, second: int, step: int) -> str:
        """Returns the exception as that of two workers in one step, with the part of the job that is at fault."""
        culprit = self.place if self.place in ("the data", "the loss") else "the model"
        same = f"worker {first} and worker {second} raised the same in step {step}: it is {culprit}, not a worker"
        return f"{self.at_start()}; {same}"

    def in_verdict(self) -> str:
        """Returns the exception as words that follow "worker N", without the line of code."""
        return f"{self._ended()}{f', in {self.place}' if self._place_is_news() else ''}"

    def at_start(self) -> str:
        """Returns the exception as a mistake that was found before training: its place first, then its text."""
        places = ", ".join(filter(None, [self.place if self._place_is_news() else "", self.microbatch]))
        return f"{f'in {places}: ' if places else ''}{self._short()}{self._line()}"

    def _place_is_news(self) -> bool:
        """Returns whether the place is known, and the text does not name it itself."""
        return bool(self.place) and self.place not in self.error

    def _ended(self) -> str:
        return f"ended with {self._short()}" if self.gpu else f"raised {self._short()}"

    def _short(self) -> str:
        text = " ".join((self.gpu or self.error).split())
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."

    def _line(self) -> str:
        function = f", in {self.function}" if self.function else ""
        return f" ({self.file}:{self.line}{function})" if self.file else ""
