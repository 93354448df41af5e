"""The machine of the coordinator: `step(state, input) -> (state, outputs)`, a pure function given by two tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from engine.core import messages
from engine.core.errors import DivergedError, ExitCode
from engine.core.history.process_records import WayOutRecord
from engine.core.history.run_records import (
    FinishedRecord,
    NormsRecord,
    NoticeRecord,
    PartitionRecord,
    RaisedRecord,
    StaysRecord,
    StoppedEarlyRecord,
    SuspicionRecord,
    ValidationRecord,
)
from engine.core.job.job import is_due
from engine.core.job.memory_model import StageBytes
from engine.core.job.torch_parts import warming_up
from engine.core.message_kinds import LastWords, Message
from engine.core.messages import KeyMessage, NextGroupFormedMessage
from engine.core.monitors import in_words, is_watched, lacking
from engine.core.program.ballot import NO_NORM, SKIP, Ballot, Commit, VoteMessage, layer_norms
from engine.core.program.inventory import (
    InventoryMessage,
    PlannedMessage,
    PreparedMessage,
    PrepareMessage,
    WholePlanMessage,
)
from engine.core.protocol import membership as protocol
from engine.core.protocol.coordinator_state import CoordinatorState, after_answer, begin, ready_joiners
from engine.core.protocol.events import (
    Answer,
    Departure,
    EarlyStop,
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
from engine.core.protocol.inputs_outputs import (
    ClockTick,
    CoordinatorInput,
    CoordinatorOutput,
    Fail,
    JobResumption,
    KeepStep,
    Kill,
    Note,
    ProcessExit,
    Release,
    RunStopping,
    Stop,
    Teach,
    Tell,
    Write,
)
from engine.core.protocol.orders import (
    Decided,
    Outputs,
    answered,
    at_commit,
    commit_record,
    decide,
    noticed,
    patient,
    prepare,
    stopped,
    survives,
    tell_all,
    tell_waiting_too,
)
from engine.core.protocol.plan_orders import at_boundary
from engine.core.protocol.rebalancing import LeaveStrategy, departs, has_heirs, until_boundary_ns, way_out
from engine.core.protocol.state import Phase
from engine.core.protocol.state import begin as begin_membership
from engine.core.protocol.verdicts import heirs, may_restart, unable_to_leave
from engine.core.protocol.worker_times import after_vote
from engine.core.texts import numbered

# Hearing: the rule for each kind of message of a worker.


MessageRule = Callable[[CoordinatorState, WorkerWord[Message], Any], Decided]


def _decide(state: CoordinatorState, heard: WorkerWord[Message], message: Message) -> Decided:
    """Leaves a message to the membership protocol, of which it is an event."""
    return decide(state, heard)


def _on_cut(state: CoordinatorState, heard: WorkerWord[Message], cut: messages.CutMessage) -> Decided:
    record = PartitionRecord(starts=cut.starts, layers=cut.layers, samples=cut.samples)
    message = messages.PartitionMessage(cut.starts)
    return state, (Write(record), *map(Note, cut.notes), tell_all(state, message), Teach(message))


def _on_border(state: CoordinatorState, heard: WorkerWord[Message], learnt: messages.BorderMessage) -> Decided:
    """Tells the owner of the next stage the border before it, all owners the first border, all workers all borders."""
    stages, owners, borders = state.job.grid.stages, state.membership.owners, state.borders.learn(learnt)
    new, known = state._replace(borders=borders), len(borders.known)
    if known == len(state.borders.known):
        return new, ()
    message = messages.BordersMessage(borders.known)
    if known == stages:
        return new, (tell_all(new, message), Teach(message))
    told = (owners[known],) if state.borders.known else tuple(dict.fromkeys(owners[:stages]))
    return new, (Tell(told, message),)


def _on_key(state: CoordinatorState, heard: WorkerWord[Message], message: KeyMessage) -> Decided:
    is_of_next = state.next_group.members and message.epoch == state.next_group.epoch
    return state, (tell_waiting_too(state, message) if is_of_next else tell_all(state, message),)


def _on_vote(state: CoordinatorState, heard: WorkerWord[Message], vote: VoteMessage) -> Decided:
    """Counts votes; the last missing one commits the step. Raises DivergedError for a norm that is not finite."""
    if state.ballot is None:
        return state, ()
    ballot, commit = state.ballot.add(heard.worker, vote)
    new = state._replace(ballot=ballot)
    if sizes := {each.stage: StageBytes(*each.sizes) for each in vote.slots if each.sizes}:
        new = new._replace(sizes={**state.sizes, **sizes})
    if any(each.heal_ns for each in vote.slots):
        new = new._replace(costs=after_vote(state.costs, vote))
    if commit is None or state.is_stopping:
        return new, ()
    if not math.isfinite(commit.grad_norm) and state.job.dtype == "float16":
        commit = commit._replace(grad_norm=NO_NORM, clip_factor=SKIP)  # the scale of the loss was too large
    elif not math.isfinite(commit.grad_norm):
        text = f"the gradient norm is {commit.grad_norm} at step {commit.step}; a lower lr often helps"
        raise DivergedError(text, first_not_finite(ballot))
    ownership = ballot.ownership
    event = StepCommitted(heard.now_ns, vote.epoch, commit.step, ownership.shadows)
    joins = ready_joiners(state.next_group, state.membership)
    preparation, decisive = at_commit(state.preparation, event, state.membership, ownership, joins)
    commit = _with_rate(state, commit)
    first, *_ = decisive
    is_entered = isinstance(first, StepCommitted) and bool(first.joins)
    group = state.next_group._replace(is_entered=is_entered) if joins else state.next_group
    new = _keeps(new, commit.step, heard.now_ns)._replace(commit=commit, preparation=preparation, next_group=group)
    new = new._replace(monitors=state.monitors.committed(state.rules, commit.step, commit.loss))
    result = decide(new, *decisive)
    result = result[0], (*result[1], *_stopped_early(result[0]))
    is_wanted = commit.clip_factor != SKIP and is_due(state.job.layer_norms, commit.step, is_last=False)
    return _after(NormsRecord(step=commit.step, norms=layer_norms(ballot)), result) if is_wanted else result


def _with_rate(state: CoordinatorState, commit: Commit) -> Commit:
    """Returns a commit with what the rate of its step follows from, where that is more than the step."""
    if state.rules.monitor is None:
        return commit
    plateau, job, lr = state.monitors.plateau, state.job, commit.lr
    if plateau is not None:
        is_warm = commit.step >= job.warmup_steps
        lr = plateau.rate if is_warm else warming_up(job.lr, commit.step, job.warmup_steps)
    return commit._replace(lr=lr, monitored=state.monitors.monitored)


def _stopped_early(state: CoordinatorState) -> Outputs:
    """Returns the record of an early stop behind the commit of the last step."""
    monitors = state.monitors
    if not 0 <= monitors.ends_at == state.membership.committed:
        return ()
    return (Write(StoppedEarlyRecord(step=monitors.ends_at, why=in_words(monitors))),)


def first_not_finite(ballot: Ballot) -> int | None:
    """Returns the layer whose gradient was first not finite in the backward; None if only the sum of norms is not."""
    return max((layer for layer, norm in layer_norms(ballot) if not math.isfinite(norm)), default=None)


def _keeps(state: CoordinatorState, step: int, now_ns: int) -> CoordinatorState:
    """Returns the state after a commit, which is kept as a checkpoint if that is due."""
    is_last = step >= state.membership.last_step
    is_candidate = bool(state.job.best) and is_due(state.job.validate_every, step, is_last)
    if not (is_candidate or state.keeping.is_kept(step, is_last, now_ns - state.kept_ns)):
        return state
    return state._replace(kept=step, kept_ns=now_ns)


def _on_validation(state: CoordinatorState, heard: WorkerWord[Message], outcome: messages.ValidationMessage) -> Decided:
    """Goes on after a validation, for one step more if its figures end the run."""
    records = [ValidationRecord(step=outcome.step, **asdict(each)) for each in outcome.sets]
    figures = {"loss": outcome.sets[0].loss, **outcome.sets[0].metrics} if outcome.sets else {}
    monitors = state.monitors
    if is_watched(state.rules):
        monitors = monitors.passed(state.rules, outcome.step, figures)
    new = state._replace(validated=max(state.validated, outcome.step), monitors=monitors)
    notes: Outputs = () if records else (Note("the data has no evaluation set: no validation"),)
    if text := lacking(state.rules, figures):
        return stopped(new, Stop(text, ExitCode.USAGE))
    if state.job.predict_args:
        new, notes = decide(new, EarlyStop(heard.now_ns, outcome.step))
    elif monitors.ends_at != state.monitors.ends_at:
        new, orders = decide(new, EarlyStop(heard.now_ns, monitors.ends_at))
        notes = (*orders, Note(in_words(monitors)))
    return new, (*notes, *map(Write, records), tell_all(new, messages.ValidatedMessage(outcome.step)))


def _on_finished(state: CoordinatorState, heard: WorkerWord[Message], finished: messages.FinishedMessage) -> Decided:
    peak_stash, peak_memory_kib, sizes = finished.peak_stash, finished.peak_memory_kib, finished.sizes
    record = FinishedRecord(of=heard.worker, peak_stash=peak_stash, peak_memory_kib=peak_memory_kib, sizes=sizes)
    return _after(record, decide(state, heard))


def _on_suspicion(state: CoordinatorState, heard: WorkerWord[Message], suspicion: messages.SuspicionMessage) -> Decided:
    record = SuspicionRecord(of=heard.worker, text=suspicion.text, peer=suspicion.peer)
    return _after(record, decide(state, heard))


def _on_raised(state: CoordinatorState, heard: WorkerWord[Message], raised: messages.RaisedMessage) -> Decided:
    step = raised.step if state.started else -1
    record = RaisedRecord(at_ns=raised.at_ns, of=heard.worker, step=step, **asdict(raised.exception))
    if not state.is_stopping and state.started:
        state, goes_on = survives(state, heard.worker, raised)
        if goes_on:
            state, answer = _release_worker(state, heard.worker)
            return state, (Write(record), answer)  # the end of its process makes the verdict
    return _after(record, _on_failed(state, heard, raised))


def _on_failed(
    state: CoordinatorState,
    heard: WorkerWord[Message],
    last: messages.RefusedMessage | messages.FailedMessage | messages.RaisedMessage,
) -> Decided:
    membership = state.membership
    is_broken = isinstance(last, messages.FailedMessage) and last.code == ExitCode.NOT_RECOVERED
    if is_broken and (membership.phase is Phase.RESTARTING or may_restart(membership)):
        # A transfer broke, probably because another worker has died; an end of a process decides.
        state, answer = _release_worker(state, heard.worker)
        return state, (answer,)
    has_commit = membership.committed > membership.options.begun
    return state._replace(is_stopping=True), (Fail(heard.worker, last, has_commit),)


def _release_worker(state: CoordinatorState, worker: int) -> tuple[CoordinatorState, Tell]:
    """Returns the state and the answer to last words: the worker owes the run nothing any more."""
    return state._replace(let_go=(*state.let_go, worker)), Tell((worker,), messages.StopMessage())


def _on_prepared(state: CoordinatorState, heard: WorkerWord[Message], message: PreparedMessage) -> Decided:
    return state._replace(preparation=answered(state.preparation, heard.worker, message)), ()


def _on_whole_plan(state: CoordinatorState, heard: WorkerWord[Message], asked: WholePlanMessage) -> Decided:
    plan, preparation = state.plan, state.preparation
    if plan is not None and plan.epoch == asked.epoch == state.membership.epoch:
        return state, (Tell((heard.worker,), plan),)
    if preparation.document is not None and preparation.document.epoch == asked.epoch > state.membership.epoch:
        whole = PrepareMessage(preparation.number, at_boundary(state.job, preparation.document))
        return state, (Tell((heard.worker,), whole),)
    return state, ()


def _on_next_group(state: CoordinatorState, heard: WorkerWord[Message], message: NextGroupFormedMessage) -> Decided:
    group, given_up = after_answer(state.next_group, state.membership, heard.worker, message)
    if group is state.next_group or state.is_stopping:
        return state, ()
    new = state._replace(next_group=group)
    if given_up is None:
        return prepare(new, heard.now_ns)
    text = f"worker {heard.worker} could not form the group in which workers are to join: {message.failure}"
    return new, (tell_waiting_too(new, given_up), Note(text))


def _after(record: Any, result: Decided) -> Decided:
    """Returns a result with a record in front of its outputs."""
    first: CoordinatorOutput = Write(record)
    return result[0], (first, *result[1])


RULES: dict[type[Message], MessageRule] = {
    messages.CutMessage: _on_cut,
    messages.BorderMessage: _on_border,
    messages.ReadyMessage: _decide,
    messages.WaitingMessage: _decide,
    messages.HeartbeatMessage: _decide,
    messages.ValidationMessage: _on_validation,
    messages.FinishedMessage: _on_finished,
    messages.SuspicionMessage: _on_suspicion,
    messages.RefusedMessage: _on_failed,
    messages.FailedMessage: _on_failed,
    messages.RaisedMessage: _on_raised,
    InventoryMessage: _decide,
    PlannedMessage: _decide,
    PreparedMessage: _on_prepared,
    WholePlanMessage: _on_whole_plan,
    VoteMessage: _on_vote,
    KeyMessage: _on_key,
    NextGroupFormedMessage: _on_next_group,
}


# Leaving: the way out of each worker that has given notice, said at once, and carried out when its time comes.
#
# Rule: they are checked with each notice and each tick. Inside a step a worker hands over only while training runs.


def report_irreplaceable(state: CoordinatorState) -> Decided:
    """Returns the state with the leaving workers that no other worker can replace, and reports each once."""
    staying: dict[int, str] = {}
    outputs: Outputs = ()
    for worker, stages in unable_to_leave(state.membership).items():
        slots, grace_s = numbered(state.job.slot_noun, stages), state.graces_ns.get(worker, 0) / 1e9
        text = f"is to leave within {grace_s:g} s, but no other worker can take over {slots}"
        staying[worker] = text
        if state.staying.get(worker) != text:
            outputs = (*outputs, Note(f"worker {worker} {text}"), Write(StaysRecord(of=worker, text=text)))
    return (state._replace(staying=staying) if staying != state.staying else state), outputs


def reconsider_departures(state: CoordinatorState, now_ns: int) -> Decided:
    """Returns the state and the outputs after checking how much time leaving workers have."""
    outputs: Outputs = ()
    for worker in state.membership.leaving:
        until_ns = state.preparation.deadlines_ns.get(worker)
        membership = state.membership
        is_running = membership.phase is Phase.RUNNING and not membership.is_over
        if until_ns is None or worker not in membership.members or not is_running:
            continue
        event: HandOver | Departure | None = None
        if worker in membership.owners and worker not in membership.going:
            state, news = _says(state, worker, until_ns - now_ns, now_ns)
            outputs = (*outputs, *news)
            event = HandOver(now_ns, worker) if state.ways.get(worker) is LeaveStrategy.INSIDE else None
        elif worker not in membership.owners and departs(until_ns - now_ns, state.graces_ns[worker]):
            event = Departure(now_ns, worker)
        if event is not None:
            state, orders = decide(state, event)
            outputs = (*outputs, *orders)
    return state, outputs


def _says(state: CoordinatorState, worker: int, left_ns: int, now_ns: int) -> Decided:
    """Returns the state with the way out of a worker, and its record and line if it is a new one."""
    membership = state.membership
    spent_ns = now_ns - membership.committed_ns
    way = way_out(left_ns, spent_ns, membership.steps_ns, has_heirs(membership, worker))
    if way is state.ways.get(worker) or worker in state.staying:
        return state, ()
    step, rest_s = membership.committed + 1, until_boundary_ns(spent_ns, membership.steps_ns) / 1e9
    short = f"the next step boundary is about {rest_s:.1f} s away, and {max(0, left_ns) / 1e9:.1f} s are left"
    later = f" or a few later, when the wanted owners hold its {state.job.slot_noun}s"
    is_patient = worker in patient(state.preparation, membership, now_ns)
    text = {
        LeaveStrategy.BOUNDARY: f"hands over at the boundary after step {step}{later if is_patient else ''}",
        LeaveStrategy.INSIDE: f"hands over inside step {step}: {short}",
        LeaveStrategy.NONE: f"cannot hand over in time and will count as dead: {short}",
    }[way]
    record = WayOutRecord(of=worker, way=way, step=step, text=text)
    return state._replace(ways={**state.ways, worker: way}), (Write(record), Note(f"worker {worker} {text}"))


#     dead worker      coordinator                            other workers
#     exits ---------> verdict, written to the store
#                      EpochMessage ----------------------->  leave every wait and freeze
#                      <------------------- InventoryMessage  report their replicas; begin to form a new group
#                      plan document, written to the store
#                      PlanMessage ------------------------>  make the plan
#                      <--------------------- PlannedMessage  report its digest
#                      GoMessage -------------------------->  run the rest of the step
#                      <------------------------ VoteMessage  every replica is ready for the optimizer
#                      CommitMessage ---------------------->  run the optimizer
#
# Rules: the driver writes a state for which `is_to_be_kept` holds to the store, by compare-and-swap on the one before,
# and then carries out the outputs. Messages of an evicted worker are ignored: it may not know yet. Messages without a
# rule do not concern the coordinator.


def step(state: CoordinatorState, given: CoordinatorInput) -> Decided:
    """Returns the state after an input, and the outputs to carry out.

    Raises InvariantError for an input that only a bug can cause, DivergedError for a norm that is not finite.
    """
    return _TABLE[type(given)](state, given)


def is_to_be_kept(
    old: CoordinatorState, new: CoordinatorState, given: CoordinatorInput, outputs: tuple[CoordinatorOutput, ...]
) -> bool:
    """Returns whether the new state must be stored before its outputs are carried out; not for a mere answer."""
    if new.monitors is not old.monitors and new.monitors != old.monitors:
        return True  # the workers go on, and no later validation would tell the same
    if new.membership is old.membership or new.membership.decided() == old.membership.decided():
        return False
    is_answer = isinstance(given, WorkerWord) and isinstance(given.message, Answer)
    return not is_answer or any(isinstance(each, Tell | Kill | Release | Stop) for each in outputs)


def _hears(state: CoordinatorState, heard: WorkerWord[Message]) -> Decided:
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
    new, warnings = report_irreplaceable(new)
    new, parting = reconsider_departures(new, notice.now_ns)
    return new, (Write(record), *outputs, *warnings, *parting)


def _ends(state: CoordinatorState, ended: ProcessExit) -> Decided:
    worker = ended.worker
    known = state._replace(codes={**state.codes, worker: ended.code})
    if ended.at is not None:
        known = known._replace(places={**state.places, worker: ended.at})
    words = state.raised[worker].words if worker in state.raised else ""
    return decide(known, ExitSeen(ended.now_ns, worker, ended.code, words))


def _passes(state: CoordinatorState, passed: ClockTick) -> Decided:
    known = state._replace(places={**state.places, **passed.places})
    new, outputs = decide(known, Tick(passed.now_ns, passed.sights, passed.unseen, passed.words, passed.round_trip_ns))
    if not new.membership.leaving:
        return new, outputs
    new, warnings = report_irreplaceable(new) if new.membership.phase is Phase.RUNNING else (new, ())
    new, parting = reconsider_departures(new, passed.now_ns)
    return new, (*outputs, *warnings, *parting)


def _takes_over(state: CoordinatorState, taken: Takeover) -> Decided:
    """Writes the last commit again, as its record may be missing, and warns this host's user of deadly hosts."""
    new, outputs = decide(state, taken)
    warning = [Note(state.deadly)] if state.deadly else []
    record = [Write(commit_record(state))] if state.commit else []
    return new, (*record, *_stopped_early(state), *outputs, *warning)


