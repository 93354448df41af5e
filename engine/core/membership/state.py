"""The state of the membership protocol: one immutable value with all that a coordinator needs to continue.

Rules: the state round-trips to JSON, so that the next coordinator can resume it from the store. Times that decide are
left out: they belong to the monotonic clock of one coordinator. The state is a named tuple, because simulations copy it
millions of times and a data class takes seven times as long to copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from engine.core.errors import InvariantError
from engine.core.exclusion import Exclusion, Verdict, exclusion_of, verdict_of
from engine.core.membership.broken_edges import Edge
from engine.core.membership.evidence import Evidence, Loading
from engine.core.membership.standstill import Report

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
    """The parameters of the protocol. `stages` is per pipeline; `redundant` is false if the job has no shadows.

    With `sharded` each pipeline has its own shards of the stages.
    """

    stages: int
    redundant: bool
    sharded: bool = False
    noun: str = "stage"  # for a slot of a pipeline, in texts
    form_ns: int = 60 * _S  # until every worker has joined
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
    begun: int = -1  # the last step that was committed before the job began, of its checkpoint; -1 for none


_USUAL = Options(stages=0, redundant=False)
_WAITED = ("stall_ns", "silence_ns", "hang_ns", "first_ns")


@cache
def _hurried(options: Options) -> Options:
    most = {name: min(getattr(options, name), getattr(_USUAL, name)) for name in _WAITED}
    return replace(options, **most)


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

    def begun_again(self, now_ns: int) -> Sighting:
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

    @property
    def is_over(self) -> bool:
        """Whether every step is committed, so that only the work after the last one can be lost."""
        return self.committed >= self.last_step

    @property
    def wanted_moves(self) -> dict[int, int]:
        """The wanted owner of each slot that another worker owns; an owner that is out or leaving is not wanted.

        A wish that names joiners waits for them as a whole.
        """
        is_due = self.wanted and not self.awaits_joiners
        slots = enumerate(zip(self.owners, self.wanted, strict=True)) if is_due else ()
        return {
            slot: worker
            for slot, (owner, worker) in slots
            if worker != owner and worker in self.members and worker not in self.leaving
        }

    @property
    def joiners(self) -> tuple[int, ...]:
        """The waiting workers that join without a failure: those that want it, and as many more as are missing."""
        if not self.waiting:
            return ()
        able = self.able_to_join
        eager = [worker for worker in able if worker in self.eager]
        staying = len([worker for worker in self.members if worker not in self.leaving])
        missing = max(0, self.options.workers - staying - len(eager))
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
        """The options with the deadlines of the moment: shorter ones if every step is committed."""
        return _hurried(self.options) if self.is_over else self.options

    def decided(self) -> tuple[object, ...]:
        """Returns all fields but the times."""
        return self[:_NUM_DECIDED]


_CLOCK = ("moved_ns", "repeated_ns", "looked_ns", "ticked_ns", "watched_ns", "committed_ns", "steps_ns", "sightings")
_NUM_DECIDED = len(State._fields) - len(_CLOCK)


def begin(
    options: Options, owners: tuple[int, ...], shadows: tuple[tuple[int, ...], ...], last_step: int, now_ns: int
) -> State:
    """Returns the initial state: all workers are started, none has joined."""
    members = tuple(sorted(set(owners)))
    first = State(options, owners, shadows, members, last_step, **_just_now((), now_ns))
    return first._replace(committed=options.begun)


def _just_now(workers: Iterable[int], now_ns: int) -> dict[str, Any]:
    sightings = {worker: Sighting(now_ns, now_ns) for worker in workers}
    return {**dict.fromkeys(_CLOCK, now_ns), "steps_ns": (), "sightings": sightings}


def to_json(state: State) -> str:
    """Returns the state as one line of JSON, without its times."""
    fields = {name: value for name, value in state._asdict().items() if name not in _CLOCK}
    return json.dumps({**fields, "options": asdict(state.options)}, sort_keys=True, separators=(",", ":"))


def resume(text: str, now_ns: int) -> State:
    """Returns the state that another coordinator has written, on this one's clock; its `pending_effects` are due again.

    Raises InvariantError if `text` is no such state.
    """
    try:
        fields = json.loads(text)
        options = Options(**fields.pop("options"))
        phase, verdict = Phase(fields.pop("phase")), verdict_of(fields)
        out, lost = (
            {int(worker): exclusion_of(entry) for worker, entry in fields[name].items()} for name in ("out", "lost")
        )
        look = tuple(Edge(*edge) for edge in fields["look"])
        known = {name: _frozen(value) for name, value in fields.items()} | {
            "verdict": verdict,
            "out": out,
            "lost": lost,
            "look": look,
        }
        joined = [worker for worker in (*known["members"], *known["waiting"]) if worker in known["nodes"]]
        known |= {"options": options, "phase": phase, **_just_now(joined, now_ns)}
        return State(**{name: known.pop(name) for name in State._fields}, **known)  # each field, and no other
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvariantError(f"this is no state of the membership protocol: {error!r}: {text[:200]!r}") from error


def _frozen(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists and integers in place of numeric keys."""
    if isinstance(value, list):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return {int(key) if key.isdigit() else key: _frozen(each) for key, each in value.items()}
    return value
