"""The state of the membership protocol: one immutable value with all that a coordinator needs to continue.

Rules: the state round-trips to JSON (`engine/codec/documents.py`), so that the next coordinator can resume it from the
store. Times that decide are left out: they belong to the monotonic clock of one coordinator. The state is a named
tuple, because simulations copy it millions of times and a data class takes seven times as long to copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from engine.core.deadlines import BACK, SILENT
from engine.core.exclusion import Cause, Exclusion, Verdict, excluded
from engine.core.protocol.events import Evidence, Loading

# Broken edges: pairs of workers between which transfers fail, and the order in which their ends are suspected.
#
# Rule: the end of an edge that reports it is suspected after the other end, because a worker with a fault of its own
# breaks transfers of several others. A worker at no broken edge is never suspected.


class Edge(NamedTuple):
    """A pair between which a transfer failed at `worker`; `peer` is `worker` itself if the other end is unknown."""

    worker: int
    peer: int


def ends_of(edges: Collection[Edge]) -> tuple[int, ...]:
    """Returns the ends of all edges, in the order of their numbers."""
    return tuple(sorted({end for edge in edges for end in edge}))


def by_suspicion(edges: Collection[Edge]) -> tuple[int, ...]:
    """Returns the ends, first those with the most edges, then those that others report, then the highest number."""
    others = {end: {other for edge in edges if end in edge for other in edge} for end in ends_of(edges)}
    reports = {end: sum(edge.peer == end != edge.worker for edge in edges) for end in others}
    return tuple(sorted(others, key=lambda end: (len(others[end]), reports[end], end), reverse=True))


# Standstill: all members wait, and some messages between two of them were sent and are not received.
#
#     A: "I have sent B 7 messages"     B: "I expect 6 or more from A, and have 5"     the edge between them is dark
#
# Rules: no edge is judged while a member is inside an action, loads data, is stopped or does not answer: the others may
# wait for that member only. A report is about one epoch, and the time since the worker's last news. A connection that
# heals within the deadline brings news, so the time begins again.

LEAST_QUIET_NS = 250_000_000  # of a worker that reports
_DARK_NS = 2_000_000_000
_DARK_STEPS = 20
_NUM_STEPS = 10  # of which the median is the usual one, although failures made some of them long


class Counts(NamedTuple):
    """The messages to and from another member since the group was formed."""

    peer: int
    sent: int
    posted: int  # receives that were begun
    received: int


class Report(NamedTuple):
    """What a worker says that waits: for how long it has had no news, and its counts."""

    epoch: int
    quiet_ns: int
    counts: tuple[Counts, ...]


def steps_after(steps_ns: tuple[int, ...], step_ns: int) -> tuple[int, ...]:
    """Returns the durations of the last steps after one more."""
    return (*steps_ns, step_ns)[-_NUM_STEPS:]


def deadline_ns(steps_ns: tuple[int, ...]) -> float:
    """Returns the time after which an edge is dark: two seconds, or twenty usual steps."""
    return max(_DARK_NS, _DARK_STEPS * median(steps_ns)) if steps_ns else _DARK_NS


def dark_edges(reports: Mapping[int, Report | None], epoch: int, least_quiet_ns: float) -> tuple[Edge, ...]:
    """Returns the dark edges, each with the end that waits first; `reports` has all members, None without a report."""
    counts: dict[tuple[int, int], Counts] = {}
    for worker, report in reports.items():
        if report is None or report.epoch != epoch or report.quiet_ns < least_quiet_ns:
            return ()
        counts |= {(worker, each.peer): each for each in report.counts}
    return tuple(
        Edge(worker, peer)
        for (worker, peer), here in counts.items()
        if (there := counts.get((peer, worker))) and min(there.sent, here.posted) > here.received
    )


_S = 1_000_000_000


class Phase(StrEnum):
    """The phase of a job."""

    FORMING = "forming"  # the workers join
    RESTARTING = "restarting"  # a worker has died before the first commit: all workers end, and are started again
    RUNNING = "running"
    FAILING_OVER = "failing over"  # after a verdict, which may be empty
    RECONFIGURING = "reconfiguring"  # at a step boundary, without a failure: a hand-over or a departure
    DRAINING = "draining"  # the last step is committed; the work after it is in progress
    FINISHED = "finished"
    HALTED = "halted"


GATHERING = (Phase.FAILING_OVER, Phase.RECONFIGURING)  # inventories, then the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parameters of the protocol, as `first_state` sets them: `stages` of a pipeline, in shards if `sharded`."""

    stages: int
    redundant: bool
    sharded: bool = False
    noun: str = "stage"  # for a slot of a pipeline, in texts
    form_ns: int = 60 * _S  # until every worker has joined; ten minutes in a job
    hail_ns: int = 60 * _S  # until the first message of each worker
    answer_ns: int = 10 * _S  # until every member has reported its inventory, and again until it has made the plan
    stall_ns: int = 60 * _S  # with all workers waiting: after it, a message must have been lost
    silence_ns: int = 5 * _S  # without a heartbeat
    waiting_ns: int = 15 * _S  # the same, of a waiting worker, which is asked seldom
    hang_ns: int = _S  # inside one action without running, at least; adaptive above that:
    hang_factor: int = 10  # times the slowest action of the worker in this step and the one before
    running_factor: int = 5  # times as long for a worker that runs: inside one action, or silent
    first_ns: int = 30 * _S  # the same, of a worker that has come to the end of no action, or that no agent sees
    look_ns: int = _S // 5  # from a suspicion until an end of a worker would have been seen
    repeat_ns: int = _S // 2  # without progress until the orders are repeated
    max_repeats: int = 3  # empty verdicts for one symptom without a commit in between
    max_restarts: int = 0  # of the workers, before the first commit
    workers: int = 0  # of the job: waiting workers make up for those that are missing, without a failure, too
    most_workers: int = 0  # that train at the same time, 0 without a limit: others wait on
    begun: int = -1  # the last step that was committed before the job began, of its checkpoint; -1 for none


