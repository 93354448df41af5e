"""Orders: the membership protocol decides on events as one, and its effects become outputs.

Rule: an effect states a result and may come again. The second time it has no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import inf
from typing import Any

from engine.core import messages
from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.errors import GPU_ERROR, ScheduleError, ensure, required
from engine.core.exclusion import Cause, Exclusion, Verdict, in_words
from engine.core.history.process_records import CutShortRecord, RestartRecord, WaitingRecord, WayOutRecord
from engine.core.history.run_records import (
    CommitRecord,
    CrampedRecord,
    EpochRecord,
    GoRecord,
    HeirsRecord,
    PlanRecord,
    StaysRecord,
)
from engine.core.job.job import is_due
from engine.core.message_kinds import ToWorker
from engine.core.messages import ByeMessage, RaisedMessage
from engine.core.program.ballot import open_ballot
from engine.core.protocol import membership as effects
from engine.core.protocol.coordinator_state import (
    CoordinatorState,
    RaisedException,
    attempted,
    healed_soon,
    ready_joiners,
    warned_of,
)
from engine.core.protocol.events import Departure, Event, HandOver
from engine.core.protocol.inputs_outputs import (
    Arm,
    CoordinatorOutput,
    Kill,
    Note,
    PhaseReached,
    Release,
    Restart,
    Stop,
    Tell,
    Write,
)
from engine.core.protocol.membership import step
from engine.core.protocol.preparation import looked, patient
from engine.core.protocol.state import GATHERING, Phase, State
from engine.core.protocol.verdicts import heirs, unable_to_leave
from engine.core.protocol.wishes import LeaveStrategy, departs, has_heirs, until_boundary_ns, way_out
from engine.core.texts import numbered

# The rule of equal ends, and survivable exceptions: when the cause is the user's code, and not a worker.
#
# Rules: a second worker that hangs, or exits with the same code, in the action in which another one did, shows that the
# cause is the user's code: it would end one heir after the other. So does the same exception of a second worker in the
# same step. A worker that an injected fault struck does not count. An error of a GPU is a loss like any death, also of
# a worker without an heir. Several GPUs may fail at once, as behind one switch; but an heir whose GPU has the same
# trouble with the same slots shows that a kernel of the model is the cause. After the last commit no exception ends the
# run: every step is committed, and only results of the last step can be lost.


_PUT_OUT = (Cause.HANG, Cause.SILENCE, Cause.NO_ANSWER)  # of workers whose processes live


def survives(state: CoordinatorState, worker: int, raised: RaisedMessage) -> tuple[CoordinatorState, bool]:
    """Returns the state after an exception of a worker, and whether the run goes on without the worker."""
    exception, membership = raised.exception, state.membership
    slots = tuple(slot for slot, owner in enumerate(membership.owners) if owner == worker)
    entry = RaisedException(raised.step, exception.kind, exception.in_verdict(), slots if exception.gpu else None)
    is_known = not exception.is_injected and any(_is_the_same(entry, each) for each in state.raised.values())
    is_device = exception.gpu.startswith(GPU_ERROR)
    can_go_on = membership.is_over or (not is_known and (is_device or not heirs(membership, (worker,)).lost))
    return state._replace(raised={**state.raised, worker: entry}), can_go_on


def _is_the_same(entry: RaisedException, before: RaisedException) -> bool:
    """Returns whether two exceptions have one cause; of GPUs only if the second worker is an heir of the first."""
    if (entry.step, entry.kind) != (before.step, before.kind):
        return False
    return entry.of_gpu is None or before.of_gpu is None or not set(entry.of_gpu).isdisjoint(before.of_gpu)


def repeated(state: CoordinatorState) -> Stop | None:
    """Returns the end of the run if two workers ended in the same way in the same action."""
    first: dict[tuple[str, int, Action], int] = {}
    for out in state.membership.out.values():
        end, at = _end_of(state, out), _action_of(state, out.worker)
        if end and at is not None and not state.places[out.worker].is_struck:
            other = first.setdefault((end, *at), out.worker)
            if other != out.worker:
                same = f"worker {out.worker} {out.how}{_where(state, out.worker)}, as worker {other} did"
                return Stop(f"{same}: it comes from the user's code, not from a worker", stage=at[1].stage)
    return None


def put_out(state: CoordinatorState, owners: tuple[int, ...]) -> list[Note]:
    """Returns the notes on the workers that the verdict puts out while their processes live.

    `owners` are those before the verdict.
    """
    notes = []
    for out in state.membership.verdict:
        if out.cause in _PUT_OUT:
            places = [place for place, owner in enumerate(owners) if owner == out.worker]
            inherited = {state.membership.owners[place] for place in places} - {out.worker}
            verb = "takes" if len(inherited) == 1 else "take"
            then = f"; {numbered('worker', sorted(inherited), ' and ')} {verb} over" if inherited else ""
            notes.append(Note(f"worker {out.worker} {out.how}{_where(state, out.worker)} and is put out{then}"))
    return notes


def _end_of(state: CoordinatorState, out: Exclusion) -> str:
    code = state.codes.get(out.worker, -1)
    if out.cause is Cause.DEATH and code >= 0:  # signals come from outside
        return f"exit code {code}"
    return "hang" if out.cause is Cause.HANG else ""


def _action_of(state: CoordinatorState, worker: int) -> tuple[int, Action] | None:
    """Returns the step and the compute action in which a worker ended; None in any other action."""
    place = state.places.get(worker)
    if place is None:
        return None
    try:
        action = parse_action(place.action)
    except ScheduleError:  # it had begun none
        return None
    return (place.step, action) if action.op in COMPUTE_OPS else None


def _where(state: CoordinatorState, worker: int) -> str:
    at = _action_of(state, worker)
    return f" in {at[1]} of step {at[0]}" if at else ""


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
    outputs = (tell_all(new, epoch), Write(record), PhaseReached("agree", effect.epoch))
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
    reached = (PhaseReached("inventory", effect.epoch), PhaseReached("plan", effect.epoch))
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
    return new, (Arm(), *told, go_on, PhaseReached("replay", effect.epoch), *warned)


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
    return new, (PhaseReached("heal", epoch), *warned)


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


# Leaving: the way out of each worker that has given notice, said at once, and carried out when its time comes.
#
# Rule: the ways are looked at with each notice and at each tick of the clock. Inside a step a worker hands over only
# while training runs; else the next tick looks again.


def says_who_stays(state: CoordinatorState) -> Decided:
    """Returns the state with the leaving workers that no other worker can replace, and says each once.

    One that can be replaced again, because another worker waits, is looked at as any other.
    """
    staying: dict[int, str] = {}
    outputs: Outputs = ()
    for worker, stages in unable_to_leave(state.membership).items():
        slots, grace_s = numbered(state.job.slot_noun, stages), state.graces_ns.get(worker, 0) / 1e9
        text = f"is to leave within {grace_s:g} s, but no other worker can take over {slots}"
        staying[worker] = text
        if state.staying.get(worker) != text:
            outputs = (*outputs, Note(f"worker {worker} {text}"), Write(StaysRecord(of=worker, text=text)))
    return (state._replace(staying=staying) if staying != state.staying else state), outputs


def looks_at_ways(state: CoordinatorState, now_ns: int) -> Decided:
    """Returns the state and the outputs after a look at the time that is left to leaving workers."""
    outputs: Outputs = ()
    for worker in state.membership.leaving:
        until_ns = state.preparation.deadlines_ns.get(worker)
        known = state.membership
        if until_ns is None or worker not in known.members or known.phase is not Phase.RUNNING or known.is_over:
            continue
        event: HandOver | Departure | None = None
        if worker in known.owners and worker not in known.going:
            state, told = _says(state, worker, until_ns - now_ns, now_ns)
            outputs = (*outputs, *told)
            event = HandOver(now_ns, worker) if state.ways.get(worker) is LeaveStrategy.INSIDE else None
        elif worker not in known.owners and departs(until_ns - now_ns, state.graces_ns[worker]):
            event = Departure(now_ns, worker)
        if event is not None:
            state, found = decide(state, event)
            outputs = (*outputs, *found)
    return state, outputs


def _says(state: CoordinatorState, worker: int, left_ns: int, now_ns: int) -> Decided:
    """Returns the state with the way out of a worker, and its record and line if it is a new one."""
    known = state.membership
    spent_ns = now_ns - known.committed_ns
    way = way_out(left_ns, spent_ns, known.steps_ns, has_heirs(known, worker))
    if way is state.ways.get(worker) or worker in state.staying:
        return state, ()
    step, rest_s = known.committed + 1, until_boundary_ns(spent_ns, known.steps_ns) / 1e9
    short = f"the next step boundary is about {rest_s:.1f} s away, and {max(0, left_ns) / 1e9:.1f} s are left"
    later = f" or a few later, when the wanted owners hold its {state.job.slot_noun}s"
    is_patient = worker in patient(state.preparation, known, now_ns)
    text = {
        LeaveStrategy.BOUNDARY: f"hands over at the boundary after step {step}{later if is_patient else ''}",
        LeaveStrategy.INSIDE: f"hands over inside step {step}: {short}",
        LeaveStrategy.NONE: f"cannot hand over in time, and its end will be a death: {short}",
    }[way]
    record = WayOutRecord(of=worker, way=way, step=step, text=text)
    return state._replace(ways={**state.ways, worker: way}), (Write(record), Note(f"worker {worker} {text}"))
