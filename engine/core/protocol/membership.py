"""The membership protocol: `step(state, event) -> (state, effects)`, a pure function given by one table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.core.errors import Impossible, InvariantError
from engine.core.message_kinds import Message
from engine.core.messages import FinishedMessage, HeartbeatMessage, ReadyMessage, SuspicionMessage, WaitingMessage
from engine.core.program.inventory import InventoryMessage, PlanMessage, PlannedMessage
from engine.core.protocol.events import (
    Answer,
    Departure,
    Event,
    ExitSeen,
    HandOver,
    JobRestart,
    LeaseExpired,
    MemoryShortage,
    Notice,
    StepCommitted,
    Takeover,
    Tick,
    WantedOwners,
    WorkerWord,
)
from engine.core.protocol.state import GATHERING, Phase, Rule, State, is_unknown
from engine.core.protocol.transitions import (
    agrees,
    changes_nothing,
    commits,
    departs,
    ends,
    ends_early,
    hands_over,
    is_done,
    is_heard,
    is_inventoried,
    is_restarted,
    joins,
    joins_first,
    leaves,
    leaves_early,
    looks_at_clock,
    loses_node,
    loses_node_early,
    must_wait,
    suspects,
    takes_over,
    takes_over_at_end,
    takes_over_early,
    waits,
    wants,
)

# Effects of the membership protocol: its orders to workers and agents, a pure function of the state.
#
# Rules: an effect has the number of its epoch, and states a result, which it finds in the state. Transitions only
# change the state. An order that is new is sent at once; all orders are repeated if the job makes no progress. An order
# that was lost, sent twice, or decided by a coordinator that has ended therefore needs no rule.


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect, in the epoch that it belongs to."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PublishEpoch(Effect):
    """Tells every worker the members of the epoch; while they gather, each freezes and answers with its inventory."""


@dataclass(frozen=True, slots=True)
class PublishPlanInput(Effect):
    """Sends every member the document of the plan; each answers with the digest of its plan."""

    document: PlanMessage


@dataclass(frozen=True, slots=True)
class StartTraining(Effect):
    """Every member runs its plan; in the first epoch, its program."""


@dataclass(frozen=True, slots=True)
class AnnounceCommit(Effect):
    """`step` is committed; `then` the next step begins, the job ends, or all members wait for another epoch."""

    step: int
    then: Literal["step", "end", "epoch"]


@dataclass(frozen=True, slots=True)
class Evict(Effect):
    """The agent of `worker` kills it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Fence(Effect):
    """Tells `worker`, whose messages are ignored, the current epoch."""

    worker: int


@dataclass(frozen=True, slots=True)
class OrderRestart(Effect):
    """No step is committed: all workers are ended, and then started again."""


@dataclass(frozen=True, slots=True)
class Halt(Effect):
    """The job ends before its last step is committed."""


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """Every step is committed and all workers may exit; `cut_short` is the reason if later work is incomplete."""

    cut_short: str = ""


def pending_effects(state: State) -> tuple[Effect, ...]:
    """Returns all effects that are due in this state, in the order of sending."""
    epoch, phase = state.epoch, state.phase
    if phase is Phase.HALTED:
        return (Halt(epoch),)
    if phase is Phase.FINISHED:
        is_whole = state.members and len(state.done) == len(state.members)
        return (Finish(epoch, "" if is_whole else state.reason),)
    if phase is Phase.RESTARTING:
        return (OrderRestart(epoch),)
    found: list[Effect] = []
    if phase is Phase.RECONFIGURING:
        found.append(AnnounceCommit(epoch - 1, state.committed, "epoch"))  # ends the previous epoch
    if epoch and phase is not Phase.FORMING:  # after a restart
        found.append(PublishEpoch(epoch))
    found += (Evict(epoch, worker) for worker in (*state.out, *state.lost) if worker not in state.exited)
    if phase in GATHERING:
        found += _gathering(state)
    elif phase is not Phase.FORMING:
        found.append(StartTraining(epoch))
        if state.committed >= 0:
            found.append(AnnounceCommit(epoch, state.committed, "end" if phase is Phase.DRAINING else "step"))
    return tuple(found)


def _gathering(state: State) -> list[Effect]:
    if len(state.inventories) < len(state.members):
        return []
    return [PublishPlanInput(state.epoch, plan_document(state))]


def _hosts(state: State) -> tuple[int, ...]:
    """Returns a number for the host of each member, by which the members place shadows; empty if all are on one."""
    nodes = [state.nodes.get(worker, "") for worker in state.members]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[node] for node in nodes) if len(numbers) > 1 else ()


def plan_document(state: State) -> PlanMessage:
    """Returns the input of the plan of this epoch, once all inventories have come."""
    return PlanMessage(
        state.epoch,
        state.committed,
        state.members,
        state.leaving_at_start,
        state.owners,
        state.shadows,
        wanted=state.wanted_at_start,
        hosts=_hosts(state),
        inventories=tuple(sorted(state.inventories.items())),
    )


# The membership protocol: `step(state, event) -> (state, effects)`, a pure function given by one table.
#
# Rules: the rule for an event is `TABLE[phase, type of event]`, for a worker's message `TABLE[phase, type of message]`.
# A rule changes only the state. The effects are the new `pending_effects` of the state; if the job makes no progress,
# all orders are repeated. Messages of a worker that is out, and answers from another epoch, are ignored. The
# coordinator writes the new state by compare-and-swap before it carries out an effect; a coordinator that has been
# replaced fails at this write and does nothing. An event from before the coordinator watched is one that it is told
# again, after the end of another: it counts as of the beginning of its watch.

