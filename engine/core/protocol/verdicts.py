"""Verdicts: the workers that are out, the heirs of their slots, and the halt of a job.

Rules: each verdict, even an empty one, makes a new epoch, which begins without inventories. The heir of a slot is the
first of these members: a shadow that stays, a worker that holds the stage in another pipeline and stays, a shadow or
such a worker that is leaving. Slots of dead workers move at once, and those of workers that hand over inside the step,
if a staying worker holds them. Those of other leaving workers, and those with another wanted owner, move at a step
boundary to a worker with a whole replica; wanted owners without one become shadows in the next step that heals, then
all take over at once. A shadow healed in the open step counts once its inventory shows it. So a slot is lost only after
all inventories have come, or at once if the job has no shadows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from engine.core.errors import ExitCode
from engine.core.exclusion import Cause, Exclusion, excluded, in_words
from engine.core.protocol.state import Phase, State
from engine.core.texts import numbered, places_text


class Heirs(NamedTuple):
    """The new owners and shadows of each slot, and the slots without an heir."""

    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]


def heirs(state: State, dead: Collection[int], hand_over: bool = False) -> Heirs:
    """Returns the heirs of all slots without the `dead` workers; with `hand_over`, moves slots that are to move."""
    owners, shadows, lost = [], [], []
    members = frozenset(state.members).difference(dead)
    wanted = state.wanted_moves if hand_over else {}
    is_ready = all(_holds(state, slot, worker) for slot, worker in wanted.items())
    for slot, owner in enumerate(state.owners):
        live = [worker for worker in state.shadows[slot] if worker in members]
        heir, is_gone = owner, owner not in members
        hands_over = hand_over and owner in state.leaving and owner not in state.patient
        leaves = hands_over or owner in state.going
        if is_gone or leaves or (is_ready and slot in wanted):
            line = [*live, *(worker for worker in holders_in_other_pipelines(state, slot) if worker not in dead)]
            staying = [worker for worker in line if worker not in state.leaving]
            first = [worker for worker in line if worker == wanted.get(slot)]
            heir = next(iter(first + staying * (is_gone or leaves) + line * is_gone), owner)
            if not is_gone:
                live.append(owner)  # as a shadow, until it leaves
        if is_gone and heir == owner:
            lost.append(slot)
        owners.append(heir)
        shadows.append(tuple(worker for worker in live if worker != heir))
    return Heirs(tuple(owners), tuple(shadows), tuple(lost))


def _holds(state: State, slot: int, worker: int) -> bool:
    return worker in state.shadows[slot] or worker in holders_in_other_pipelines(state, slot)


def holders_in_other_pipelines(state: State, slot: int) -> list[int]:
    """Returns the members with the stage of a slot in other pipelines, owners first; none with shards."""
    if state.options.sharded:
        return []
    num_slots, stages = len(state.owners), state.options.stages
    others = [(slot + more) % num_slots for more in range(stages, num_slots, stages)]
    holders = [state.owners[each] for each in others] + [worker for each in others for worker in state.shadows[each]]
    return [worker for worker in dict.fromkeys(holders) if worker in state.members]


def new_epoch(
    state: State,
    now_ns: int,
    failed: Iterable[Exclusion],
    reason: str = "",
    phase: Phase = Phase.FAILING_OVER,
    joins: tuple[int, ...] = (),
) -> State:
    """Returns the next epoch, without workers that `failed` or left, with `joins`; ends the job if a slot is lost."""
    gone = [worker for worker in state.members if worker in state.exited]
    out = {worker: excluded(worker, Cause.FINISHED, "had finished and left") for worker in gone}
    out |= {each.worker: each for each in failed}
    inherited = heirs(state, out, hand_over=phase is Phase.RECONFIGURING)
    new = state._replace(
        phase=phase,
        epoch=state.epoch + 1,
        members=tuple(worker for worker in state.members if worker not in out),
        owners=inherited.owners,
        began=inherited.owners if phase is Phase.RECONFIGURING else state.began,
        shadows=inherited.shadows,
        verdict=tuple(out.values()),
        reason=reason or in_words(out.values()),
        planned=phase is Phase.RECONFIGURING,
        schedule=state.wanted_schedule if phase is Phase.RECONFIGURING else state.schedule,
        out={**state.out, **out},
        inventories={},
        copies={},
        digests={},
        done=(),
        leaving_at_start=tuple(worker for worker in state.leaving if worker not in out),
        going=tuple(worker for worker in state.going if worker not in out),
        look=(),
        moved_ns=now_ns,
    )
    new = _with_waiting(state, new, now_ns, joins)
    if not new.awaits_joiners:
        wanted = new.wanted if new.wanted_moves else ()
        new = new._replace(wanted=wanted, wanted_why=new.wanted_why if wanted else "")
    new = new._replace(wanted_at_start=new.wanted if new.wanted_moves else ())
    is_healing = state.options.redundant or state.wanted_at_start  # a member may have a replica that nobody knows of
    may_hold = is_healing and new.members and not state.is_over
    return state_lost(new, inherited.lost) if inherited.lost and not may_hold else new


def _with_waiting(before: State, new: State, now_ns: int, joins: tuple[int, ...]) -> State:
    """Returns a new epoch with `joins` as members; in a failover with as many waiting workers as it lacks."""
    is_training = before.phase is not Phase.FORMING and new.phase is Phase.FAILING_OVER and not before.is_over
    if is_training and new.members:
        staying = [worker for worker in before.members if worker not in before.leaving]
        joins = new.joiners_for(max(new.options.workers, len(staying)))
    if not joins:
        return new
    sightings = {worker: new.sightings[worker].with_new_deadlines(now_ns) for worker in joins}
    joined = f"{numbered('worker', joins, ' and ')} {'has' if len(joins) == 1 else 'have'} joined"
    return new._replace(
        members=tuple(sorted((*new.members, *joins))),
        waiting=tuple(worker for worker in new.waiting if worker not in joins),
        reason=f"{new.reason}; {joined}" if new.reason else joined,
        sightings={**new.sightings, **sightings},
    )


def all_inventoried(state: State) -> State:
    """Returns the state after the last inventory: its holders become shadows and heirs; without heirs the job ends."""
    holders = [dict.fromkeys(line) for line in state.shadows]  # of each slot: its shadows, then others with a replica
    for worker in state.members:
        for slot in state.copies.get(worker, ()):
            holders[slot].setdefault(worker)
    known = state._replace(shadows=tuple(map(tuple, holders)))
    inherited = heirs(known, ())
    new = state._replace(owners=inherited.owners, shadows=inherited.shadows)
    return state_lost(new, inherited.lost) if inherited.lost else new


def nobody_died(state: State, now_ns: int, suspects: tuple[int, ...], symptom: str) -> State:
    """Returns the next epoch with the same members; after `max_repeats`, without a replaceable suspect, or a halt."""
    count = state.repeats.get(symptom, 0) + 1
    if count <= state.options.max_repeats:
        new = state._replace(repeats={**state.repeats, symptom: count})
        return new_epoch(new, now_ns, (), f"{symptom}, but no worker has died")
    repeated = symptom if count == 1 else f"{symptom}, {count} times in a row"
    victim = _replaceable(state, suspects)
    if victim is None:
        return finish_or_halt(state, ExitCode.NOT_RECOVERED, f"training did not recover: {repeated}")
    return new_epoch(state, now_ns, [excluded(victim, Cause.GIVEN_UP, f"is given up: {repeated}")])


def evict_suspect(state: State, now_ns: int, suspects: tuple[int, ...], symptom: str) -> State:
    """Returns the next epoch without the first suspect whose slots all have heirs, or that of an empty verdict."""
    victim = _replaceable(state, suspects)
    if victim is None:
        return nobody_died(state, now_ns, (), symptom)
    return new_epoch(state, now_ns, [excluded(victim, Cause.GIVEN_UP, f"is given up: {symptom}")])


def _replaceable(state: State, suspects: Iterable[int]) -> int | None:
    """Returns the first suspect whose slots all have heirs, as far as they are not lost already."""
    lost = heirs(state, ()).lost
    return next((worker for worker in suspects if heirs(state, (worker,)).lost == lost), None)


def handed_over(state: State, now_ns: int, joins: tuple[int, ...] = ()) -> State:
    """Returns the next epoch at a step boundary: slots move, workers join and leave, the schedule may change."""
    after, moved = f"after step {state.committed}", _moved(state)
    gone = [excluded(worker, Cause.LEFT, f"has left {after}") for worker in free_to_leave(state)]
    moving = leavers(state)
    reasons = [f"{numbered('worker', moving, ' and ')} handed over {after}"] if moving else []
    reasons += _moves_in_words(state, moved)
    reasons += [in_words(gone)] if gone else []
    if state.changes_schedule:
        name = f"schedule {state.wanted_schedule}" if state.wanted_schedule else "the schedule of the job"
        reasons.append(f"{name} from step {state.committed + 1} on ({state.schedule_why})")
    state = state._replace(exited=(*state.exited, *(each.worker for each in gone)))
    return new_epoch(state, now_ns, gone, "; ".join(reasons), Phase.RECONFIGURING, joins)


def _moves_in_words(state: State, moved: Collection[int]) -> Iterator[str]:
    """Returns in words the slots that move to wanted owners after the last commit, and those that are to move later."""
    for has_come, words in ((True, f"move after step {state.committed}"), (False, "are to move")):
        slots: dict[int, list[int]] = {}
        for slot, worker in state.wanted_moves.items():
            if (slot in moved) is has_come:
                slots.setdefault(worker, []).append(slot)
        noun, sizes = state.options.noun, (state.options.stages, len(state.owners))
        moves = [f"{places_text(noun, places, *sizes)} to worker {worker}" for worker, places in sorted(slots.items())]
        if moves:
            yield f"{noun}s {words} ({state.wanted_why}): {'; '.join(moves)}"


def begins_epoch(state: State) -> bool:
    """Returns whether the last commit begins an epoch: slots move, workers leave, owners or schedule change."""
    if state.changes_schedule:
        return True
    if not state.leaving and not state.wanted:
        return False
    is_news = state.wanted != state.wanted_at_start and state.wanted_moves  # members learn of it with an epoch
    return bool(is_news or _moved(state) or free_to_leave(state))


def _moved(state: State) -> dict[int, int]:
    """Returns the slots that move at this step boundary, each with its owner so far."""
    after = heirs(state, (), hand_over=True).owners
    return {slot: owner for slot, owner in enumerate(state.owners) if owner != after[slot]}


def leavers(state: State) -> tuple[int, ...]:
    """Returns the leaving workers with slots that heirs can take over at this step boundary."""
    return tuple(sorted({owner for owner in _moved(state).values() if owner in state.leaving}))


def unable_to_leave(state: State) -> dict[int, tuple[int, ...]]:
    """Returns the leaving workers that can never leave, each with its stages that no other worker can get."""
    if state.options.redundant and (state.joiners or any(worker not in state.leaving for worker in state.members)):
        return {}
    stages: dict[int, set[int]] = {}
    for slot, heir in enumerate(heirs(state, (), hand_over=True).owners):
        if heir in state.leaving and heir in state.members:
            stages.setdefault(heir, set()).add(slot % state.options.stages)
    return {worker: tuple(sorted(stages[worker])) for worker in sorted(stages)}


def free_to_leave(state: State) -> tuple[int, ...]:
    """Returns the leaving workers that may leave now: they own no slot, and no shadow must be kept for a slot."""
    return tuple(worker for worker in state.leaving if worker in state.members and not _is_needed(state, worker))


def _is_needed(state: State, worker: int) -> bool:
    staying = [member for member in state.members if member not in state.leaving]
    for owner, line in zip(state.owners, state.shadows, strict=True):
        if owner == worker:
            return True
        if not state.options.redundant:
            continue  # no worker would replace it as a shadow
        replaced = any(shadow in staying for shadow in line)
        if worker in line and not replaced and any(member != owner for member in staying):
            return True
    return False


def may_restart(state: State) -> bool:
    """Returns whether the death of a worker without an heir, or before training, restarts the workers."""
    return state.committed == state.options.begun and not state.out and state.restarts < state.options.max_restarts


def restarting(state: State, reason: str) -> State:
    """Returns the state of a job whose workers end, to be started again."""
    return state._replace(phase=Phase.RESTARTING, restarts=state.restarts + 1, reason=reason, look=())


def state_lost(state: State, slots: tuple[int, ...]) -> State:
    """Returns the end of the job because no member holds the stages of these slots."""
    stages = tuple(sorted({slot % state.options.stages for slot in slots}))
    where = f"in epoch {state.epoch}; last committed step {state.committed}"
    text = f"the state of {numbered(state.options.noun, stages)} is lost {where}; {state.reason}"
    return finish_or_halt(state, ExitCode.STATE_LOST, text)._replace(lost_stages=stages)


def finish_or_halt(state: State, exit_code: ExitCode, reason: str) -> State:
    """Returns the end of a job that cannot continue: finished if every step is committed, else halted."""
    if state.is_over:
        return state._replace(phase=Phase.FINISHED, reason=reason, look=())
    return halted(state, exit_code, reason)


def halted(state: State, exit_code: ExitCode, reason: str) -> State:
    """Returns the state halted; `reason` is shown to the user."""
    return state._replace(phase=Phase.HALTED, exit_code=int(exit_code), reason=reason, look=())


# Deadly hosts: those whose loss loses the state of a slot, because no member on another host holds its stage.
#
# A run on one host has none: what ends its only host ends the run, and that is no matter of placement.

NO_MORE = "the run survives the loss of any one host again"


def deadly_hosts(state: State) -> dict[str, tuple[int, ...]]:
    """Returns the deadly hosts by their names, each with the stages that are lost with it."""
    if len({*state.nodes.values()}) < 2:
        return {}
    host_of = {worker: state.nodes[worker] for worker in state.members}
    stages: dict[str, set[int]] = {host: set() for host in sorted({*host_of.values()})}
    for slot, owner in enumerate(state.owners):
        line = (owner, *state.shadows[slot], *holders_in_other_pipelines(state, slot))
        hosts = {host_of[worker] for worker in line if worker in host_of}
        for host in (hosts or stages) if len(hosts) < 2 else ():
            stages[host].add(slot % state.options.stages)
    return {host: tuple(sorted(lost)) for host, lost in stages.items() if lost}


def deadly_in_words(hosts: Mapping[str, tuple[int, ...]], noun: str) -> str:
    """Returns a sentence about each deadly host and its stages, which are each a `noun`; empty without one."""
    begin = "the run cannot survive the loss of host"
    return "; ".join(f"{begin} {host}: no other host holds {numbered(noun, of)}" for host, of in hosts.items())
