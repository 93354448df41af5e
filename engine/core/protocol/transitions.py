"""The transitions of the membership protocol: a rule per kind of event.

Rules: a rule only changes the state; the orders to workers follow from the new state. A rule gets
messages of members only, and answers of the present epoch only. A repeated or late event changes nothing.
"""

from __future__ import annotations

from engine.core import messages
from engine.core.errors import ExitCode, ensure
from engine.core.exclusion import Cause, Exclusion, excluded, in_words
from engine.core.messages import WaitingMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage
from engine.core.protocol import events
from engine.core.protocol.events import WorkerWord
from engine.core.protocol.failure_detector import alive, dark, heard, last_seen, sighted, ticked, told, unresponsive
from engine.core.protocol.state import (
    GATHERING,
    Edge,
    Phase,
    State,
    begin,
    by_suspicion,
    ends_of,
    is_unknown,
    loses,
    loses_silent,
    rule,
    steps_after,
)
from engine.core.protocol.verdicts import (
    all_inventoried,
    begins_epoch,
    evict_suspect,
    halted,
    handed_over,
    may_restart,
    new_epoch,
    nobody_died,
    restarting,
    state_lost,
)
from engine.core.texts import exit_text, numbered

# The rules of requests, which are met later: a worker waits to become a member or leaves, the job ends, slots move.


@rule()
def waits(state: State, event: WorkerWord[WaitingMessage]) -> State:
    """Records that a worker waits to become a member; it may have become one, or be lost, when this is read again."""
    if event.worker in (*state.members, *state.waiting):
        return alive(state, event.worker, event.now_ns)
    if not is_unknown(state, event.worker):
        return state
    new = alive(state, event.worker, event.now_ns)
    eager = (*state.eager, event.worker) if event.message.joins else state.eager
    waiting, nodes = (*state.waiting, event.worker), {**state.nodes, event.worker: event.node}
    return new._replace(waiting=waiting, eager=eager, nodes=nodes)


@rule()
def leaves(state: State, event: events.Notice) -> State:
    """Records that a worker leaves at the next boundary, or that the job ends; waiting workers then leave at once."""
    if event.worker is None:
        running = state.committed + (state.phase is not Phase.RECONFIGURING)  # at a boundary no step is running
        free = [excluded(worker, Cause.LEFT, "was released, because the run ended") for worker in state.waiting]
        return loses(state._replace(last_step=min(state.last_step, running)), free)
    if event.worker in state.waiting or is_unknown(state, event.worker):
        return loses(state, [excluded(event.worker, Cause.LEFT, "left while waiting")])
    if event.worker not in state.members or event.worker in state.leaving:
        return state
    return state._replace(leaving=(*state.leaving, event.worker))


@rule()
def stops_early(state: State, event: events.EarlyStop) -> State:
    """Records the last step; waiting workers stay, as a loss may need them until its commit."""
    return state._replace(last_step=min(state.last_step, event.last_step))


@rule(Phase.DRAINING)
def stops_running(state: State, event: events.EarlyStop) -> State:
    """Records the last step; a prediction, which has its pass behind the last commit, ends at once."""
    new = stops_early.decide(state, event)
    return new._replace(phase=Phase.DRAINING) if new.is_over else new


@rule(Phase.HALTED)
def leaves_early(state: State, event: events.Notice) -> State:
    """Halts a job that is told to stop before its first step."""
    if event.worker is None:
        return halted(state, ExitCode.TERMINATED, "the job was stopped before training began")
    return leaves.decide(state, event)


@rule()
def must_wait(state: State, event: events.MemoryShortage) -> State:
    """Records who must wait for memory; a worker may be named before it waits."""
    free = {*state.members, *state.lost, *state.out, *state.exited}
    return state._replace(cramped={worker: why for worker, why in event.workers.items() if worker not in free})


@rule()
def wants(state: State, event: events.WantedOwners) -> State:
    """Records the wanted owners; the slots move at step boundaries, as soon as these hold whole replicas."""
    ensure(len(event.owners) in (0, len(state.owners)), f"{len(event.owners)} owners for {len(state.owners)} slots")
    new = state._replace(wanted=event.owners, wanted_why=event.why)
    if not (new.wanted_moves or new.awaits_joiners):
        new = new._replace(wanted=(), wanted_why="")
    if not state.awaits_inventories:
        return new
    return new._replace(wanted_at_start=new.wanted if new.wanted_moves else ())  # it goes out with the plan


