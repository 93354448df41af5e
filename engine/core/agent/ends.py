"""The machine of a host agent: it lets the workers of its host end, kills them, and names those that stay.

    StopOrdered, WorkersReleased, SignalCame --> deadline --> SIGKILL --> 10 s --> the process is left behind

Rules: a process gets SIGKILL once, by the verdict of the coordinator or after a deadline. A process that is there ten
seconds later is named and left behind, also while training goes on; nothing waits for it any more. The agent decides
nothing about training: the first signal asks the coordinator to end the run after the open step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

_S = 1_000_000_000
GONE_NS = 10 * _S  # from SIGKILL until a process is left behind
STOP_NS = 3 * _S  # from the order to stop to SIGKILL


@dataclass(frozen=True, slots=True)
class HostInput:
    """One input, with the time at which it came."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class ProcessEnded(HostInput):
    """The process of a worker has ended."""

    worker: int


@dataclass(frozen=True, slots=True)
class KillOrdered(HostInput):
    """The coordinator has put a worker out."""

    worker: int


@dataclass(frozen=True, slots=True)
class StopOrdered(HostInput):
    """The run ends: all workers are to end within `grace_ns`."""

    grace_ns: int = STOP_NS


@dataclass(frozen=True, slots=True)
class WorkersReleased(HostInput):
    """All workers may end, and do so within `grace_ns`."""

    grace_ns: int


@dataclass(frozen=True, slots=True)
class SignalCame(HostInput):
    """A signal asks to end the run: after the open step and within `grace_ns`, or at once where no step is open."""

    grace_ns: int
    is_training: bool


@dataclass(frozen=True, slots=True)
class ClockRead(HostInput):
    """Time has passed; a deadline may have passed too."""


class StopWorkers(NamedTuple):
    """Tells the coordinator and every worker that the run ends now."""


class EndStep(NamedTuple):
    """Asks the coordinator to end the run after the open step, within `grace_ns`."""

    grace_ns: int


class KillWorker(NamedTuple):
    """Sends SIGKILL to a worker; `why` is empty for a verdict, which has its own record."""

    worker: int
    why: str


class LeaveBehind(NamedTuple):
    """Names a worker whose process does not end by SIGKILL; nothing waits for it from now on."""

    worker: int


HostOutput = StopWorkers | EndStep | KillWorker | LeaveBehind


class HostAgent(NamedTuple):
    """The workers of one host, and how far their end has come."""

    living: frozenset[int]  # workers whose processes have not ended
    killed_ns: Mapping[int, int] = {}  # when each got SIGKILL
    left: frozenset[int] = frozenset()  # left behind
    is_stopping: bool = False
    is_interrupted: bool = False
    is_forced: bool = False  # all that lived have got SIGKILL
    deadline_ns: float = inf  # for the present step of the end

    @property
    def due_ns(self) -> float:
        """The time of the next deadline."""
        gone_ns = (self.killed_ns[worker] + GONE_NS for worker in self.unsettled)
        return min((self.deadline_ns, *gone_ns))

    @property
    def unsettled(self) -> frozenset[int]:
        """The workers that have got SIGKILL, and have neither ended nor been left behind."""
        return self.living & self.killed_ns.keys() - self.left


HostEnd = tuple[HostAgent, tuple[HostOutput, ...]]


def step(host: HostAgent, given: HostInput) -> HostEnd:
    """Returns the agent after an input, and the outputs to carry out in their order."""
    return _RULES[type(given)](host, given)


def _ends(host: HostAgent, given: ProcessEnded) -> HostEnd:
    return host._replace(living=host.living - {given.worker}), ()


def _kills(host: HostAgent, given: KillOrdered) -> HostEnd:
    return _killed(host, given.now_ns, [given.worker], "")


def _killed(host: HostAgent, now_ns: int, workers: list[int], why: str) -> HostEnd:
    due = [worker for worker in workers if worker in host.living and worker not in host.killed_ns]
    new = host._replace(killed_ns={**host.killed_ns, **dict.fromkeys(due, now_ns)})
    return new, tuple(KillWorker(worker, why) for worker in due)


def _stops(host: HostAgent, given: StopOrdered) -> HostEnd:
    if host.is_stopping:
        return host, ()
    latest_ns = host.deadline_ns if host.is_interrupted else inf
    deadline_ns = min(latest_ns, given.now_ns + given.grace_ns)
    return host._replace(is_stopping=True, deadline_ns=deadline_ns), (StopWorkers(),)


def _releases(host: HostAgent, given: WorkersReleased) -> HostEnd:
    return host._replace(deadline_ns=min(host.deadline_ns, given.now_ns + given.grace_ns)), ()


def _is_signalled(host: HostAgent, given: SignalCame) -> HostEnd:
    """Ends the run after the open step at the first signal, and by force at the second."""
    new = host._replace(is_interrupted=True)
    if host.is_interrupted:
        return (new, ()) if host.is_forced else _forces(new, given.now_ns)
    if not given.is_training:
        return _stops(new, StopOrdered(given.now_ns, given.grace_ns))
    deadline_ns = min(host.deadline_ns, given.now_ns + given.grace_ns)
    return new._replace(deadline_ns=deadline_ns), (EndStep(given.grace_ns),)


def _reads_clock(host: HostAgent, given: ClockRead) -> HostEnd:
    late = sorted(worker for worker in host.unsettled if given.now_ns >= host.killed_ns[worker] + GONE_NS)
    left = tuple(LeaveBehind(worker) for worker in late)
    new, outputs = host._replace(left=host.left | set(late)), tuple[HostOutput, ...]()
    if given.now_ns >= host.deadline_ns:
        is_over = host.is_stopping or host.is_interrupted
        new, outputs = _forces(new, given.now_ns) if is_over else _stops(new, StopOrdered(given.now_ns))
    return new, (*left, *outputs)


def _forces(host: HostAgent, now_ns: int) -> HostEnd:
    """Kills every worker that has not ended."""
    why = "the run was interrupted" if host.is_interrupted else "it did not end before its deadline"
    stop = () if host.is_stopping else (StopWorkers(),)
    new, kills = _killed(host, now_ns, sorted(host.living), why)
    return new._replace(is_stopping=True, is_forced=True, deadline_ns=inf), (*stop, *kills)


_RULES: dict[type[HostInput], Callable[[HostAgent, Any], HostEnd]] = {
    ProcessEnded: _ends,
    KillOrdered: _kills,
    StopOrdered: _stops,
    WorkersReleased: _releases,
    SignalCame: _is_signalled,
    ClockRead: _reads_clock,
}
