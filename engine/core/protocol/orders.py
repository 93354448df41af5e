"""Orders: what workers and agents have not been told of the state of the membership protocol, as outputs.

Rules: an order states a result, which it finds in the state. It is told once: the state of the coordinator has what was
told last. If the job makes no progress, kills and farewells are repeated; a worker that answers an earlier epoch hears
the present one. So an order that was lost, sent twice, or decided by a coordinator that has ended needs no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import Any, Literal

from engine.core import messages
from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.checkpoint_rules import keeps
from engine.core.errors import GPU_ERROR, ScheduleError, ensure, required
from engine.core.exclusion import Cause, in_words
from engine.core.history.process_records import CutShortRecord, RestartRecord, WaitingRecord
from engine.core.history.run_records import CommitRecord, CrampedRecord, EpochRecord, GoRecord, HeirsRecord, PlanRecord
from engine.core.job.job import is_due
from engine.core.message_kinds import ToWorker
from engine.core.messages import ByeMessage, RaisedMessage
from engine.core.ownership import Members, Ownership
from engine.core.program.ballot import open_ballot
from engine.core.program.inventory import Inventory as Held
from engine.core.program.inventory import (
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PreparedMessage,
    PrepareMessage,
    to_json,
)
from engine.core.program.plan_parts import first_grid, grid_of
from engine.core.protocol.coordinator_state import (
    CoordinatorState,
    Preparation,
    RaisedException,
    attempted,
    commit_message,
    healed_soon,
    ready_joiners,
    warned_of,
)
from engine.core.protocol.events import Event, StepCommitted, Takeover, WorkerWord
from engine.core.protocol.inputs_outputs import (
    Arm,
    CoordinatorOutput,
    KeepStep,
    Kill,
    Note,
    OrphanParts,
    PhaseReached,
    Release,
    Restart,
    Stop,
    Tell,
    Write,
)
from engine.core.protocol.membership import hosts_of, is_ignored, plan_document, step
from engine.core.protocol.plan_orders import in_parts, left_ns, to_prepare, with_repair, with_ships
from engine.core.protocol.state import GATHERING, Phase, State, is_unknown
from engine.core.protocol.verdicts import heirs
from engine.core.protocol.worker_times import bytes_per_s
from engine.core.texts import numbered

# The rule of equal ends, and survivable exceptions: when the cause is the user's code, and not a worker.
#
# Rules: a second worker that hangs, or exits with the same code, in the same action shows that the user's code is the
# cause: it would end one heir after the other. So does the same exception of a second worker in the same step. A worker
# struck by an injected fault does not count. An error of a GPU is a loss like any death, even without an heir, and
# several may fail at once, as behind one switch; but an heir whose GPU has the same trouble with the same slots shows
# that a kernel of the model is the cause. After the last commit no exception ends the run.


_PUT_OUT = (Cause.HANG, Cause.SILENCE, Cause.NO_ANSWER)  # of workers whose processes live


def survives(state: CoordinatorState, worker: int, raised: RaisedMessage) -> tuple[CoordinatorState, bool]:
    """Returns the state after an exception of a worker, and whether the run continues without the worker."""
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
        code, at = state.codes.get(out.worker, -1), _action_of(state, out.worker)
        end = "hang" if out.cause is Cause.HANG else ""
        end = f"exit code {code}" if out.cause is Cause.DEATH and code >= 0 else end  # signals come from outside
        if end and at is not None and not state.places[out.worker].is_struck:
            other = first.setdefault((end, *at), out.worker)
            if other != out.worker:
                same = f"worker {out.worker} {out.how}{_where(state, out.worker)}, as worker {other} did"
                return Stop(f"{same}: it comes from the user's code, not from a worker", stage=at[1].stage)
    return None


def eviction_notes(state: CoordinatorState, owners: tuple[int, ...]) -> list[Note]:
    """Returns the notes on evicted workers whose processes live; `owners` are those before the verdict."""
    notes = []
    for out in state.membership.verdict:
        if out.cause in _PUT_OUT:
            places = [place for place, owner in enumerate(owners) if owner == out.worker]
            inherited = {state.membership.owners[place] for place in places} - {out.worker}
            verb = "takes" if len(inherited) == 1 else "take"
            then = f"; {numbered('worker', sorted(inherited), ' and ')} {verb} over" if inherited else ""
            notes.append(Note(f"worker {out.worker} {out.how}{_where(state, out.worker)} and is evicted{then}"))
    return notes


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


# The preparation of an epoch that begins with a commit: slots move, or a worker leaves after a hand-over.
#
#     coordinator                         workers
#     PreparePartMessage(plan) -------->  make the plan while they train; newcomers get the whole
#     <---------- PreparedMessage(digest)
#     commit: with all answers, commit + epoch + start are one decision; else the usual messages of a recovery
#
# Rules: the protocol is pure, so its table can be applied to events that have not happened yet. The inventories follow
# from the commit: every replica has voted, so it is whole at the boundary, and no worker has begun the next step. If
# another event comes first, the prepared epoch is dropped. An answer counts only for the plan that the commit then
# needs. No worker waits for an answer: if one is missing, the epoch comes one step later, once, and only if the grace
# of each leaving worker allows it. A new coordinator prepares again.
#
# In an elastic job a leaving worker with much time keeps its slots for some steps, until the wanted owners hold whole
# replicas: the slots then move once.

_STEPS_TO_LEAVE = 5  # steps of the present duration: a worker leaves within three, and later steps take longer
_STEPS_TO_SETTLE = 5  # in which the policy is asked, the members learn of its wish, and replicas are sent


def noticed(preparation: Preparation, worker: int, until_ns: int, committed: int = -1) -> Preparation:
    """Returns the preparation after the notice of a worker, which came after the commit of a step."""
    return preparation._replace(
        deadlines_ns={worker: until_ns, **preparation.deadlines_ns},
        noticed_after={worker: committed, **preparation.noticed_after},
    )


def patient(preparation: Preparation, state: State, now_ns: int) -> tuple[int, ...]:
    """Returns the leaving workers that keep their slots at the next commit, unless the wanted owners can take them."""
    if not preparation.elastic or not state.steps_ns:
        return ()
    leaves_at_ns = now_ns + (_STEPS_TO_SETTLE + _STEPS_TO_LEAVE) * max(state.steps_ns)
    return tuple(
        worker
        for worker in state.leaving
        if preparation.deadlines_ns.get(worker, 0) > leaves_at_ns
        and state.committed - preparation.noticed_after.get(worker, state.committed) < _STEPS_TO_SETTLE
    )


def looked(
    preparation: Preparation, state: State, ownership: Ownership, now_ns: int, joins: tuple[int, ...] = ()
) -> tuple[Preparation, PrepareMessage | None]:
    """Returns the order to prepare the epoch of the coming commit, with `joins` as members, if its plan has changed."""
    prepared = prepare_epoch(state, ownership, now_ns, joins, patient(preparation, state, now_ns))
    if prepared is None or prepared.document == preparation.document:
        return preparation, None
    number = preparation.number + 1
    new = preparation._replace(number=number, document=prepared.document, digests={})
    return new, PrepareMessage(number, prepared.document)


def answered(preparation: Preparation, worker: int, answer: PreparedMessage) -> Preparation:
    """Returns the preparation after the answer of a worker; an answer to an older plan is ignored.

    The numbers of a coordinator that takes over start over, but it makes an epoch first, so no answer fits by chance.
    """
    document = preparation.document
    if document is None or (answer.epoch, answer.number) != (document.epoch, preparation.number):
        return preparation
    return preparation._replace(digests={**preparation.digests, worker: answer.digest})


def at_commit(
    preparation: Preparation, commit: StepCommitted, state: State, ownership: Ownership, joins: tuple[int, ...] = ()
) -> tuple[Preparation, tuple[Event, ...]]:
    """Returns the events of a commit: it alone, or with the prepared epoch, without which none of `joins` joins."""
    new = preparation._replace(begun_ns=commit.now_ns)
    commit = replace(commit, patient=patient(preparation, state, commit.now_ns))
    prepared = prepare_epoch(state, ownership, commit.now_ns, joins, commit.patient)
    if prepared is None:
        return new, (commit,)
    document, digests = prepared.document, preparation.digests
    if document == preparation.document and all(worker in digests for worker in document.members):
        answers = {each: PlannedMessage(document.epoch, digests[each], ()) for each in document.members}
        return new, (*prepared.events, *(WorkerWord(commit.now_ns, each, answer) for each, answer in answers.items()))
    if joins and prepare_epoch(state, ownership, commit.now_ns, (), commit.patient) is None:
        return new, (commit,)
    leaves_at_ns = commit.now_ns + _STEPS_TO_LEAVE * (commit.now_ns - preparation.begun_ns)
    has_time = leaves_at_ns < min((preparation.deadlines_ns.get(worker, 0) for worker in state.leaving), default=inf)
    if preparation.waited_in < state.epoch and has_time:
        return new._replace(waited_in=state.epoch), (replace(commit, waits=True),)
    return new, (commit,)


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """A prepared epoch: the events that lead to it (the commit, the inventories), and the input of its plan."""

    events: tuple[Event, ...]
    document: PlanMessage


def prepare_epoch(
    state: State, ownership: Ownership, now_ns: int, joins: tuple[int, ...] = (), patient: tuple[int, ...] = ()
) -> PreparedEpoch | None:
    """Returns the epoch that the commit of the open step, with this ownership, begins; None if it begins none."""
    if state.phase is not Phase.RUNNING or not (state.leaving or state.wanted or state.changes_schedule or joins):
        return None
    commit = StepCommitted(now_ns, state.epoch, state.committed + 1, ownership.shadows, joins=joins, patient=patient)
    new = step(state, commit)
    if new.phase is not Phase.RECONFIGURING:
        return None
    inventories = (held_at_boundary(worker, new.committed + 1, ownership) for worker in new.members)
    answers = tuple(
        WorkerWord(now_ns, held.worker, InventoryMessage(new.epoch, to_json(held), ownership.grid.places(held.whole)))
        for held in inventories
    )
    for answer in answers:
        new = step(new, answer)
    ensure(new.phase is Phase.RECONFIGURING, f"the last inventory of a prepared epoch led to the phase {new.phase}")
    return PreparedEpoch((commit, *answers), plan_document(new))


def held_at_boundary(worker: int, step: int, ownership: Ownership) -> Held:
    """Returns the inventory of a worker at the boundary before `step`, after a step with this ownership."""
    slots = tuple(sorted(ownership.held_by(worker)))
    nothing = dict.fromkeys(slots, 0)
    return Held(worker, step, slots, nothing, nothing)


Outputs = tuple[CoordinatorOutput, ...]
Decided = tuple[CoordinatorState, Outputs]
Order = Callable[[CoordinatorState], Decided]
_TRAINING = (Phase.RUNNING, Phase.DRAINING)


def decide(state: CoordinatorState, *events: Event) -> Decided:
    """Returns the state and outputs after events decided as one, and prepares the next epoch, unless the run ends."""
    if state.is_stopping:
        return state, ()
    before, membership, outputs = state.membership, state.membership, list[CoordinatorOutput]()
    for event in events:
        if isinstance(event, WorkerWord) and state.epoch is not None and is_ignored(membership, event):
            # A newcomer that is still being started is no member yet.
            outputs += [] if is_unknown(membership, event.worker) else [Tell((event.worker,), state.epoch)]
        membership = step(membership, event)
    again = isinstance(events[-1], Takeover) or membership.repeated_ns != before.repeated_ns
    is_news = membership.decided() != before.decided()
    state = state._replace(membership=membership)
    evict = partial(_evict, ordered=() if again or membership.epoch != before.epoch else (*before.out, *before.lost))
    for order in _orders(membership.phase, evict) if is_news or again else ():
        if not state.is_stopping or order is evict:
            state, orders = order(state)
            outputs += orders
    outputs += _waiting(state, before)
    if not is_news:
        return state, tuple(outputs)
    state, orders = prepare(state, events[-1].now_ns)
    return state, (*outputs, *orders)


def _orders(phase: Phase, evict: Order) -> tuple[Order, ...]:
    """Returns the orders that may be due in a phase, in the order of sending; a commit ends the epoch before it."""
    of_phase: dict[Phase, tuple[Order, ...]] = {
        Phase.FORMING: (evict,),
        Phase.RESTARTING: (_restart,),
        Phase.FINISHED: (_finish,),
        Phase.HALTED: (_end_epoch, _halt),
    }
    return of_phase.get(phase, (_end_epoch, _publish_epoch, evict, _send_plan, _start_training, _send_commit))


def prepare(state: CoordinatorState, now_ns: int) -> Decided:
    """Lets the workers form the group of the coming epoch, if others are to join, and prepare its plan."""
    known, outputs = state.membership, list[CoordinatorOutput]()
    if known.waiting or state.next_group.members:
        group, wanted = attempted(state.next_group, known)
        state = state._replace(next_group=group)
        outputs += [] if wanted is None else [tell_waiting_too(state, wanted)]
    joins = ready_joiners(state.next_group, known)
    if state.ballot is None or not (known.leaving or known.wanted or known.changes_schedule or joins):
        return state, tuple(outputs)
    preparation, order = looked(state.preparation, known, state.ballot.ownership, now_ns, joins)
    if order is not None:
        state = state._replace(preparation=preparation)
        tell = tell_waiting_too(state, order) if joins else tell_all(state, order)
        outputs += to_prepare(state.job, state.grid, order, tell.workers)
    return state, tuple(outputs)


def _waiting(state: CoordinatorState, old: State) -> Iterable[CoordinatorOutput]:
    """Yields the records, and lines while training continues, on workers that wait, are lost then, or lack memory."""
    new, ends = state.membership, state.membership.last_step < state.job.steps - 1
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
                yield Note(f"worker {out.worker}, not yet a member, {out.why}")


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
    first: dict[int, int] = {}
    for place, owner in enumerate(owners):
        first[owner] = min(first.get(owner, stages), place % stages)
    return tuple(sorted(sorted(workers), key=lambda worker: first.get(worker, stages)))


def stopped(state: CoordinatorState, stop: Stop) -> Decided:
    """Returns the end of the run."""
    return state._replace(is_stopping=True), (stop,)


def _publish_epoch(state: CoordinatorState) -> Decided:
    if state.membership.out and not state.started:  # before training there are no heirs, by any coordinator's verdict
        return stopped(state, _not_recovered(state.membership.out.values()))
    known = state.membership
    if not _is_new_epoch(state):
        return state, ()
    going = known.going if known.phase in GATHERING else ()
    offers = going if state.job.residuals != "recompute" else ()
    left = left_ns(offers, state.preparation.deadlines_ns, state.graces_ns, known.moved_ns)
    epoch = messages.EpochMessage(
        epoch=known.epoch,
        members=Members.of(known.members),
        gather=known.phase in GATHERING,
        regroup=known.phase is Phase.FAILING_OVER,
        commit=state.told,  # for a worker whose wait for it ends with the epoch
        digest=None if known.phase in GATHERING else next(iter(known.digests.values()), None),
        go=_go(state) if known.phase in _TRAINING else None,  # then no answer is awaited
        group=state.next_group.number if state.next_group.is_entered and known.phase not in GATHERING else 0,
        left_ms=tuple((worker, ns // 1_000_000) for worker, ns in left.items()),
        hosts=() if known.phase in GATHERING or known.digests else hosts_of(known),
    )
    record = EpochRecord(
        epoch=known.epoch,
        members=known.members,
        verdict=known.verdict,
        reason=known.reason,
        planned=known.planned,
        owners=known.owners,
        shadows=known.shadows,
        schedule=known.schedule,
    )
    new = state._replace(epoch=epoch, ballot=None, owners=known.owners)
    awaited: Outputs = (OrphanParts(), *_kept(new, epoch))
    outputs: Outputs = (*awaited, tell_all(new, epoch), Write(record), PhaseReached("agree", known.epoch))
    if known.verdict and (stop := repeated(new)):
        return new._replace(is_stopping=True), (*outputs, stop)
    return new, (*outputs, *eviction_notes(new, state.owners))


def _not_recovered(verdict: Iterable[Any]) -> Stop:
    return Stop("training did not recover: " + in_words(verdict))


def _is_new_epoch(state: CoordinatorState) -> bool:
    return state.epoch is None or state.membership.epoch > state.epoch.epoch


def _send_plan(state: CoordinatorState) -> Decided:
    known, number = state.membership, state.membership.epoch
    if number <= state.planned or len(known.inventories) < len(known.members):
        return state, ()
    document = plan_document(known)
    left = left_ns(document.leaving, state.preparation.deadlines_ns, state.graces_ns, known.moved_ns)
    document, ships = with_ships(document, state.job, bytes_per_s(state.costs, state.sizes), left)
    leaving, wanted, hosts = document.leaving, document.wanted, document.hosts
    new = state._replace(planned=number, leaving=leaving, wanted=wanted, hosts=hosts, owners=document.owners)
    outputs: list[CoordinatorOutput] = []
    if document.owners != state.owners:  # an heir became known by its inventory
        outputs.append(Write(HeirsRecord(epoch=number, owners=document.owners, shadows=document.shadows)))
    is_prepared = known.phase not in GATHERING
    if not is_prepared:
        document = with_repair(state.job, document)
        outputs += in_parts(state.job, state.grid, document, tell_all(new, document).workers)
    new = new._replace(plan=document)
    plan = PlanRecord(epoch=number, committed=document.committed, prepared=is_prepared)
    # In a prepared epoch no worker sends an inventory.
    return new, (*outputs, *ships, Write(plan), PhaseReached("inventory", number), PhaseReached("plan", number))


def _start_training(state: CoordinatorState) -> Decided:
    known = state.membership
    if known.phase in GATHERING or known.epoch <= state.started:
        return state, ()
    ballot = open_ballot(known.epoch, known.committed + 1, state.ownership, state.job.clip_norm)
    new, go = state._replace(started=known.epoch, ballot=ballot, grid=_grid(state)), _go(state)
    epoch = required(state.epoch, "training starts in an epoch")
    start: tuple[CoordinatorOutput, ...] = (*_kept(new, go), tell_all(new, go)) if epoch.go is None else ()
    new, warned = warned_of(new, healed_soon(new, ballot.ownership))
    go_on = Write(GoRecord(epoch=known.epoch, end=go.end))
    return new, (Arm(), *start, go_on, PhaseReached("replay", known.epoch), *warned)


def _grid(state: CoordinatorState) -> PlanMessage:
    """Returns the grid of the epoch in which training begins, as its members have it."""
    known, plan = state.membership, state.plan
    if plan is not None and plan.epoch == known.epoch:
        return grid_of(plan)
    return first_grid(known.epoch, Members.of(known.members), state.ownership, hosts_of(known))


def _go(state: CoordinatorState) -> messages.GoMessage:
    """Returns the message that lets workers run their plan."""
    known = state.membership
    end, predicts = known.phase is Phase.DRAINING, bool(state.job.predict_args)
    return messages.GoMessage(
        end=end or predicts,
        validate=known.committed > state.validated
        and (predicts or is_due(state.job.validate_every, known.committed, known.committed >= known.last_step)),
        keep=known.committed >= 0 and (known.committed == state.kept or (end and state.keeping.last)),
    )


def _end_epoch(state: CoordinatorState) -> Decided:
    """Tells the commit with which an epoch begins, in the epoch before it."""
    return _tell_commit(state, "epoch") if _is_new_epoch(state) else (state, ())


def _send_commit(state: CoordinatorState) -> Decided:
    """Tells the commit, and opens the ballot of the next step with the wanted shadows."""
    known = state.membership
    if known.phase in GATHERING:
        return state, ()
    new, outputs = _tell_commit(state, "end" if known.phase is Phase.DRAINING else "step")
    if not outputs or known.phase is Phase.DRAINING:
        return new, outputs
    last = required(state.ballot, "a ballot is open in training")
    ballot = open_ballot(last.epoch, last.step + 1, healed_soon(new, last.ownership), state.job.clip_norm)
    new, warned = warned_of(new._replace(ballot=ballot), ballot.ownership)
    return new, (*outputs, PhaseReached("heal", known.epoch), *warned)


def _tell_commit(state: CoordinatorState, then: Literal["step", "end", "epoch"]) -> Decided:
    committed = state.membership.committed
    if committed < 0 or (state.told is not None and committed <= state.told.step):
        return state, ()  # it was sent before, or with the epoch
    commit = required(state.commit, "the votes decide on a commit before it is announced")
    ensure(commit.step == committed, f"commit of step {commit.step} where {committed} is announced")
    message = commit_message(commit, then, keep=state.kept == commit.step, job=state.job)
    new = state._replace(told=message)
    return new, (*_kept(new, message), tell_all(new, message), Write(commit_record(new)))


def _kept(state: CoordinatorState, message: ToWorker) -> tuple[KeepStep, ...]:
    """Precedes the order: workers may write parts, and this coordinator may end, before all of them have it."""
    known = state.membership
    return (KeepStep(known.committed, known.epoch),) if keeps(message) else ()


def commit_record(state: CoordinatorState) -> CommitRecord:
    """Returns the record of the last commit."""
    commit = required(state.commit, "a step is committed")
    fields = {name: value for name, value in commit._asdict().items() if name != "monitored"}
    return CommitRecord(**fields, last=state.told is not None and state.told.then == "end")


def _evict(state: CoordinatorState, ordered: Collection[int]) -> Decided:
    """Ends the processes of workers that are out, but not of those `ordered` before; lets waiting leavers leave."""
    known, outputs = state.membership, list[CoordinatorOutput]()
    for worker in (*known.out, *known.lost):
        if worker not in known.exited and worker not in ordered:
            lost = known.lost.get(worker)
            is_leaving = lost is not None and lost.cause is Cause.LEFT
            outputs.append(Tell((worker,), ByeMessage()) if is_leaving else Kill(worker))
    return state, tuple(outputs)


def _halt(state: CoordinatorState) -> Decided:
    if not state.started:  # no training is lost, so only the verdict counts
        return stopped(state, _not_recovered(state.membership.out.values()))
    return stopped(state, repeated(state) or Stop(state.membership.reason, state.membership.exit_code))


def _restart(state: CoordinatorState) -> Decided:
    """Ends all workers and starts them again, because no step is committed."""
    reason, number, most = state.membership.reason, state.membership.restarts, state.membership.options.max_restarts
    if number <= state.restarts:
        return state, ()
    text = f"{reason} before the first commit; all workers are restarted ({number} of at most {most})"
    record = RestartRecord(number=number, reason=reason)
    new = state._replace(restarts=number, is_stopping=True)  # nothing that the present workers say counts
    return new, (Write(record), Note(text), Restart())


def _finish(state: CoordinatorState) -> Decided:
    """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
    known = state.membership
    cut_short = "" if known.members and len(known.done) == len(known.members) else known.reason
    bye = () if cut_short else (tell_waiting_too(state, ByeMessage()),)
    if state.is_released:
        return state, bye
    why: Outputs = ()
    if cut_short:
        text = f"every step is committed; the work after the last one ends early: {cut_short}"
        why = (Write(CutShortRecord(reason=cut_short)), Note(text))
    return state._replace(is_released=True), (*bye, *why, Release(cut_short))
