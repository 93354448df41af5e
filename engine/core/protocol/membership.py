"""The membership protocol: `step(state, event) -> state`, a pure function given by one table."""

from __future__ import annotations

from dataclasses import replace

from engine.core.errors import Impossible, InvariantError
from engine.core.message_kinds import Message
from engine.core.messages import FinishedMessage, HeartbeatMessage, ReadyMessage, SuspicionMessage, WaitingMessage
from engine.core.program.inventory import InventoryMessage, PlanMessage, PlannedMessage
from engine.core.protocol.events import (
    Answer,
    Departure,
    EarlyStop,
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
    WantedSchedule,
    WorkerWord,
)
from engine.core.protocol.state import GATHERING, Phase, Rule, State
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
    stops_early,
    stops_running,
    suspects,
    takes_over,
    takes_over_at_end,
    takes_over_early,
    waits,
    wants,
    wants_schedule,
)


def hosts_of(state: State) -> tuple[int, ...]:
    """Returns a number for the host of each member, by which the members place shadows; empty if all are on one."""
    nodes = [state.nodes.get(worker, "") for worker in state.members]
    # Also of workers that are out: the numbers of hosts stay when another one is lost.
    numbers = {node: number for number, node in enumerate(dict.fromkeys((*state.nodes.values(), "")))}
    return tuple(numbers[node] for node in nodes) if len({*nodes}) > 1 else ()


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
        hosts=hosts_of(state),
        before=state.began,
        inventories=tuple(sorted(state.inventories.items())),
        schedule=state.schedule,
    )


# Rules: the rule for an event is `TABLE[phase, type of event]`, for a worker's message `TABLE[phase, type of message]`.
# A rule changes only the state: `orders.py` makes outputs of what workers and agents have not been told of it.
# Messages of a worker that is out, and answers from another epoch, are ignored.
# The coordinator writes the new state by compare-and-swap before it carries out an output; a coordinator that has been
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
    #                  forming           restarting    running           gathering       draining           over
    ReadyMessage:     (joins_first,      _ENDING,      joins,            joins,          joins,             _OVER),
    WaitingMessage:   (waits,            _ENDING,      waits,            waits,          waits,             _OVER),
    HeartbeatMessage: (is_heard,         _ENDING,      is_heard,         is_heard,       is_heard,          _OVER),
    SuspicionMessage: (suspects,         _ENDING,      suspects,         suspects,       suspects,          _OVER),
    ExitSeen:         (ends_early,       _ENDING,      ends_early,       ends,           ends,              _OVER),
    LeaseExpired:     (loses_node_early, _ENDING,      loses_node_early, loses_node,     loses_node,        _OVER),
    InventoryMessage: (_UNASKED,         _ENDING,      _LATE,            is_inventoried, _LATE,             _OVER),
    PlannedMessage:   (_UNASKED,         _ENDING,      _LATE,            agrees,         _LATE,             _OVER),
    StepCommitted:    (_UNTRAINED,       _ENDING,      commits,          _FROZEN,        _LATE,             _OVER),
    Notice:           (leaves_early,     leaves_early, leaves,           leaves,         _OVER,             _OVER),
    EarlyStop:        (_UNTRAINED,       _ENDING,      stops_running,    stops_early,    _OVER,             _OVER),
    HandOver:         (_UNTRAINED,       _ENDING,      hands_over,       _FROZEN,        _OVER,             _OVER),
    Departure:        (_UNTRAINED,       _ENDING,      departs,          _FROZEN,        _OVER,             _OVER),
    WantedOwners:     (wants,            _ENDING,      wants,            wants,          _OVER,             _OVER),
    WantedSchedule:   (wants_schedule,   _ENDING,      wants_schedule,   wants_schedule, _OVER,             _OVER),
    MemoryShortage:   (must_wait,        _ENDING,      must_wait,        must_wait,      must_wait,         _OVER),
    FinishedMessage:  (_UNASKED,         _ENDING,      _UNDONE,          _UNDONE,        is_done,           _OVER),
    Tick:             (looks_at_clock,   _ENDING,      looks_at_clock,   looks_at_clock, looks_at_clock,    _OVER),
    Takeover:         (_UNLOST,          _UNLOST,      takes_over_early, takes_over,     takes_over_at_end, _OVER),
    JobRestart:       (_LATE,            is_restarted, _STARTED,         _STARTED,       _STARTED,          _OVER),
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


def step(state: State, event: Event) -> State:
    """Returns the state after an event; raises InvariantError if the event is impossible in this phase."""
    if event.now_ns < state.watched_ns:
        event = replace(event, now_ns=state.watched_ns)
    about = event.message if isinstance(event, WorkerWord) else event
    if is_ignored(state, event):
        return state
    if isinstance(about, Answer | StepCommitted) and about.epoch != state.epoch:
        return state  # late if the epoch is lower; if it is higher, this coordinator has been replaced
    rule = TABLE[state.phase, type(about)]
    if isinstance(rule, Impossible):
        raise InvariantError(f"{type(about).__name__} while {state.phase}: {rule.reason}")
    new = rule.decide(state, event)
    is_quiet = event.now_ns - max(new.moved_ns, new.repeated_ns) >= new.options.repeat_ns
    return new._replace(repeated_ns=event.now_ns) if isinstance(event, Tick) and is_quiet else new


def is_ignored(state: State, event: Event) -> bool:
    """Returns whether an event is a message that counts for nothing: of no member, or an answer in an earlier epoch."""
    if not isinstance(event, WorkerWord):
        return False
    worker, message = event.worker, event.message
    waits = isinstance(message, WaitingMessage)
    waits = waits or (worker in state.waiting and isinstance(message, HeartbeatMessage))
    is_past = isinstance(message, Answer) and message.epoch < state.epoch
    return (not state.has(worker) and not waits) or is_past