_USUAL = Options(stages=0, redundant=False)
_WAITED = ("stall_ns", "silence_ns", "hang_ns", "first_ns")


@cache
def _with_short_deadlines(options: Options) -> Options:
    most = {name: min(getattr(options, name), getattr(_USUAL, name)) for name in _WAITED}
    return replace(options, **most)


@cache
def _followed(options: Options, round_trip_ns: int) -> Options:
    silence_ns, look_ns = options.silence_ns + SILENT.more(round_trip_ns), options.look_ns + BACK.more(round_trip_ns)
    return replace(options, silence_ns=silence_ns, look_ns=look_ns)


class Sighting(NamedTuple):
    """The last heartbeat of a worker; `at` is (epoch, step, index, waiting) and never decreases."""

    heard_ns: int
    since_ns: int  # since when it is at this position
    at: tuple[int, int, int, bool] = (0, 0, 0, True)
    slowest_ns: int = 0  # its slowest action in this step
    slowest_before_ns: int = 0  # its slowest action in the previous step
    evidence: Evidence | None = None
    report: Report | None = None  # with the last heartbeat, if the worker waits without news
    device: str = ""  # with the last heartbeat, of this position: the worker's GPU, which has not ended its work

    @property
    def is_inside(self) -> bool:
        """Whether the worker is inside an action and does not wait."""
        return not self.at[3]

    @property
    def known_slowest_ns(self) -> int:
        """The slowest action of this step and the one before; 0 if it has come to the end of none."""
        return self.evidence.sight.slowest_ns if self.evidence else max(self.slowest_ns, self.slowest_before_ns)

    @property
    def loading(self) -> Loading:
        """The thread of the worker that loads data, as far as an agent has seen."""
        return self.evidence.sight.loading if self.evidence else Loading.NONE

    def later(self, by_ns: int, now_ns: int) -> Sighting:
        """Returns the sighting with all times later by the time without a watch, and `now_ns` at most."""
        seen = self.evidence
        if seen is not None:
            ran_ns, worked_ns = min(now_ns, seen.ran_ns + by_ns), min(now_ns, seen.worked_ns + by_ns)
            seen = seen._replace(ran_ns=ran_ns, worked_ns=worked_ns)
        heard_ns, since_ns = min(now_ns, self.heard_ns + by_ns), min(now_ns, self.since_ns + by_ns)
        return self._replace(heard_ns=heard_ns, since_ns=since_ns, evidence=seen)

    def with_new_deadlines(self, now_ns: int) -> Sighting:
        """Returns the sighting with all deadlines begun again."""
        return self.later(now_ns, now_ns)

    def ages_s(self, now_ns: int) -> tuple[float, float]:
        """Returns the seconds since the last message, and those inside the present action; 0 if the worker waits."""
        return (now_ns - self.heard_ns) / 1e9, (now_ns - self.since_ns) / 1e9 if self.is_inside else 0.0


