"""Kinds of faults: parameters, the signals that carry some of them out, the signs that confirm them, needs of a job.

`engine/runtime/faults` registers the kinds. A kind that a worker carries out has its function there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from engine.core.checkpoints.keeping import Keeping, keeping_of
from engine.core.config.job import Job
from engine.core.duration import DURATION_FORM, duration_text, parse_duration
from engine.core.errors import Problem
from engine.core.scalar import Scalar

AT_ONCE = frozenset({"kill"})  # kinds that end their victim at once
WITH_NOTICE = frozenset({"terminate"})  # kinds whose victim may hand its stages over before it ends
HARMLESS = frozenset({"noop"})  # kinds without an effect
ON_DISKS = frozenset({"disk-full", "disk-error", "damage"})  # kinds that act on files of checkpoints
ON_GPUS = frozenset({"gpu-error", "gpu-sticky", "gpu-hang", "gpu-oom"})  # kinds that act on the GPU of a worker
ON_LINKS = frozenset({"delay-link", "stall-link", "reset-link"})  # kinds that act on frames
WITHOUT_GPU, DOUBLE = "without_gpu", "double"  # the parameter of these kinds for a job on the CPU, and its value

MOST_NS = 24 * 3600 * 10**9  # no wait is longer: a system call may refuse it
MOST_COUNT, MOST_NUMBER, MOST_CHARACTERS = 10**9, 10**6, 1000

ParameterForm = Literal["duration", "count", "number", "text", "choice"]
Parameters = Mapping[str, Scalar]
# exit: exit code; notice: the worker gave notice; raised: an exception; suffered: the worker confirms; state: in /proc.
Sign = Literal["exit", "notice", "raised", "suffered", "state"]


class TimedSignal(NamedTuple):
    """A signal to the victim, by its number, a time after the strike; only a victim that still lives gets it."""

    after_ns: int
    number: int


def at_once(sign: Sign, value: Any, parameters: Parameters) -> bool:
    """Returns whether the sign is the worker's own confirmation."""
    return sign == "suffered"


def no_signals(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns the signals of a kind that the worker carries out: none."""
    return ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kind. If the user gives no value and it has no default, `Fault.parameters` lacks it."""

    name: str  # as a scenario spells it, such as "for"
    form: ParameterForm
    about: str
    default: Scalar | None = None  # in the program's units
    required: bool = False
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its key in `Fault.parameters`, where a duration is an integer of nanoseconds."""
        return f"{self.name}_ns" if self.form == "duration" else self.name

    @property
    def expected(self) -> str:
        """The form of a value, in words."""
        if self.form == "choice":
            return f"one of {', '.join(self.choices)}"
        return {
            "duration": f"{DURATION_FORM}, at most {duration_text(MOST_NS)}",
            "count": f"a whole number from 0 to {MOST_COUNT}",
            "number": f"a number > 0, at most {MOST_NUMBER}",
            "text": f"text of at most {MOST_CHARACTERS} characters",
        }[self.form]

    def fits(self, value: object) -> bool:
        """Returns whether the parameter can have this value, which is in the program's units."""
        match self.form:
            case "duration":
                return type(value) is int and 0 <= value <= MOST_NS
            case "count":
                return type(value) is int and 0 <= value <= MOST_COUNT
            case "number":  # neither infinity nor NaN is in the range
                return isinstance(value, (int, float)) and type(value) is not bool and 0 < value <= MOST_NUMBER
            case "text":
                return isinstance(value, str) and len(value) <= MOST_CHARACTERS
            case "choice":
                return isinstance(value, str) and value in self.choices

    def read(self, value: object) -> Scalar | None:
        """Returns a value of a scenario file in the program's units, or None if it has another form."""
        if self.form == "duration":
            value = parse_duration(value) if isinstance(value, str) else None
        return cast(Scalar, value) if self.fits(value) else None


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault; `by` carries it out, `ends` says whether it ends its victim.

    `shows` returns whether a sign and its value confirm the effect; `signals` returns what the agent sends.
    """

    name: str
    about: str  # one sentence
    by: Literal["agent", "worker"]
    ends: bool
    parameters: tuple[Parameter, ...] = ()
    shows: Callable[[Sign, Any, Parameters], bool] = at_once
    signals: Callable[[Parameters], tuple[TimedSignal, ...]] = no_signals

    def with_defaults(self, given: Parameters) -> dict[str, Scalar]:
        """Returns the `given` parameters, by key, and the defaults of the others."""
        defaults = {each.key: each.default for each in self.parameters if each.default is not None}
        return {**defaults, **given}


def kind_problems(kind: str, parameters: Parameters, job: Job) -> Iterator[Problem]:
    """Yields the problems of a kind with these parameters in a job in which it can have no effect."""
    if kind in ON_DISKS and keeping_of(job.checkpoint_every) == Keeping(last=False):
        hint = "no checkpoint is written there: set checkpoint_every in the job"
        yield Problem("do", "a kind for a job that keeps checkpoints", repr(kind), hint)
    if kind in ON_LINKS and job.backend == "nccl":
        hint = "NCCL sends between GPUs, past the links: set backend: direct, or take cut-link"
        yield Problem("do", "a kind for a job over links", repr(kind), hint)
    yield from gpu_problems(kind, parameters, job)


def gpu_problems(kind: str, parameters: Parameters, job: Job) -> Iterator[Problem]:
    """Yields the problem of a fault of a GPU in a job without GPUs and without their double."""
    if kind in ON_GPUS and job.device != "cuda" and parameters.get(WITHOUT_GPU) != DOUBLE:
        hint = f"its workers compute on the CPU: with {WITHOUT_GPU}: {DOUBLE} a worker plays its GPU"
        yield Problem("do", "a kind for a job on GPUs", repr(kind), hint)
