"""The machine of a host agent: it lets the workers of its host end, kills them, and names those that stay.

    stop, let_end, interrupt --> deadline --> SIGKILL --> 10 s --> the process is left behind

Each public function handles one kind of input: it returns the agent after it, and the outputs in their order.

Rules: a process gets SIGKILL once, by the verdict of the coordinator or after a deadline. A process that is there ten
seconds later is named and left behind, also while training goes on; nothing waits for it any more. The agent decides
nothing about training: the first signal asks the coordinator to end the run after the open step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

_S = 1_000_000_000
GONE_NS = 10 * _S  # from SIGKILL until a process is left behind
STOP_NS = 3 * _S  # from the order to stop to SIGKILL


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
        if not self.killed_ns:  # it is asked for at each message
            return self.deadline_ns
        return min((self.deadline_ns, *(self.killed_ns[worker] + GONE_NS for worker in self.unsettled)))

    @property
    def unsettled(self) -> frozenset[int]:
        """The workers that have got SIGKILL, and have neither ended nor been left behind."""
        return self.living & self.killed_ns.keys() - self.left


HostEnd = tuple[HostAgent, tuple[HostOutput, ...]]


def take_in(host: HostAgent, now_ns: int, worker: int) -> HostEnd:
    """Handles the start of one more worker's process."""
    return host._replace(living=host.living | {worker}), ()


def see_end(host: HostAgent, now_ns: int, worker: int) -> HostEnd:
    """Handles the end of a worker's process."""
    return host._replace(living=host.living - {worker}), ()


def kill(host: HostAgent, now_ns: int, worker: int) -> HostEnd:
    """Ends a worker that the coordinator has put out."""
    return _kill_all(host, now_ns, [worker], "")


def give_up(host: HostAgent, now_ns: int, worker: int, why: str) -> HostEnd:
    """Ends a worker that is no member and has had its time; `why` goes into the records."""
    return _kill_all(host, now_ns, [worker], why)


def _kill_all(host: HostAgent, now_ns: int, workers: Iterable[int], why: str) -> HostEnd:
    due = [worker for worker in workers if worker in host.living and worker not in host.killed_ns]
    new = host._replace(killed_ns={**host.killed_ns, **dict.fromkeys(due, now_ns)})
    return new, tuple(KillWorker(worker, why) for worker in due)


def stop(host: HostAgent, now_ns: int, grace_ns: int = STOP_NS) -> HostEnd:
    """Ends the run: all workers are to end within `grace_ns`."""
    if host.is_stopping:
        return host, ()
    latest_ns = host.deadline_ns if host.is_interrupted else inf
    deadline_ns = min(latest_ns, now_ns + grace_ns)
    return host._replace(is_stopping=True, deadline_ns=deadline_ns), (StopWorkers(),)


def let_end(host: HostAgent, now_ns: int, grace_ns: int) -> HostEnd:
    """Waits for the ends of all workers, which may end, and do so within `grace_ns`."""
    return host._replace(deadline_ns=min(host.deadline_ns, now_ns + grace_ns)), ()


def interrupt(host: HostAgent, now_ns: int, grace_ns: int, is_training: bool) -> HostEnd:
    """Ends the run at a signal: after the open step and within `grace_ns`, or at once where no step is open.

    The second signal ends it by force.
    """
    new = host._replace(is_interrupted=True)
    if host.is_interrupted:
        return (new, ()) if host.is_forced else _force(new, now_ns)
    if not is_training:
        return stop(new, now_ns, grace_ns)
    deadline_ns = min(host.deadline_ns, now_ns + grace_ns)
    return new._replace(deadline_ns=deadline_ns), (EndStep(grace_ns),)


def read_clock(host: HostAgent, now_ns: int) -> HostEnd:
    """Handles the deadlines that have passed."""
    late = sorted(worker for worker in host.unsettled if now_ns >= host.killed_ns[worker] + GONE_NS)
    left = tuple(LeaveBehind(worker) for worker in late)
    new, outputs = host._replace(left=host.left | set(late)), tuple[HostOutput, ...]()
    if now_ns >= host.deadline_ns:
        is_over = host.is_stopping or host.is_interrupted
        new, outputs = _force(new, now_ns) if is_over else stop(new, now_ns)
    return new, (*left, *outputs)


def _force(host: HostAgent, now_ns: int) -> HostEnd:
    """Kills every worker that has not ended."""
    why = "the run was interrupted" if host.is_interrupted else "it did not end before its deadline"
    order = () if host.is_stopping else (StopWorkers(),)
    new, kills = _kill_all(host, now_ns, sorted(host.living), why)
    return new._replace(is_stopping=True, is_forced=True, deadline_ns=inf), (*order, *kills)
