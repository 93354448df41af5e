"""Faults: a kind, its victims and a moment; and their plain form.

Rules: a fault has a logical time: an action of a slot's owner in a step, or a phase of the recovery from another fault.
A delay counts by the clock from such a moment. A fault strikes once, even if an heir runs the action again. A run in
which a fault never strikes proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

from engine.core.action import Action, Op, parse_action
from engine.core.checkpoint_rules import KeepRule, keeping_of
from engine.core.errors import Problem
from engine.core.job.job import Job
from engine.core.protocol.events import RecoveryPhase
from engine.core.units import DURATION_FORM, Scalar, described, duration_text, parse_duration

# Kinds of faults: parameters, the signals that carry some of them out, the signs that confirm them, needs of a job.
#
# `engine/runtime/faults` registers the kinds. A kind that a worker carries out has its function there.


AT_ONCE = frozenset({"kill"})  # kinds that end their victim at once
WITH_NOTICE = frozenset({"terminate"})  # kinds whose victim may hand its stages over before it ends
HARMLESS = frozenset({"noop"})  # kinds without an effect
WITHOUT_GPU, DOUBLE = "without_gpu", "double"  # the parameter of kinds on a GPU for a job on the CPU, and its value

MOST_NS = 24 * 3600 * 10**9  # no wait is longer: a system call may refuse it
MOST_COUNT, MOST_NUMBER, MOST_CHARACTERS = 10**9, 10**6, 1000

A_WORKER = "a worker of the job"  # the form of a number in words; where the job is known, `a_worker` has the numbers
ParameterForm = Literal["duration", "count", "worker", "number", "text", "choice"]
Parameters = Mapping[str, Scalar]
# exit: exit code; notice: the worker gave notice; raised: an exception; suffered: the worker confirms; state: in /proc.
Sign = Literal["exit", "notice", "raised", "suffered", "state"]
ActsOn = Literal["process", "checkpoints", "frames", "GPU"]  # frames: those of links, which NCCL does not send


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
    least: int = 0  # of a duration, in nanoseconds

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
            "duration": f"{DURATION_FORM}, {'more than 0 and ' * (self.least > 0)}at most {duration_text(MOST_NS)}",
            "count": f"a whole number from 0 to {MOST_COUNT}",
            "worker": A_WORKER,
            "number": f"a number > 0, at most {MOST_NUMBER}",
            "text": f"text of at most {MOST_CHARACTERS} characters",
        }[self.form]

    def fits(self, value: object) -> bool:
        """Returns whether the parameter can have this value, which is in the program's units."""
        match self.form:
            case "duration":
                return type(value) is int and self.least <= value <= MOST_NS
            case "count" | "worker":
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
    """One kind of fault; `by` carries it out, `ends` says whether it ends its victim, the worker or the host.

    A kind by the bed strikes hosts from outside: `target` is ``host`` where a scenario names one, ``worker``, or the
    word for the host that it always strikes. A job must have what the kind `acts_on`. `shows` returns whether a sign
    and its value confirm the effect; `signals` returns what the agent sends.
    """

    name: str
    about: str  # one sentence
    by: Literal["agent", "worker", "bed"]
    ends: bool
    parameters: tuple[Parameter, ...] = ()
    shows: Callable[[Sign, Any, Parameters], bool] = at_once
    signals: Callable[[Parameters], tuple[TimedSignal, ...]] = no_signals
    target: str = "worker"
    acts_on: ActsOn = "process"

    def with_defaults(self, parameters: Parameters) -> dict[str, Scalar]:
        """Returns `parameters`, by key, and the defaults of the others."""
        defaults = {each.key: each.default for each in self.parameters if each.default is not None}
        return {**defaults, **parameters}


Kinds = Mapping[str, FaultKind]  # by name


def ends(do: str, kinds: Kinds) -> bool:
    """Returns whether a kind is known and ends its victim."""
    return do in kinds and kinds[do].ends


def kind_problems(kind: FaultKind, parameters: Parameters, job: Job) -> Iterator[Problem]:
    """Yields the problem of a kind with these parameters in a job that lacks what the kind acts on."""
    if kind.acts_on == "checkpoints" and keeping_of(job.checkpoint_every) == KeepRule(last=False):
        hint = "no checkpoint is written there: set checkpoint_every in the job"
        yield Problem("do", "a kind for a job that keeps checkpoints", repr(kind.name), hint)
    if kind.acts_on == "frames" and job.backend == "nccl":
        hint = "NCCL sends between GPUs, past the links: set backend: direct, or take cut-link"
        yield Problem("do", "a kind for a job over links", repr(kind.name), hint)
    if kind.acts_on == "GPU" and job.device != "cuda" and parameters.get(WITHOUT_GPU) != DOUBLE:
        hint = f"its workers compute on the CPU: with {WITHOUT_GPU}: {DOUBLE} a worker plays its GPU"
        yield Problem("do", "a kind for a job on GPUs", repr(kind.name), hint)