@rule()
def wants_schedule(state: State, event: events.WantedSchedule) -> State:
    """Records the wanted schedule, which counts from the next step boundary on, and the owners that it needs."""
    new = state._replace(wanted_schedule=event.schedule, schedule_why=event.why)
    return wants.decide(new, events.WantedOwners(event.now_ns, event.owners, event.why)) if event.owners else new


# Parting: a worker that has given notice and cannot wait for the step boundary hands over inside the open step.
#
#     running --HandOver--> failing over    its slots go to holders of whole replicas; it stays a member that owns none
#             <--plan----                   it sends its accumulators, and the values that others lack
#     running --Departure-> failing over    it leaves; no value is lost with it
#
# Rules: both are epochs like that of a verdict, but the worker still answers, so no backward is run again. Until it
# leaves, at a boundary or before the end of its grace, it is a shadow: if an heir dies first, no state is lost.


@rule(Phase.FAILING_OVER)
def hands_over(state: State, event: events.HandOver) -> State:
    """Makes an epoch in the open step after which a leaving worker owns no slot that another holds."""
    worker = event.worker
    if worker not in state.members or worker not in state.leaving or worker in state.going:
        return state
    new = state._replace(going=(*state.going, worker))
    return new_epoch(new, event.now_ns, (), f"worker {worker} hands over inside step {state.committed + 1}")


@rule(Phase.FAILING_OVER)
def departs(state: State, event: events.Departure) -> State:
    """Lets a worker that owns no slot leave the open step."""
    worker = event.worker
    if worker not in state.members or worker not in state.leaving or worker in state.owners:
        return state
    left = excluded(worker, Cause.LEFT, f"has left inside step {state.committed + 1}")
    return new_epoch(state._replace(exited=(*state.exited, worker)), event.now_ns, [left])


@rule()
def joins(state: State, event: WorkerWord[messages.ReadyMessage]) -> State:
    """Records that a member is ready; a resumed coordinator may read this again."""
    new = alive(state, event.worker, event.now_ns)
    if event.worker in state.nodes:
        return new
    return new._replace(nodes={**state.nodes, event.worker: event.node}, moved_ns=event.now_ns)


@rule(Phase.RUNNING)
def joins_first(state: State, event: WorkerWord[messages.ReadyMessage]) -> State:
    """Starts the first epoch when the last worker joins."""
    new = joins.decide(state, event)
    if any(worker not in new.nodes for worker in new.members):
        return new
    now_ns = event.now_ns  # the time before counts for no step
    return new._replace(
        phase=Phase.RUNNING, epoch=state.epoch + 1, reason="every worker has joined", committed_ns=now_ns
    )


@rule()
def is_heard(state: State, event: WorkerWord[messages.HeartbeatMessage]) -> State:
    """Records the heartbeat; a tick judges it."""
    return heard(state, event.now_ns, event.worker, event.message)


@rule()
def suspects(state: State, event: WorkerWord[messages.SuspicionMessage]) -> State:
    """Opens a look for the first suspicion of an epoch; later ones count when one of the ends is given up."""
    peer = event.message.peer
    edge = Edge(event.worker, peer if peer in state.members else event.worker)
    if edge in state.look:
        return state
    return state._replace(look=(*state.look, edge), looked_ns=state.looked_ns if state.look else event.now_ns)


@rule(Phase.FAILING_OVER, Phase.HALTED)
def ends(state: State, event: events.ExitSeen) -> State:
    """Excludes a worker whose process ended before it was done, even with exit code 0."""
    if event.worker in state.exited:
        return state
    new = state._replace(exited=(*state.exited, event.worker))
    if event.worker in state.done:
        return new
    cause = Cause.RAISED if event.raised else Cause.DEATH
    out = excluded(event.worker, cause, event.raised or exit_text(event.code), last_seen(state, event.worker))
    if event.worker not in state.members:
        return loses(new, [] if event.worker in (*state.out, *state.lost) else [out])
    return new_epoch(new, event.now_ns, [out])