def _is_restarted(state: CoordinatorState, restarted: JobRestart) -> Decided:
    """Forgets all that the ended workers have said."""
    membership = protocol.step(state.membership, restarted)
    return begin(state.job, membership, restarted.now_ns, state.monitors)._replace(restarts=state.restarts), ()


def _is_resumed(state: CoordinatorState, resumed: JobResumption) -> Decided:
    """Begins again after the step of a checkpoint; the epochs go on."""
    options = replace(state.membership.options, begun=resumed.committed)
    last_step = state.job.steps - 1
    membership = begin_membership(options, resumed.owners, resumed.shadows, last_step, resumed.now_ns)
    return begin(state.job, membership._replace(epoch=state.membership.epoch), resumed.now_ns, resumed.monitors), ()


def _stops(state: CoordinatorState, stopping: RunStopping) -> Decided:
    """Tells all workers to stop, and owners to write the last step that this run has committed, if that is kept.

    Heirs of workers that may go after their last words write too. A checkpoint ordered before is only waited for.
    """
    known = state.membership
    is_kept = state.keeping.last or state.kept == known.committed
    keeps = stopping.keeps and is_kept and state.started > 0 and known.committed > known.options.begun
    kept = (KeepStep(known.committed, known.epoch),) if keeps else ()
    owners = heirs(known, state.let_go).owners if state.kept != known.committed else ()
    stop = messages.StopMessage(known.committed, owners) if keeps else messages.StopMessage()
    return state._replace(is_stopping=True), (*kept, tell_all(state, stop))


_TABLE: dict[type[CoordinatorInput], Callable[[CoordinatorState, Any], Decided]] = {
    WorkerWord: _hears,
    ProcessExit: _ends,
    ClockTick: _passes,
    RunStopping: _stops,
    Notice: _is_noticed,
    WantedOwners: decide,
    WantedSchedule: decide,
    MemoryShortage: decide,
    LeaseExpired: decide,
    Takeover: _takes_over,
    JobRestart: _is_restarted,
    JobResumption: _is_resumed,
}