When = Literal["before", "during", "after"]
RoleName = Literal["recoverer", "shadow", "neighbour"]

WHENS: tuple[When, ...] = get_args(When)
PHASES: tuple[RecoveryPhase, ...] = get_args(RecoveryPhase)
WHOLE_AFTERWARDS = f"once a worker is lost, backwards are whole: {Op.B} instead of {Op.I} and {Op.W}"
ROLES: tuple[RoleName, ...] = get_args(RoleName)


@dataclass(frozen=True, slots=True)
class At:
    """The moment before, during or after an action of a step at its owner, or of a checkpoint at its writer."""

    step: int
    action: Action
    when: When = "before"

    @property
    def is_half(self) -> bool:
        """Whether the action is one part of a split backward."""
        return self.action.op in (Op.I, Op.W)

    def __str__(self) -> str:
        return f"{self.when} {self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class After:
    """The moment `delay_ns` after another fault has struck, or after a phase of the recovery from it has begun."""

    fault: str = described(..., "the fault that must have struck")
    phase: RecoveryPhase | None = described(None, "the phase of the recovery from it that must have begun")
    delay_ns: int = described(0, "the time that must have passed since")

    def __str__(self) -> str:
        delay = f"{duration_text(self.delay_ns)} after " if self.delay_ns else "at "
        what = f"the phase {self.phase} of the recovery from" if self.phase else "the strike of"
        return f"{delay}{what} {self.fault}"


@dataclass(frozen=True, slots=True)
class InStep:
    """The moment `delay_ns` after the step before `step` is committed, as it is seen from outside of all hosts."""

    step: int = described(..., "the step, from 1: the one before it is committed")
    delay_ns: int = described(0, "the time that must have passed since")

    def __str__(self) -> str:
        delay = f", {duration_text(self.delay_ns)} after its begin" if self.delay_ns else ""
        return f"in step {self.step}{delay}"


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that owns a slot at the moment of the strike."""

    pipeline: int
    stage: int

    def in_words(self, noun: str) -> str:
        """Returns the victim in words; `noun` is that of a slot in a pipeline."""
        return f"the owner of {noun} {self.stage}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, by its number."""

    worker: int

    def in_words(self, noun: str) -> str:
        """Returns the victim in words."""
        return f"worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Role:
    """The worker in a role for the slot of the action, or of `After.fault`, at the moment of the strike.

    The recoverer owns the slot by the newest verdict, the shadow is its first one, and the neighbour owns the next
    stage of the pipeline (cyclic).
    """

    role: RoleName

    def in_words(self, noun: str) -> str:
        """Returns the victim in words."""
        return f"the {self.role}"


@dataclass(frozen=True, slots=True)
class Host:
    """A host by its name, or by the word for the host that it is at the moment of the strike."""

    host: str

    def in_words(self, noun: str) -> str:
        """Returns the victim in words."""
        return self.host