@rule(Phase.RESTARTING, Phase.FAILING_OVER, Phase.HALTED)
def ends_early(state: State, event: events.ExitSeen) -> State:
    """Restarts the workers if one ends before training, or without an heir before a commit, but not if it raised."""
    new = ends.decide(state, event)
    return new if event.raised else _again(state, new)


def _again(state: State, new: State) -> State:
    """Returns the state in which all workers begin again, if that is better than the loss of some in the new state."""
    has_heirs = new.phase is not Phase.HALTED and state.phase is not Phase.FORMING
    if new.members == state.members or has_heirs or not may_restart(state):
        return new
    return restarting(state, in_words(new.verdict))


@rule(Phase.FORMING)
def is_restarted(state: State, event: events.JobRestart) -> State:
    """Begins again, with workers that have not joined."""
    new = begin(state.options, state.owners, event.shadows or state.shadows, state.last_step, event.now_ns)
    return new._replace(epoch=state.epoch, restarts=state.restarts, reason=state.reason)


@rule(Phase.FAILING_OVER, Phase.HALTED)
def loses_node(state: State, event: events.LeaseExpired) -> State:
    """Excludes all workers of the node; they count as exited, because the node has no agent that could evict them."""
    new, out = _without(state, event.node)
    return new_epoch(new, event.now_ns, out) if out else new


def _without(state: State, node: str) -> tuple[State, list[Exclusion]]:
    """Returns the state after the end of all workers of a node, and the verdict on them, which is still to be made."""
    there = [worker for worker in state.members if state.nodes.get(worker) == node]
    how = f"was on host {node}, which is lost"
    out = [
        excluded(worker, Cause.NODE_LOST, how, last_seen(state, worker)) for worker in there if worker not in state.done
    ]
    waiting = [worker for worker in state.waiting if state.nodes.get(worker) == node]
    new = state._replace(exited=tuple(dict.fromkeys((*state.exited, *there, *waiting))))
    return loses(new, [excluded(worker, Cause.NODE_LOST, how) for worker in waiting]), out


@rule(Phase.RESTARTING, Phase.FAILING_OVER, Phase.HALTED)
def loses_node_early(state: State, event: events.LeaseExpired) -> State:
    """Restarts the workers, on the nodes that are left, if a node is lost before training or without heirs."""
    return _again(state, loses_node.decide(state, event))


@rule(Phase.HALTED)
def is_inventoried(state: State, event: WorkerWord[InventoryMessage]) -> State:
    """Records a worker's first inventory, with which it is frozen; the last inventory completes the set."""
    if event.worker in state.inventories:
        return state
    new = state._replace(
        inventories={**state.inventories, event.worker: event.message.holds},
        copies={**state.copies, event.worker: event.message.whole},
        moved_ns=event.now_ns,
    )
    return all_inventoried(new) if len(new.inventories) == len(new.members) else new


@rule(Phase.RUNNING, Phase.DRAINING, Phase.HALTED)
def agrees(state: State, event: WorkerWord[PlannedMessage]) -> State:
    """Continues training when all members have made the same plan; halts if two plans differ, which is a bug."""
    if len(state.inventories) < len(state.members) or event.worker in state.digests:
        return state
    plan = event.message
    first = next(iter(state.digests), event.worker)  # all that have answered agree with it
    if state.digests.get(first, plan.digest) != plan.digest:
        who = numbered("worker", sorted((first, event.worker)), " and ")
        return halted(state, ExitCode.INTERNAL, f"{who} made different plans for epoch {state.epoch}")
    new = state._replace(digests={**state.digests, event.worker: plan.digest}, moved_ns=event.now_ns)
    if len(new.digests) < len(new.members):
        return new
    if plan.lost_stages:
        return state_lost(new, plan.lost_stages)
    return new._replace(phase=Phase.DRAINING if new.committed >= new.last_step else Phase.RUNNING)