class State(NamedTuple):
    """All decisions so far. Slots are numbered as in `Ownership`; mappings are by worker and never modified."""

    options: Options
    owners: tuple[int, ...]  # of each slot; an owner that is no member left no known replica
    shadows: tuple[tuple[int, ...], ...]  # of each slot, in the order of succession
    members: tuple[int, ...]
    last_step: int
    phase: Phase = Phase.FORMING
    epoch: int = 0
    committed: int = -1  # the last committed step, -1 before step 0
    began: tuple[int, ...] = ()  # the owners when the open step began
    verdict: Verdict = ()  # the workers that are out with this epoch
    reason: str = "the job begins"  # of this epoch, or of the halt
    planned: bool = False  # this epoch was made at a step boundary for a notice or a move: no worker has failed
    out: Mapping[int, Exclusion] = {}  # the workers that were ever out
    exited: tuple[int, ...] = ()  # workers whose exit was seen or is certain; other workers that are out are evicted
    nodes: Mapping[int, str] = {}  # of the workers that have joined
    inventories: Mapping[int, str] = {}  # of this epoch
    copies: Mapping[int, tuple[int, ...]] = {}  # of this epoch: the slots of which each member holds a whole replica
    digests: Mapping[int, str] = {}  # of this epoch's plan
    done: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()  # workers that have given notice
    patient: tuple[int, ...] = ()  # those of them that have time, as of the last commit
    leaving_at_start: tuple[int, ...] = ()  # workers that had given notice when this epoch was made
    going: tuple[int, ...] = ()  # those of them that hand over inside the step, and not at its boundary
    wanted: tuple[int, ...] = ()  # the wanted owner of each slot; empty: the present ones
    wanted_why: str = ""
    wanted_at_start: tuple[int, ...] = ()  # as it was when this epoch was made
    schedule: str = ""  # of the open step; empty: the job's own
    wanted_schedule: str = ""  # of the steps behind the next boundary
    schedule_why: str = ""
    look: tuple[Edge, ...] = ()  # the failed transfers of this epoch; a look is open if there is one
    repeats: Mapping[str, int] = {}  # by symptom: empty verdicts since the last commit
    waiting: tuple[int, ...] = ()  # workers that are ready, and no members
    eager: tuple[int, ...] = ()  # those of them, and of the members before, that join without a failure, too
    cramped: Mapping[int, str] = {}  # workers that must wait, and why: their memory does not suffice for one slot
    lost: Mapping[int, Exclusion] = {}  # the workers that were lost before they became members
    restarts: int = 0  # of the workers, so far
    exit_code: int = 0
    lost_stages: tuple[int, ...] = ()
    # The following times are on this coordinator's clock.
    moved_ns: int = 0  # when the job last made progress
    repeated_ns: int = 0  # when the orders were last repeated
    looked_ns: int = 0  # when the look began
    ticked_ns: int = 0
    watched_ns: int = 0  # since when it watches without a break: no time before that counts against a worker
    committed_ns: int = 0
    steps_ns: tuple[int, ...] = ()  # the durations of the last steps
    sightings: Mapping[int, Sighting] = {}
    round_trip_ns: int = 0  # the worst one to other hosts lately

    @property
    def is_over(self) -> bool:
        """Whether every step is committed, so that only the work after the last one can be lost."""
        return self.committed >= self.last_step

    @property
    def wanted_moves(self) -> dict[int, int]:
        """The wanted owner of each slot that moves, unless it is out or leaving; all wait for a wanted joiner."""
        is_due = self.wanted and not self.awaits_joiners
        slots = enumerate(zip(self.owners, self.wanted, strict=True)) if is_due else ()
        return {
            slot: worker
            for slot, (owner, worker) in slots
            if worker != owner and worker in self.members and worker not in self.leaving
        }

    @property
    def changes_schedule(self) -> bool:
        """Whether another schedule is to replace that of the open step behind it."""
        return self.wanted_schedule != self.schedule

    @property
    def joiners(self) -> tuple[int, ...]:
        """The waiting workers that join without a failure: those that want it, and as many more as are missing."""
        return self.joiners_for(self.options.workers)

    def joiners_for(self, workers: int) -> tuple[int, ...]:
        """Returns the waiting workers that join a job of so many workers: those that want it, and those it lacks."""
        if not self.waiting:
            return ()
        able = self.able_to_join
        staying = len([worker for worker in self.members if worker not in self.leaving])
        room = max(0, self.options.most_workers - staying) if self.options.most_workers else len(able)
        eager = [worker for worker in able if worker in self.eager][:room]
        missing = max(0, workers - staying - len(eager))
        others = [worker for worker in able if worker not in self.eager]
        return tuple(sorted((*eager, *others[:missing])))

    @property
    def able_to_join(self) -> tuple[int, ...]:
        """The waiting workers whose memory suffices for one slot, as far as it is known."""
        return tuple(worker for worker in self.waiting if worker not in self.cramped) if self.cramped else self.waiting

    @property
    def awaits_inventories(self) -> bool:
        """Whether a verdict was made, and the document of its plan is not."""
        return self.phase is Phase.FAILING_OVER and len(self.inventories) < len(self.members)

    @property
    def awaits_joiners(self) -> bool:
        """Whether a worker that is about to join is wanted as an owner."""
        return bool(self.wanted and self.waiting) and not set(self.wanted).isdisjoint(self.joiners)

    @property
    def patience(self) -> Options:
        """The options with the deadlines of the moment: shorter ones if every step is committed; of the network."""
        options = _with_short_deadlines(self.options) if self.is_over else self.options
        return _followed(options, self.round_trip_ns) if self.round_trip_ns else options

    def has(self, worker: int) -> bool:
        """Returns whether a worker is a member. Members are in order: a message costs no walk through all of them."""
        place = bisect_left(self.members, worker)
        return self.members[place : place + 1] == (worker,)

    def decided(self) -> tuple[object, ...]:
        """Returns all fields but the times."""
        return self[: len(DECIDED)]


