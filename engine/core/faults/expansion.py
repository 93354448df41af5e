"""Expansion: turns the faults of a scenario, which may be random, into concrete ones before the run.

Rules: the result is a pure function of scenario and seed: each draw has a key of its own, so that one draw does not
shift another. All slots are equally likely victims. Only the owner of a slot, or the worker in a role, is determined
during the run, at the moment of the strike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine.core.action import Action, Op, StepPosition, ops_at
from engine.core.errors import Problem, UserError
from engine.core.faults.fault import HOST_KINDS, OTHER, After, At, Fault, Host, InStep, Owner, Role, Victim, Worker
from engine.core.faults.scenario import Every, FaultSpec, Scenario, Target
from engine.core.job.job import Job
from engine.core.job.partition import initial_program, known_ownership
from engine.core.ownership import Ownership, Slot
from engine.core.program.build import build_program
from engine.core.program.remaining_tasks import replayed
from engine.core.random_key import random_key

# Ops that each slot has in every step under any ownership; a transfer between two stages of one worker does not exist.
_ALWAYS = ops_at(StepPosition.FORWARD, StepPosition.BACKWARD, StepPosition.REPLICA)


def expand(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    """Returns the concrete faults of a scenario that breaks no rule (`scenario_rules.py`), in its order.

    Without a program, as its generator was not called, or a number of steps, it leaves out the faults of ``every``:
    they strike at its actions.

    Raises:
        UserError: with each fault that has too few slots for its victims, or no moment within the job.
    """
    faults: list[Fault] = []
    problems: list[Problem] = []
    moments = {each.trigger for each in scenario.faults if isinstance(each.trigger, At)}
    for number, spec in enumerate(scenario.faults):
        dice = _Dice(seed, spec.id)
        if isinstance(spec.trigger, Every) and not (scenario.job.has_program and scenario.job.has_steps):
            continue
        try:
            faults += _expanded(spec, scenario.job, dice, moments, f"faults.{number}")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return tuple(faults)


def _expanded(spec: FaultSpec, job: Job, dice: _Dice, occupied: set[At], place: str) -> list[Fault]:
    trigger, target = spec.trigger, spec.target
    if isinstance(trigger, Every):
        moments = list(_arrivals(trigger, target, job, dice, occupied))
        if not moments:
            hint = "a smaller mtbf, more steps, or another --seed"
            raise UserError([Problem(f"{place}.every", f"a fault in the {job.steps} steps of the job", "none", hint)])
        return [
            Fault(
                f"{spec.id}-{number}",
                at,
                _from_slot((at.action.pipeline, at.action.stage), target, job, dice, place),
                spec.do,
                spec.parameters,
            )
            for number, at in enumerate(moments, start=1)
        ]
    if isinstance(trigger, InStep) and target.worker is None:
        usual = HOST_KINDS[spec.do].target
        victims: tuple[Victim, ...] = (Host(target.host or (OTHER if usual == "host" else usual)),)
    else:
        victims = _victims(trigger, target, job, dice, place)
    return [Fault(spec.id, trigger, victims, spec.do, spec.parameters)]


def _arrivals(every: Every, target: Target, job: Job, dice: _Dice, occupied: set[At]) -> Iterator[At]:
    """Yields moments at exponential gaps, each at an action of the slot, or at its next one that is not `occupied`."""
    program, ownership = initial_program(job)
    at_steps = 0.0
    for _ in range(every.count):
        at_steps -= math.log(1.0 - dice.fraction()) * every.mtbf_steps
        if at_steps >= job.steps:
            return
        pipeline, stage = _slot_of(target) or dice.choice(_slots(job))
        actions = [
            action
            for action in program[ownership.owner(pipeline, stage)]
            if (action.pipeline, action.stage) == (pipeline, stage) and action.op in _ALWAYS
        ]
        first = int(at_steps % 1.0 * len(actions))
        moments = [At(int(at_steps), action) for action in (*actions[first:], *actions[:first])]
        moment = next((each for each in moments if each not in occupied), None)
        if moment is not None:
            occupied.add(moment)
            yield moment


def _victims(trigger: At | After | InStep, target: Target, job: Job, dice: _Dice, place: str) -> tuple[Victim, ...]:
    if target.worker is not None:
        return (Worker(target.worker),)
    slot = _slot_of(target)
    if target.role == "random":
        slot = dice.choice(_slots(job))
    elif target.role is not None:
        return (Role(target.role),)
    if slot is None and isinstance(trigger, At):
        slot = (trigger.action.pipeline, trigger.action.stage)
    return (Role("recoverer"),) if slot is None else _from_slot(slot, target, job, dice, place)


def _from_slot(first: Slot, target: Target, job: Job, dice: _Dice, place: str) -> tuple[Victim, ...]:
    """Returns the owners of the first slot and of further ones, `target.count` in all; raises UserError."""
    pipeline, stage = first
    slots = [first]
    if target.adjacent:
        slots += [(pipeline, (stage + more) % job.slots) for more in range(1, target.count)]
    while len(slots) < target.count:
        left = [
            slot
            for slot in _slots(job)
            if slot not in slots
            and not (target.adjacent is False and any(_adjacent(slot, other, job) for other in slots))
        ]
        if not left:
            expected = f"a grid with room for {target.count} victims" + (
                " that are not adjacent" if target.adjacent is False else ""
            )
            raise UserError([Problem(f"{place}.target.count", expected, f"{job.pipelines} x {job.slots} slots")])
        slots.append(dice.choice(left))
    return tuple(Owner(*slot) for slot in slots)


def _adjacent(one: Slot, other: Slot, job: Job) -> bool:
    """Returns whether two slots are neighbours in one pipeline; its last and first stage count as neighbours."""
    return one[0] == other[0] and (one[1] - other[1]) % job.slots in (1, job.slots - 1)


def _slots(job: Job) -> list[Slot]:
    return [(pipeline, stage) for pipeline in range(job.pipelines) for stage in range(job.slots)]


def _slot_of(target: Target) -> Slot | None:
    if target.pipeline is None or target.stage is None:
        return None
    return (target.pipeline, target.stage)


class _Dice:
    """The random draws of one fault, each with its own key."""

    def __init__(self, seed: int, name: str):
        self.seed, self.name, self.drawn = seed, name, 0

    def fraction(self) -> float:
        """Returns a uniform number in [0, 1)."""
        self.drawn += 1
        return (random_key(self.seed, "fault", self.name, self.drawn) >> 10) / (1 << 53)

    def choice(self, slots: Sequence[Slot]) -> Slot:
        """Returns one of the slots, all equally likely."""
        return slots[int(self.fraction() * len(slots))]


def describe(faults: Sequence[Fault], job: Job) -> list[str]:
    """Returns one line per fault: its kind, victims, moment and, if the placement is known, the first owners."""
    lines = []
    ownership = known_ownership(job)
    for fault in faults:
        lines.append(f"{fault.id}: {fault.in_words(job.slot_noun)}")
        slots = [each for each in fault.victims if isinstance(each, Owner)]
        if slots and ownership is not None:
            named = [f"worker {ownership.owner(each.pipeline, each.stage)}" for each in slots]
            lines[-1] += (
                f"; {' and '.join(named)}, unless the {job.slot_noun}{' has' if len(named) == 1 else 's have'} moved"
            )
    return lines


# The catch-up point of a recovery: the moment at which the heir has redone the work of the victim on a slot.
#
# Rule: the heir replays the backwards of the slot from the first microbatch on, unless a stream has brought some.
# It has caught up when the first of these moments comes:
# - after the last backward that the victim had begun (the first one if it had begun none);
# - with streams, before the next backward, because the stream may have brought the last one;
# - before the COMMIT, because a slot whose backwards were all done is not replayed.


def catch_up_points(job: Job, before: Ownership, slot: Slot, at: tuple[int, str], step: int) -> tuple[At, ...]:
    """Returns the moments of which the first is the catch-up point; none if the victim had not begun `step`.

    `at` are the last step and action of the slot's owner by the ownership `before`.
    """
    pipeline, stage = slot
    if at[0] != step or not at[1]:
        return ()
    backwards = [Action(stage, Op.B, microbatch, pipeline) for microbatch in range(job.program_microbatches)]
    program = build_program(job.schedule, before, job.redundancy, log_every=job.log_every, copy_time=job.copy_time)
    actions = program[before.owner(*slot)]
    last = backwards[-1]  # the victim ran the plan of another recovery: this may be a little late
    was_at = [position for position, action in enumerate(actions) if str(action) == at[1]]
    if was_at:
        last = [backwards[0], *replayed(backwards, actions[: was_at[0] + 1])][-1]
    behind = backwards[last.microbatch + 1 : last.microbatch + 2] if job.log_every else []
    return (
        At(step, last, "after"),
        *(At(step, each, "before") for each in behind),
        At(step, Action(stage, Op.COMMIT, pipeline=pipeline), "before"),
    )