_UNASKED = Impossible("no worker is asked for an answer before the first epoch")
_UNTRAINED = Impossible("no worker trains before the first epoch")
_UNDONE = Impossible("no worker is done before the last step is committed, and with that commit the job drains")
_FROZEN = changes_nothing  # an inventory freezes its worker: not even a commit is accepted
_LATE = changes_nothing  # it repeats an answer that has been counted
_OVER = changes_nothing  # the job has ended, or is about to
_ENDING = changes_nothing  # the worker is being ended, and will be another process
_STARTED = Impossible("workers are started again only while the job waits for it")
_UNLOST = changes_nothing  # no worker has voted, and the agents tell again of every worker that has joined

_COLUMNS = (
    (Phase.FORMING,),
    (Phase.RESTARTING,),
    (Phase.RUNNING,),
    (Phase.FAILING_OVER, Phase.RECONFIGURING),
    (Phase.DRAINING,),
    (Phase.FINISHED, Phase.HALTED),
)
# fmt: off
_ROWS: dict[type[Event] | type[Message], tuple[Rule | Impossible, ...]] = {
    #                  forming         restarting    running         gathering       draining        over
    ReadyMessage:     (joins_first,    _ENDING,      joins,          joins,          joins,          _OVER),
    WaitingMessage:   (waits,          _ENDING,      waits,          waits,          waits,          _OVER),
    HeartbeatMessage: (is_heard,       _ENDING,      is_heard,       is_heard,       is_heard,       _OVER),
    SuspicionMessage: (suspects,       _ENDING,      suspects,       suspects,       suspects,       _OVER),
    ExitSeen:         (ends_early,     _ENDING,      ends_early,     ends,           ends,           _OVER),
    LeaseExpired:     (loses_node_early, _ENDING,    loses_node_early, loses_node,   loses_node,     _OVER),
    InventoryMessage: (_UNASKED,       _ENDING,      _LATE,          is_inventoried, _LATE,          _OVER),
    PlannedMessage:   (_UNASKED,       _ENDING,      _LATE,          agrees,         _LATE,          _OVER),
    StepCommitted:    (_UNTRAINED,     _ENDING,      commits,        _FROZEN,        _LATE,          _OVER),
    Notice:           (leaves_early,   leaves_early, leaves,         leaves,         _OVER,          _OVER),
    HandOver:         (_UNTRAINED,     _ENDING,      hands_over,     _FROZEN,        _OVER,          _OVER),
    Departure:        (_UNTRAINED,     _ENDING,      departs,        _FROZEN,        _OVER,          _OVER),
    WantedOwners:           (wants,          _ENDING,      wants,          wants,          _OVER,          _OVER),
    MemoryShortage:          (must_wait,      _ENDING,      must_wait,      must_wait,      must_wait,      _OVER),
    FinishedMessage:  (_UNASKED,       _ENDING,      _UNDONE,        _UNDONE,        is_done,        _OVER),
    Tick:             (looks_at_clock, _ENDING,      looks_at_clock, looks_at_clock, looks_at_clock, _OVER),
    Takeover:        (_UNLOST,        _UNLOST,      takes_over_early, takes_over,   takes_over_at_end, _OVER),
    JobRestart:        (_LATE,          is_restarted, _STARTED,       _STARTED,       _STARTED,       _OVER),
}
# fmt: on


def _in_phase(phase: Phase, cell: Rule | Impossible) -> Rule | Impossible:
    """Returns the cell of one phase: if every step is committed, a job that cannot go on is finished, not halted."""
    if isinstance(cell, Impossible) or Phase.HALTED not in cell.leads_to:
        return cell
    others = tuple(target for target in cell.leads_to if target is not Phase.HALTED)
    if phase is Phase.DRAINING:
        return Rule(cell.decide, (*others, Phase.FINISHED))
    return Rule(cell.decide, (*others, Phase.FINISHED, Phase.HALTED)) if phase in GATHERING else cell


TABLE: dict[tuple[Phase, type[Event] | type[Message]], Rule | Impossible] = {
    (phase, event): _in_phase(phase, cell)
    for event, row in _ROWS.items()
    for phases, cell in zip(_COLUMNS, row, strict=True)
    for phase in phases
}


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """Returns the state after an event, and the effects to carry out.

    Raises InvariantError if the event is impossible in this phase.
    """
    if event.now_ns < state.watched_ns:
        event = replace(event, now_ns=state.watched_ns)
    about: Event | Message = event
    if isinstance(event, WorkerWord):
        about = event.message
        waits = isinstance(about, WaitingMessage)
        waits = waits or (event.worker in state.waiting and isinstance(about, HeartbeatMessage))
        is_past = isinstance(about, Answer) and about.epoch < state.epoch
        if (event.worker not in state.members and not waits) or is_past:
            # A newcomer that is still being started is no member yet.
            return state, () if is_unknown(state, event.worker) else (Fence(state.epoch, event.worker),)
    if isinstance(about, Answer | StepCommitted) and about.epoch != state.epoch:
        return state, ()  # late if the epoch is lower; if it is higher, this coordinator has been replaced
    rule = TABLE[state.phase, type(about)]
    if isinstance(rule, Impossible):
        raise InvariantError(f"{type(about).__name__} while {state.phase}: {rule.reason}")
    new = rule.decide(state, event)
    if isinstance(event, Tick) and _is_quiet(new, event.now_ns):
        return new._replace(repeated_ns=event.now_ns), pending_effects(new)
    if isinstance(event, Takeover):
        return new, pending_effects(new)
    if new.decided() == state.decided():
        return new, ()
    before = pending_effects(state)
    return new, tuple(order for order in pending_effects(new) if order not in before)


def _is_quiet(state: State, now_ns: int) -> bool:
    return now_ns - max(state.moved_ns, state.repeated_ns) >= state.options.repeat_ns