_CLOCK = (
    "moved_ns",
    "repeated_ns",
    "looked_ns",
    "ticked_ns",
    "watched_ns",
    "committed_ns",
    "steps_ns",
    "sightings",
    "round_trip_ns",
)
DECIDED = State._fields[: -len(_CLOCK)]


def begin(
    options: Options, owners: tuple[int, ...], shadows: tuple[tuple[int, ...], ...], last_step: int, now_ns: int
) -> State:
    """Returns the initial state: all workers are started, none has joined."""
    members = tuple(sorted(set(owners)))
    first = State(options, owners, shadows, members, last_step, **_just_now((), now_ns))
    return first._replace(committed=options.begun, began=owners)


def _just_now(workers: Iterable[int], now_ns: int) -> dict[str, Any]:
    sightings = {worker: Sighting(now_ns, now_ns) for worker in workers}
    return {**dict.fromkeys(_CLOCK, now_ns), "steps_ns": (), "sightings": sightings}


def again(decided: Mapping[str, Any], now_ns: int) -> State:
    """Returns the state whose fields another coordinator has decided, on this one's clock."""
    joined = (worker for worker in (*decided["members"], *decided["waiting"]) if worker in decided["nodes"])
    return State(**decided, **_just_now(joined, now_ns))


# A rule of the membership protocol: the transition for an event, which a cell of the table names.
@dataclass(frozen=True, slots=True)
class Rule:
    """The transition for an event, and the phases to which it may lead, beside the present one."""

    decide: Callable[[State, Any], State]
    leads_to: tuple[Phase, ...]


def rule(*leads_to: Phase) -> Callable[[Callable[[State, Any], State]], Rule]:
    """Decorates a transition as a `Rule`."""
    return lambda decide: Rule(decide, leads_to)


# Waiting workers: they have code and data, and no slot, rank or vote; an epoch makes them members.
#
# Rules: a verdict takes in as many as it evicts. `State.joiners` join at a step boundary too: their group is formed
# before it (`coordinator_state.py`), and the epoch is prepared. A worker without memory for a slot is cramped: it waits
# until its host's agent says otherwise. The loss of a waiting worker is no epoch, and the number of a lost worker is
# never used again.


def is_unknown(state: State, worker: int) -> bool:
    """Returns whether a worker is neither a member nor waiting, nor was ever one or lost."""
    return not any(worker in known for known in (state.members, state.waiting, state.out, state.lost, state.exited))


def loses(state: State, gone: Iterable[Exclusion]) -> State:
    """Returns the state without waiting workers that are lost; no member learns of it."""
    lost = {each.worker: each for each in gone}
    waiting = tuple(worker for worker in state.waiting if worker not in lost)
    cramped = {worker: why for worker, why in state.cramped.items() if worker not in lost} if state.cramped else {}
    return state._replace(waiting=waiting, cramped=cramped, lost={**state.lost, **lost}) if lost else state


def loses_silent(state: State, now_ns: int) -> State:
    """Returns the state without waiting workers that have not answered for too long."""
    if not state.waiting:
        return state
    late = {worker: now_ns - state.sightings[worker].heard_ns for worker in state.waiting}
    return loses(
        state,
        [
            excluded(worker, Cause.SILENCE, f"has been silent for {silent_ns / 1e9:.1f} s")
            for worker, silent_ns in late.items()
            if silent_ns > state.options.waiting_ns
        ],
    )