Moment = At | After | InStep
Victim = Owner | Worker | Role | Host


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, with an `id` unique in its run; strikes all victims at once with the registered kind `do`."""

    id: str
    moment: Moment
    victims: tuple[Victim, ...]
    do: str = "kill"
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)  # by `Parameter.key`

    def in_words(self, noun: str) -> str:
        """Returns the fault in words; `noun` is that of a slot in a pipeline of the job."""
        usual = isinstance(self.moment, At) and self.victims == (slot_owner(self.moment.action),)
        usual |= self.do in HOST_KINDS and HOST_KINDS[self.do].target not in ("host", "worker")
        whom = "" if usual else " " + " and ".join(each.in_words(noun) for each in self.victims)
        how = ", ".join(f"{key.removesuffix('_ns')} {_shown(key, value)}" for key, value in self.parameters.items())
        return f"{self.do}{whom} {self.moment}{f' ({how})' if how else ''}"


def slot_owner(action: Action) -> Owner:
    """Returns the default victim of a fault at an action: the owner of its slot; for a checkpoint, its writer."""
    return Owner(action.pipeline, action.stage)


def struck_by(faults: Sequence[Fault], step: int, action: Action, when: When) -> Fault | None:
    """Returns the first of the faults with this moment, or None."""
    return next((each for each in faults if each.moment == At(step, action, when)), None)


def to_plain(fault: Fault) -> dict[str, Any]:
    """Returns a fault as JSON values; `from_plain` is the inverse."""
    moment: dict[str, Any]
    if isinstance(fault.moment, At):
        moment = {"step": fault.moment.step, "action": str(fault.moment.action), "when": fault.moment.when}
    elif isinstance(fault.moment, InStep):
        moment = {"step": fault.moment.step, "delay_ns": fault.moment.delay_ns}
    else:
        moment = {"fault": fault.moment.fault, "phase": fault.moment.phase, "delay_ns": fault.moment.delay_ns}
    victims = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in fault.victims]
    parameters = dict(fault.parameters)
    return {"id": fault.id, "moment": moment, "victims": victims, "do": fault.do, "parameters": parameters}


def from_plain(plain: Mapping[str, Any]) -> Fault:
    """Returns the fault of a worker for the values of `to_plain`; no fault of a host is ever sent."""
    moment = dict(plain["moment"])
    at = At(moment["step"], parse_action(moment["action"]), moment["when"]) if "step" in moment else After(**moment)
    victims = tuple(_VICTIMS[next(iter(each))](**each) for each in plain["victims"])
    return Fault(plain["id"], at, victims, plain["do"], dict(plain["parameters"]))


_VICTIMS: dict[str, Any] = {"pipeline": Owner, "worker": Worker, "role": Role}


def _shown(key: str, value: Scalar) -> str:
    return duration_text(int(value)) if key.endswith("_ns") else str(value)


# Faults of hosts: they strike agents, links, the power or etcd from outside of the hosts, on a bed of hosts to break.
#
# Rules: a fault of a host has a moment that is seen from outside: so long after the step before it is committed. The
# host is known at that moment only, unless it is named. A fault that surely ends the run, because etcd loses its
# majority or no host is left, is refused before the run.

COORDINATOR, LEADER, OTHER = "coordinator", "etcd-leader", "other"  # hosts that are known at the moment only
HOST_PATTERN = rf"h[0-9]{{1,2}}|{COORDINATOR}|{LEADER}|{OTHER}"
HOST_KINDS: Mapping[str, FaultKind] = MappingProxyType(
    {
        name: FaultKind(name, about, "bed", ends, target=target)
        for name, target, ends, about in (
            ("kill-agent", "host", True, "SIGKILL to the agent of a host, with which its workers end"),
            (
                *("power-off", "host", True),
                "the link of a host is cut, then all its processes end, so none of their messages leaves it",
            ),
            (
                *("cut-host", "host", True),
                "the link of a host is cut, and the host lives on: it ends its workers before its lease can expire",
            ),
            ("kill-coordinator", "coordinator", True, "SIGKILL to the agent of the host that coordinates"),
            ("kill-etcd-leader", "etcd-leader", False, "SIGKILL to the member of etcd that leads; no host is lost"),
            ("kill-worker", "worker", True, "SIGKILL to one worker, from outside of its host"),
            ("slow-network", "other", False, "a round trip between any two hosts takes 200 ms from then on"),
            ("noop-host", "other", False, "nothing: the run of several hosts is compared with that of one"),
        )
    }
)
LOSES_A_HOST = frozenset(name for name, kind in HOST_KINDS.items() if kind.ends and kind.target != "worker")
STRIKES_NO_PROCESS = frozenset({"slow-network", "noop-host"})
LOSES_A_MEMBER = frozenset({"power-off", "cut-host", "kill-etcd-leader"})  # of etcd, where one is on that host

LEAST_HOSTS, MOST_HOSTS = 3, 16
MEMBERS = 3  # of etcd, on the first hosts


@dataclass(frozen=True, slots=True)
class OnHosts:
    """Where a scenario is to run: on so many hosts; None if that is not known, 0 for one host without a bed."""

    number: int | None = 0


ONE_HOST, ANY_HOSTS = OnHosts(), OnHosts(None)


def number_of(host: str) -> int | None:
    """Returns the number of a host that is named, such as 2 for ``h2``; None for a word that stands for one."""
    return int(host[1:]) if re.fullmatch(r"h[0-9]+", host) else None


def chosen_host(host: str, hosts: Sequence[str], coordinates: str, leads: str) -> str | None:
    """Returns the host to strike, of the `hosts` that are left; None if the one that is meant is not left."""
    other = next((each for each in hosts if each != coordinates), "")
    name = {COORDINATOR: coordinates, LEADER: leads, OTHER: other}.get(host, host)
    return name if name in hosts else None
