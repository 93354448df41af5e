"""The machine of the coordinator: `step(state, input) -> (state, outputs)`, a pure function given by two tables.

    dead worker      coordinator                            other workers
    exits ---------> verdict, written to the store
                     EpochMessage ----------------------->  leave every wait and freeze
                     <------------------- InventoryMessage  report their replicas; begin to form a new group
                     plan document, written to the store
                     PlanMessage ------------------------>  make the plan
                     <--------------------- PlannedMessage  report its digest
                     GoMessage -------------------------->  run the rest of the step
                     <------------------------ VoteMessage  every replica is ready for the optimizer
                     CommitMessage ---------------------->  run the optimizer

Rules: the driver writes a state for which `is_to_be_kept` holds to the store, by compare-and-swap on the state before,
and then carries out the outputs. A message of a worker that is out is ignored: the worker may not know yet that it is
out. Messages without a rule are no matter of the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.core.coordinator.hearing import RULES
from engine.core.coordinator.inputs import CoordinatorInput, Ended, Passed, Resumed, Stopping
from engine.core.coordinator.leaving import looks_at_ways, says_who_stays
from engine.core.coordinator.orders import Decided, commit_record, decide
from engine.core.coordinator.outputs import CoordinatorOutput, Kill, Note, Release, Stop, Tell, Write
from engine.core.coordinator.preparation import noticed
from engine.core.coordinator.state import CoordinatorState, begin
from engine.core.history.run_records import NoticeRecord
from engine.core.membership import protocol
from engine.core.membership.events import (
    Answer,
    Cramped,
    ExitSeen,
    Heard,
    LeaseExpired,
    Notice,
    Restarted,
    TakenOver,
    Tick,
    Wanted,
)
from engine.core.membership.state import Phase
from engine.core.membership.state import begin as begin_membership
from engine.core.message_codec import LastWords, Message


def step(state: CoordinatorState, given: CoordinatorInput) -> Decided:
    """Returns the state after an input, and the outputs to carry out.

    Raises InvariantError for an input that only a bug can cause, DivergedError for a norm that is not finite.
    """
    return _TABLE[type(given)](state, given)


def is_to_be_kept(
    old: CoordinatorState, new: CoordinatorState, given: CoordinatorInput, outputs: tuple[CoordinatorOutput, ...]
) -> bool:
    """Returns whether the new state must be in the store before the outputs are carried out.

    An answer that has no effect is not kept: the next coordinator asks again.
    """
    if new.membership is old.membership or new.membership.decided() == old.membership.decided():
        return False
    is_answer = isinstance(given, Heard) and isinstance(given.message, Answer)
    return not is_answer or any(isinstance(each, Tell | Kill | Release | Stop) for each in outputs)


def _hears(state: CoordinatorState, heard: Heard[Message]) -> Decided:
    rule = RULES.get(type(heard.message))
    if rule is None or heard.worker in state.membership.out:
        return state, ()
    if isinstance(heard.message, LastWords) and heard.worker not in state.membership.members:
        return state, ()  # of a waiting worker: the end of its process is noted
    return rule(state, heard, heard.message)


def _is_noticed(state: CoordinatorState, notice: Notice) -> Decided:
    worker, grace_ns = notice.worker, notice.grace_ns
    if worker is None:
        return decide(state, notice)
    state = state._replace(
        preparation=noticed(state.preparation, worker, notice.now_ns + grace_ns, state.membership.committed),
        graces_ns={**state.graces_ns, worker: grace_ns},
    )
    record = NoticeRecord(of=worker, grace_s=grace_ns / 1e9)
    new, outputs = decide(state, notice)
    new, told = says_who_stays(new)
    new, parting = looks_at_ways(new, notice.now_ns)
    return new, (Write(record), *outputs, *told, *parting)


def _ends(state: CoordinatorState, ended: Ended) -> Decided:
    worker = ended.worker
    known = state._replace(codes={**state.codes, worker: ended.code})
    if ended.at is not None:
        known = known._replace(places={**state.places, worker: ended.at})
    words = state.raised[worker].words if worker in state.raised else ""
    return decide(known, ExitSeen(ended.now_ns, worker, ended.code, words))


def _passes(state: CoordinatorState, passed: Passed) -> Decided:
    known = state._replace(places={**state.places, **passed.places})
    new, outputs = decide(known, Tick(passed.now_ns, passed.sights, passed.unseen, passed.words))
    if not new.membership.leaving:
        return new, outputs
    new, told = says_who_stays(new) if new.membership.phase is Phase.RUNNING else (new, ())
    new, parting = looks_at_ways(new, passed.now_ns)
    return new, (*outputs, *told, *parting)


def _takes_over(state: CoordinatorState, taken: TakenOver) -> Decided:
    """Writes the last commit again: its record may be missing. The coming epoch tells it to the workers again.

    The user of this host has not heard of deadly hosts.
    """
    new, outputs = decide(state, taken)
    warning = [Note(state.deadly)] if state.deadly else []
    return new, (*([Write(commit_record(state))] if state.commit else []), *outputs, *warning)


def _is_restarted(state: CoordinatorState, restarted: Restarted) -> Decided:
    """Forgets all that the ended workers have said."""
    membership, _ = protocol.step(state.membership, restarted)
    return begin(state.job, membership, restarted.now_ns)._replace(restarts=state.restarts), ()


def _is_resumed(state: CoordinatorState, resumed: Resumed) -> Decided:
    """Begins again after the step of a checkpoint; the epochs go on."""
    options = replace(state.membership.options, begun=resumed.committed)
    last_step = state.job.steps - 1
    membership = begin_membership(options, resumed.owners, resumed.shadows, last_step, resumed.now_ns)
    return begin(state.job, membership._replace(epoch=state.membership.epoch), resumed.now_ns), ()


def _stops(state: CoordinatorState, stopping: Stopping) -> Decided:
    return state._replace(is_stopping=True), ()


_TABLE: dict[type[CoordinatorInput], Callable[[CoordinatorState, Any], Decided]] = {
    Heard: _hears,
    Ended: _ends,
    Passed: _passes,
    Stopping: _stops,
    Notice: _is_noticed,
    Wanted: decide,
    Cramped: decide,
    LeaseExpired: decide,
    TakenOver: _takes_over,
    Restarted: _is_restarted,
    Resumed: _is_resumed,
}