@rule(Phase.RECONFIGURING, Phase.DRAINING)
def commits(state: State, event: events.StepCommitted) -> State:
    """Commits a step; at this boundary the job may end, slots may move, and leaving workers may depart."""
    if event.step != state.committed + 1:
        return state
    new = state._replace(
        committed=event.step,
        began=state.owners,
        shadows=event.shadows or state.shadows,
        patient=event.patient,
        repeats={},
        moved_ns=event.now_ns,
        committed_ns=event.now_ns,
        steps_ns=steps_after(state.steps_ns, event.now_ns - state.committed_ns),
    )
    if event.step >= state.last_step:
        return new._replace(phase=Phase.DRAINING)
    if event.waits:
        return new
    return handed_over(new, event.now_ns, event.joins) if event.joins or begins_epoch(new) else new


@rule(Phase.FINISHED)
def is_done(state: State, event: WorkerWord[messages.FinishedMessage]) -> State:
    """Finishes the job when all members are done; until then each may have to take over from another."""
    if event.worker in state.done:
        return state
    new = state._replace(done=(*state.done, event.worker), moved_ns=event.now_ns)
    return new._replace(phase=Phase.FINISHED) if len(new.done) == len(new.members) else new


@rule(Phase.FAILING_OVER, Phase.HALTED)
def looks_at_clock(state: State, event: events.Tick) -> State:
    """Excludes silent, hanging and late workers; after a look without a death, or a stall, makes an empty verdict."""
    now_ns = event.now_ns
    state = state._replace(round_trip_ns=event.round_trip_ns)
    state = sighted(told(state, event.words, now_ns), event.sights, now_ns)
    state = loses_silent(ticked(state, now_ns, event.unseen), now_ns)
    if dead := unresponsive(state, now_ns):
        return new_epoch(state, now_ns, dead)
    if state.look and now_ns - state.looked_ns >= state.patience.look_ns:
        first = numbered("worker", ends_of(state.look[:1]), " and ")
        return nobody_died(state, now_ns, by_suspicion(state.look), f"a transfer failed at {first}")
    if edges := dark(state, now_ns):
        worker, peer = edges[0]
        return evict_suspect(
            state, now_ns, by_suspicion(edges), f"what worker {peer} sent to worker {worker} has not arrived"
        )
    patience_ns, owing, failed_to = _owed(state)
    if now_ns - state.moved_ns < patience_ns:
        return state
    within = f"within {patience_ns / 1e9:.1f} s"
    if owing:
        late = [excluded(worker, Cause.NO_ANSWER, f"did not {failed_to} {within}") for worker in owing]
        return new_epoch(state, now_ns, late)
    return nobody_died(state, now_ns, (), f"no worker moved {within}")


@rule(Phase.FAILING_OVER, Phase.HALTED)
def takes_over(state: State, event: events.Takeover) -> State:
    """Makes a verdict on the lost host's workers, or an empty one: members report what they hold, and vote again."""
    new, out = _without(state, event.lost) if event.lost else (state, [])
    return new_epoch(new, event.now_ns, out, "" if out else "another coordinator has taken over")


@rule(Phase.RESTARTING, Phase.FAILING_OVER, Phase.HALTED)
def takes_over_early(state: State, event: events.Takeover) -> State:
    """Restarts the workers if a node is lost without heirs before the first commit."""
    return _again(state, takes_over.decide(state, event))


@rule(Phase.FAILING_OVER, Phase.FINISHED)
def takes_over_at_end(state: State, event: events.Takeover) -> State:
    """Does the same after the last commit; the job is finished if all holders of a stage were done and have ended."""
    return takes_over.decide(state, event)


def _owed(state: State) -> tuple[int, list[int], str]:
    """Returns the deadline of the phase, the workers that owe an answer (none if unknown), and that answer."""
    options, members = state.patience, state.members
    unheard = [worker for worker in members if worker not in state.sightings]
    if state.phase is Phase.FORMING and unheard:
        return options.hail_ns, unheard, "send a message"
    if state.phase is Phase.FORMING or state.phase in GATHERING:
        if unjoined := [worker for worker in members if worker not in state.nodes]:
            return options.form_ns, unjoined, "join"
        if silent := [worker for worker in members if worker not in state.inventories]:
            return options.answer_ns, silent, "report its inventory"
        return options.answer_ns, [worker for worker in members if worker not in state.digests], "make the plan"
    return options.stall_ns, [], ""


@rule()
def changes_nothing(state: State, event: events.Event) -> State:
    """Ignores the event, which comes too late."""
    return state
