"""The machine of a host agent: it lets the workers of its host end, kills them, and names those that stay.

    stop, let_end, interrupt --> deadline --> SIGKILL --> 10 s --> the process is left behind

Each public function handles one kind of input: it returns the agent after it, and the outputs in their order.

Rules: a process gets SIGKILL once, by the verdict of the coordinator or after a deadline. A process that is there ten
seconds later is named and left behind, also while training continues; nothing waits for it any more. The agent decides
nothing about training: the first signal asks the coordinator to end the run after the open step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from engine.core.deadlines import BACK, SILENT
from engine.core.errors import InvariantError

_S = 1_000_000_000
GONE_NS = 10 * _S  # from SIGKILL until a process is left behind
STOP_NS = 3 * _S  # from the order to stop to SIGKILL
KEEP_NS = 30 * _S  # the same, where workers first write the last committed step
LAST_NS = 6 * _S // 10  # the same, after a signal of the user, who waits: with the open step's second less than two
TERM_NS = 8 * _S  # the same, after SIGTERM: with the time of the open step, less than the ten seconds of usual senders


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
    """Names a worker whose process survived SIGKILL; nothing waits for it from now on."""

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
    last_ns: int = LAST_NS  # from the end of the open step's time to SIGKILL, if the run was interrupted

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


def interrupt(host: HostAgent, now_ns: int, grace_ns: int, is_training: bool, last_ns: int = LAST_NS) -> HostEnd:
    """Ends the run at a signal: within `grace_ns` after the open step, else at once; by force at the second one."""
    new = host._replace(is_interrupted=True, last_ns=last_ns)
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
        if host.is_stopping:
            new, outputs = _force(new, now_ns)
        elif host.is_interrupted:  # the open step took too long, or its checkpoint does: the last step is kept
            new, outputs = stop(new._replace(deadline_ns=inf), now_ns, host.last_ns)
        else:
            new, outputs = stop(new, now_ns)
    return new, (*left, *outputs)


def _force(host: HostAgent, now_ns: int) -> HostEnd:
    """Kills every worker that has not ended."""
    why = "the run was interrupted" if host.is_interrupted else "it did not end before its deadline"
    order = () if host.is_stopping else (StopWorkers(),)
    new, kills = _kill_all(host, now_ns, sorted(host.living), why)
    return new._replace(is_stopping=True, is_forced=True, deadline_ns=inf), (*order, *kills)


# The time of a host's lease: when it is renewed, and when the host has to end its workers.
#
# Rule: the store cannot let a lease expire before its time has passed since the last renewal was *sent* that was
# answered. A second before that the host ends its workers, so none of them computes when others may act on the loss.
# The times are of a clock that counts the suspension of the host.

MARGIN_NS = _S  # from the end of the workers until the lease may expire
LEAST_S, USUAL_S, MOST_S = 3, 5, 600  # of a lease
_RENEWALS = 10  # in the time of a lease


class LeaseTime(NamedTuple):
    """A lease of `ttl_ns`; its last answered renewal was sent at `sent_ns`."""

    ttl_ns: int
    sent_ns: int

    @property
    def renew_ns(self) -> int:
        """When the next renewal is due."""
        return self.sent_ns + self.ttl_ns // _RENEWALS

    @property
    def end_ns(self) -> int:
        """When the workers have to be ended."""
        return self.sent_ns + self.ttl_ns - MARGIN_NS

    @property
    def longest_call_ns(self) -> int:
        """The longest that a renewal may take: three fit into the time of the lease."""
        return (self.ttl_ns - MARGIN_NS) // 3

    def renewed(self, sent_ns: int) -> LeaseTime:
        """Returns the lease after the answer to a renewal."""
        return self._replace(sent_ns=max(sent_ns, self.sent_ns))


# When a host counts as lost: its stream has ended and is not back, or it is silent.
#
# Rule: a host whose words wait here, because this host is slow to take them, is not silent.

BACK_NS = BACK.usual_ns  # from the end of a stream until it has to be back
SILENT_NS = SILENT.usual_ns


class HostSight(NamedTuple):
    """The last word of a host, the end of its stream if it has ended, and whether its words wait here."""

    heard_ns: int
    ended_ns: int | None = None
    is_waiting: bool = False
    worst_ns: int | None = None  # of the round trips to it

    def why_lost(self, now_ns: int) -> str:
        """Returns why the host counts as lost, in words; empty if it does not."""
        if self.ended_ns is not None and now_ns - self.ended_ns >= BACK.after(self.worst_ns):
            return "its stream has ended"
        if not self.is_waiting and now_ns - self.heard_ns >= (silent_ns := SILENT.after(self.worst_ns)):
            return f"it was silent for {silent_ns / 1e9:.3g} s"
        return ""


# Which host gets which worker: neighbours stand together, because neighbours send the most to each other.
def deal(workers: Sequence[int], hosts: Sequence[str]) -> dict[int, str]:
    """Returns the host of each worker: runs of neighbours, as equal as possible."""
    return {worker: hosts[place * len(hosts) // len(workers)] for place, worker in enumerate(workers)}


def most_on_one(num_workers: int, num_hosts: int) -> int:
    """Returns the workers that the host with the most of them gets."""
    return -(-num_workers // num_hosts)


def host_for_one_more(dealt: Mapping[int, str], hosts: Sequence[str]) -> str:
    """Returns the host for a worker that comes later: the first of those with the fewest workers."""
    placed = [*dealt.values()]
    return min(hosts, key=placed.count)


# The decisions of a run that a host has not heard, and another one that is left has.
#
# Rules: each host has heard a beginning of one list of decisions, so the longest one has all that is left. A commit is
# told to a host before it is told to its workers, so a host with a vote for a step has heard of all steps before it.


def missing_decisions(count: int, stored: Iterable[Mapping[int, str]]) -> tuple[str, ...]:
    """Returns the decisions from `count` on that others have `stored`; raises InvariantError if they differ."""
    lines: dict[int, str] = {}
    for decisions in stored:
        for number, line in decisions.items():
            if lines.setdefault(number, line) != line:
                raise InvariantError(f"two hosts have heard different decisions, both with number {number}")
    following: list[str] = []
    while (line := lines.get(count + len(following), "")) != "":
        following.append(line)
    return tuple(following)
