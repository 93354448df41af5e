"""Orders: the membership protocol decides on events as one, and its effects become outputs.

Rule: an effect states a result and may come again. The second time it has no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import inf
from typing import Any

from engine.core import messages
from engine.core.config.job import is_due
from engine.core.coordinator.equal_ends import put_out, repeated
from engine.core.coordinator.next_group import attempted, ready_joiners
from engine.core.coordinator.outputs import (
    Arm,
    CoordinatorOutput,
    Kill,
    Note,
    Reached,
    Release,
    Restart,
    Stop,
    Tell,
    Write,
)
from engine.core.coordinator.placement import healed_soon, warned_of
from engine.core.coordinator.preparation import looked
from engine.core.coordinator.state import CoordinatorState
from engine.core.errors import ensure, required
from engine.core.exclusion import Cause, Verdict, in_words
from engine.core.history.elastic_records import CrampedRecord
from engine.core.history.process_records import CutShortRecord, RestartRecord, WaitingRecord
from engine.core.history.run_records import CommitRecord, EpochRecord, GoRecord, HeirsRecord, PlanRecord
from engine.core.membership import effects
from engine.core.membership.events import Event
from engine.core.membership.protocol import step
from engine.core.membership.state import GATHERING, Phase, State
from engine.core.message_codec import ToWorker
from engine.core.process_messages import ByeMessage
from engine.core.recovery.ballot import open_ballot

Outputs = tuple[CoordinatorOutput, ...]
Decided = tuple[CoordinatorState, Outputs]
_TRAINING = (Phase.RUNNING, Phase.DRAINING)


def decide(state: CoordinatorState, *events: Event) -> Decided:
    """Returns the state and the outputs after events that are decided as one; a run that is ending ignores them.

    Then lets the workers prepare the epoch of the coming commit.
    """
    if state.is_stopping:
        return state, ()
    membership, due = state.membership, list[effects.Effect]()
    for event in events:
        membership, found = step(membership, event)
        due += found
    new, outputs = _carry_out(state._replace(membership=membership), due)
    outputs = (*outputs, *_waiting(state, membership))
    if membership.decided() == state.membership.decided():
        return new, outputs
    new, orders = prepare(new, events[-1].now_ns)
    return new, (*outputs, *orders)


def prepare(state: CoordinatorState, now_ns: int) -> Decided:
    """Lets the workers form the group of the coming epoch, if others are to join, and prepare its plan."""
    known, outputs = state.membership, list[CoordinatorOutput]()
    if known.waiting or state.next_group.members:
        group, wanted = attempted(state.next_group, known)
        state = state._replace(next_group=group)
        outputs += [] if wanted is None else [tell_waiting_too(state, wanted)]
    joins = ready_joiners(state.next_group, known)
    if state.ballot is None or not (known.leaving or known.wanted or joins):
        return state, tuple(outputs)
    preparation, order = looked(state.preparation, known, state.ballot.ownership, now_ns, joins)
    if order is not None:
        state = state._replace(preparation=preparation)
        outputs.append(tell_waiting_too(state, order) if joins else tell_all(state, order))
    return state, tuple(outputs)


def _waiting(state: CoordinatorState, new: State) -> Iterable[CoordinatorOutput]:
    """Yields the records on workers that now wait or were lost while they waited; lines, if training goes on.

    One that must wait for memory is told, and that it may join again.
    """
    old, ends = state.membership, new.last_step < state.job.steps - 1
    for worker in new.waiting if new.waiting is not old.waiting else ():
        if worker not in old.waiting:
            yield Write(WaitingRecord(of=worker, lost=""))
    for worker in new.waiting if new.cramped or old.cramped else ():
        was = old.cramped.get(worker) if worker in old.waiting else None
        why = new.cramped.get(worker)
        if (why is None) is not (was is None):
            yield Write(CrampedRecord(of=worker, why=why or ""))
            yield Note(f"worker {worker} {why or f'has memory for a {state.job.slot_noun} now, and may join'}")
    for out in new.lost.values() if new.lost is not old.lost else ():
        if out.worker not in old.lost:
            yield Write(WaitingRecord(of=out.worker, lost=out.why))
            if not ends:
                yield Note(f"worker {out.worker}, which was no member yet, {out.why}")


def _carry_out(state: CoordinatorState, due: Iterable[effects.Effect]) -> Decided:
    """Returns the state and the outputs after some effects; a run that ends only kills."""
    outputs: list[CoordinatorOutput] = []
    for effect in due:
        if not state.is_stopping or isinstance(effect, effects.Evict):
            state, found = _CARRY_OUT[type(effect)](state, effect)
            outputs += found
    return state, tuple(outputs)


def tell_all(state: CoordinatorState, message: ToWorker) -> Tell:
    """Returns the order to tell every worker, owners of the first stage first: the others wait for them."""
    known = state.membership
    workers = (*known.members, *(worker for worker in known.out if worker not in known.members))
    return Tell(_first_stage_first(workers, known.owners, known.options.stages), message)


def tell_waiting_too(state: CoordinatorState, message: ToWorker) -> Tell:
    """Returns the order to tell every worker, and those that wait."""
    tell = tell_all(state, message)
    return tell._replace(workers=(*tell.workers, *state.membership.waiting))


@lru_cache(maxsize=256)
def _first_stage_first(workers: tuple[int, ...], owners: tuple[int, ...], stages: int) -> tuple[int, ...]:
    def first_stage(worker: int) -> float:
        return min((place % stages for place, owner in enumerate(owners) if owner == worker), default=inf)

    return tuple(sorted(sorted(workers), key=first_stage))


def stopped(state: CoordinatorState, stop: Stop) -> Decided:
    """Returns the end of the run."""
    return state._replace(is_stopping=True), (stop,)


def _publish_epoch(state: CoordinatorState, effect: effects.PublishEpoch) -> Decided:
    if state.membership.out and not state.started:  # before training there are no heirs, by any coordinator's verdict
        return stopped(state, _not_recovered(state.membership.out.values()))
    if state.epoch is not None and effect.epoch <= state.epoch.epoch:
        return state, ()
    known = state.membership
    epoch = messages.EpochMessage(
        epoch=effect.epoch,
        members=known.members,
        gather=known.phase in GATHERING,
        regroup=known.phase is Phase.FAILING_OVER,
        commit=state.told,  # for a worker whose wait for it ends with the epoch
        digest=None if known.phase in GATHERING else next(iter(known.digests.values()), None),
        go=_go(state) if known.phase in _TRAINING else None,  # then no answer is awaited
        group=state.next_group.number if state.next_group.is_entered and known.phase not in GATHERING else 0,
    )
    record = EpochRecord(
        epoch=effect.epoch,
        members=known.members,
        verdict=known.verdict,
        reason=known.reason,
        planned=known.planned,
        owners=known.owners,
        shadows=known.shadows,
    )
    new = state._replace(epoch=epoch, ballot=None, owners=known.owners)
    outputs = (tell_all(new, epoch), Write(record), Reached("agree", effect.epoch))
    if known.verdict and (stop := repeated(new)):
        return new._replace(is_stopping=True), (*outputs, stop)
    return new, (*outputs, *put_out(new, state.owners))


def _not_recovered(verdict: Iterable[Any]) -> Stop:
    return Stop("training did not recover: " + in_words(verdict))


def _send_plan(state: CoordinatorState, effect: effects.PublishPlanInput) -> Decided:
    if effect.epoch <= state.planned:
        return state, ()
    document = effect.document
    leaving, wanted, hosts = document.leaving, document.wanted, document.hosts
    new = state._replace(planned=effect.epoch, leaving=leaving, wanted=wanted, hosts=hosts, owners=document.owners)
    outputs: list[CoordinatorOutput] = []
    if document.owners != state.owners:  # an heir became known by its inventory
        heirs = HeirsRecord(epoch=effect.epoch, owners=document.owners, shadows=document.shadows)
        outputs.append(Write(heirs))
    is_prepared = state.membership.phase not in GATHERING
    if not is_prepared:
        outputs.append(tell_all(new, document))
    plan = PlanRecord(epoch=effect.epoch, committed=document.committed, prepared=is_prepared)
    # In a prepared epoch no worker sends an inventory.
    reached = (Reached("inventory", effect.epoch), Reached("plan", effect.epoch))
    return new, (*outputs, Write(plan), *reached)


def _start_training(state: CoordinatorState, effect: effects.StartTraining) -> Decided:
    if effect.epoch <= state.started:
        return state, ()
    ballot = open_ballot(effect.epoch, state.membership.committed + 1, state.ownership, state.job.clip_norm)
    new, go = state._replace(started=effect.epoch, ballot=ballot), _go(state)
    epoch = required(state.epoch, "training starts in an epoch")
    told = (tell_all(new, go),) if epoch.go is None else ()
    new, warned = warned_of(new, healed_soon(new, ballot.ownership))
    go_on = Write(GoRecord(epoch=effect.epoch, end=go.end))
    return new, (Arm(), *told, go_on, Reached("replay", effect.epoch), *warned)


def _go(state: CoordinatorState) -> messages.GoMessage:
    """Returns the message that lets workers run their plan."""
    known = state.membership
    end = known.phase is Phase.DRAINING
    return messages.GoMessage(
        end=end,
        validate=known.committed > state.validated
        and is_due(state.job.validate_every, known.committed, known.committed >= known.last_step),
        keep=known.committed >= 0 and (known.committed == state.kept or (end and state.keeping.last)),
    )


def _send_commit(state: CoordinatorState, effect: effects.AnnounceCommit) -> Decided:
    if state.told is not None and effect.step <= state.told.step:
        return state, ()  # it was sent before, or with the epoch
    commit = required(state.commit, "the votes decide on a commit before it is announced")
    ensure(commit.step == effect.step, f"commit of step {commit.step} where {effect.step} is announced")
    told = messages.CommitMessage(commit.step, commit.clip_factor, effect.then, keep=state.kept == commit.step)
    new = state._replace(told=told)
    outputs = (tell_all(new, told), Write(commit_record(new)))
    new, healing = _healing(new, effect.epoch) if effect.then == "step" else (new, ())
    return new, (*outputs, *healing)


def commit_record(state: CoordinatorState) -> CommitRecord:
    """Returns the record of the last commit."""
    commit = required(state.commit, "a step is committed")
    return CommitRecord(**commit._asdict(), last=state.told is not None and state.told.then == "end")


def _healing(state: CoordinatorState, epoch: int) -> Decided:
    """Opens the ballot of the next step with the wanted shadows."""
    last = required(state.ballot, "a ballot is open in training")
    ballot = open_ballot(last.epoch, last.step + 1, healed_soon(state, last.ownership), state.job.clip_norm)
    new, warned = warned_of(state._replace(ballot=ballot), ballot.ownership)
    return new, (Reached("heal", epoch), *warned)


def _evict(state: CoordinatorState, effect: effects.Evict) -> Decided:
    """Ends the process of a worker that is out; one that gave notice while it waited owes nothing, and leaves."""
    lost = state.membership.lost.get(effect.worker)
    if lost is not None and lost.cause is Cause.LEFT:
        return state, (Tell((effect.worker,), ByeMessage()),)
    return state, (Kill(effect.worker),)


def _fence(state: CoordinatorState, effect: effects.Fence) -> Decided:
    return state, (() if state.epoch is None else (Tell((effect.worker,), state.epoch),))


def _halt(state: CoordinatorState, effect: effects.Halt) -> Decided:
    if not state.started:  # no training is lost, so only the verdict counts
        verdict: Verdict = tuple(state.membership.out.values())
        return stopped(state, _not_recovered(verdict))
    return stopped(state, repeated(state) or Stop(state.membership.reason, state.membership.exit_code))


def _restart(state: CoordinatorState, effect: effects.OrderRestart) -> Decided:
    reason, number, most = state.membership.reason, state.membership.restarts, state.membership.options.max_restarts
    if number <= state.restarts:
        return state, ()
    text = f"{reason} before the first commit; all workers are started again ({number} of at most {most})"
    record = RestartRecord(number=number, reason=reason)
    new = state._replace(restarts=number, is_stopping=True)  # nothing that the present workers say counts
    return new, (Write(record), Note(text), Restart())


def _finish(state: CoordinatorState, effect: effects.Finish) -> Decided:
    """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
    bye = () if effect.cut_short else (tell_waiting_too(state, ByeMessage()),)
    if state.is_released:
        return state, bye
    why: Outputs = ()
    if effect.cut_short:
        text = f"every step is committed; the work after the last one ends early: {effect.cut_short}"
        why = (Write(CutShortRecord(reason=effect.cut_short)), Note(text))
    return state._replace(is_released=True), (*bye, *why, Release(effect.cut_short))


_CARRY_OUT: dict[type[effects.Effect], Callable[[CoordinatorState, Any], Decided]] = {
    effects.PublishEpoch: _publish_epoch,
    effects.PublishPlanInput: _send_plan,
    effects.StartTraining: _start_training,
    effects.AnnounceCommit: _send_commit,
    effects.Evict: _evict,
    effects.Fence: _fence,
    effects.Halt: _halt,
    effects.OrderRestart: _restart,
    effects.Finish: _finish,
}
