"""The membership protocol: `step(state, event) -> (state, effects)`, a pure function given by one table.

Rules: the rule for an event is `TABLE[phase, type of event]`, for a worker's message `TABLE[phase, type of message]`. A
rule changes only the state. The effects are the new `pending_effects` of the state; if the job makes no progress, all
orders are repeated. Messages of a worker that is out, and answers from another epoch, are ignored. The coordinator
writes the new state by compare-and-swap before it carries out an effect; a coordinator that has been replaced fails at
this write and does nothing. An event from before the coordinator watched is one that it is told again, after the end of
another: it counts as of the beginning of its watch.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.errors import Impossible, InvariantError
from engine.core.membership.effects import Effect, Fence, pending_effects
from engine.core.membership.events import (
    Answer,
    Cramped,
    Departure,
    Event,
    ExitSeen,
    HandOver,
    Heard,
    LeaseExpired,
    Notice,
    Restarted,
    StepCommitted,
    TakenOver,
    Tick,
    Wanted,
)
from engine.core.membership.parting import departs, hands_over
from engine.core.membership.requests import leaves, leaves_early, must_wait, waits, wants
from engine.core.membership.rule import Rule
from engine.core.membership.state import GATHERING, Phase, State
from engine.core.membership.transitions import (
    agrees,
    changes_nothing,
    commits,
    ends,
    ends_early,
    is_done,
    is_heard,
    is_inventoried,
    is_restarted,
    joins,
    joins_first,
    looks_at_clock,
    loses_node,
    loses_node_early,
    suspects,
    takes_over,
    takes_over_at_end,
    takes_over_early,
)
from engine.core.membership.waiting import is_unknown
from engine.core.message_codec import Message
from engine.core.messages import FinishedMessage, HeartbeatMessage, ReadyMessage, SuspicionMessage, WaitingMessage
from engine.core.recovery.plan_messages import InventoryMessage, PlannedMessage

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
    Wanted:           (wants,          _ENDING,      wants,          wants,          _OVER,          _OVER),
    Cramped:          (must_wait,      _ENDING,      must_wait,      must_wait,      must_wait,      _OVER),
    FinishedMessage:  (_UNASKED,       _ENDING,      _UNDONE,        _UNDONE,        is_done,        _OVER),
    Tick:             (looks_at_clock, _ENDING,      looks_at_clock, looks_at_clock, looks_at_clock, _OVER),
    TakenOver:        (_UNLOST,        _UNLOST,      takes_over_early, takes_over,   takes_over_at_end, _OVER),
    Restarted:        (_LATE,          is_restarted, _STARTED,       _STARTED,       _STARTED,       _OVER),
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
    if isinstance(event, Heard):
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
    if isinstance(event, TakenOver):
        return new, pending_effects(new)
    if new.decided() == state.decided():
        return new, ()
    before = pending_effects(state)
    return new, tuple(order for order in pending_effects(new) if order not in before)


def _is_quiet(state: State, now_ns: int) -> bool:
    return now_ns - max(state.moved_ns, state.repeated_ns) >= state.options.repeat_ns
