"""Values of ``--kill``: ``STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE]``.

Rules: the rules for faults of a scenario refuse a kill that can never strike. The default action is the stage's middle
backward in the job's program. In a step after the recovery from another kill, this is a whole backward, because the
plan of a recovery does not split them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.errors import Problem, UserError, nearest
from engine.core.faults.fault import WHENS, At, FaultKind
from engine.core.faults.scenario import Expect, FaultSpec, Scenario, Target
from engine.core.faults.scenario_rules import PlannedFaults, changes_by, never_striking, own_actions
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.core.ownership import Slot

KILL_FORM = "STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE]"

_KILL = "kill"
_KINDS = {_KILL: FaultKind(_KILL, "SIGKILL", "agent", ends=True)}
_NOTHING = Expect()
_OPS = {op.value: op for op in Op}
_BACKWARDS = (Op.B, Op.I)  # a microbatch has one of them: a whole backward, or the part for the inputs


def kill_scenario(texts: Sequence[str], job: Job, expect: Expect = _NOTHING) -> Scenario:
    """Returns the scenario of a job with a fault per value of ``--kill``; the value is the id of the fault.

    Raises:
        UserError: with every problem found, such as a kill that can never strike.
    """
    moments: list[tuple[str, At]] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            moments.append((text.strip(), kill_moment(text, job)))
        except UserError as error:
            problems += error.problems
    changed_by = min((changes_by(at) for _, at in moments), default=job.steps)
    faults: dict[At, FaultSpec] = {}
    for name, meant in moments:
        is_whole = meant.step > changed_by and meant.action.op is Op.I and not _names(name, Op.I)
        at = replace(meant, action=meant.action._replace(op=Op.B)) if is_whole else meant
        if at in faults:
            problems.append(_problem("each fault once", name))
        faults.setdefault(at, FaultSpec(name, at, Target(), _KILL))
    planned = PlannedFaults(job, dict(enumerate(faults.values())), whole=not problems)
    for fault in faults.values():
        field = f"--kill {fault.id}"
        problems += [replace(problem, field=field) for problem in never_striking(planned, job, fault, _KINDS)]
    if problems:
        raise UserError(problems)
    return Scenario(job.name, "", job, tuple(faults.values()), expect)


def kill_moment(text: str, job: Job) -> At:
    """Returns the moment of a value of ``--kill``; does not check that it can come.

    By default it is before the middle backward of the stage, in pipeline 0.

    Raises:
        UserError: with every problem found.
    """
    left, _, pipeline_text = text.strip().partition("@")
    step_text, *rest = left.split(":")
    if not rest or len(rest) > 4 or ("@" in text and not pipeline_text):
        raise UserError([_problem(KILL_FORM, text, "such as 5:2 or 5:2:B:3")])
    problems: list[Problem] = []
    stage_text, *parts = rest
    when = next((each for each in WHENS if parts and parts[-1] == each), None)
    parts = parts[:-1] if when else parts
    step = _number("a step", step_text, text, problems)
    slot = (
        _number("a pipeline", pipeline_text or "0", text, problems),
        _number(f"a {job.slot_noun}", stage_text, text, problems),
    )
    ops = _ops(parts, text, problems, job.slot_noun)
    microbatch = _number("a microbatch", parts[1], text, problems) if len(parts) > 1 else None
    if problems:
        raise UserError(problems)
    return At(step, _action(job, slot, ops, microbatch), when or "before")


def _ops(parts: Sequence[str], text: str, problems: list[Problem], noun: str) -> tuple[Op, ...]:
    """Returns the ops that ``ACTION[:MICROBATCH]`` can mean; appends its problems."""
    if len(parts) > 2:
        problems.append(_problem(KILL_FORM, text, f"WHEN is one of {', '.join(WHENS)}"))
    if not parts:
        return _BACKWARDS
    op = _OPS.get(parts[0])
    if op is None:
        problems.append(_problem(f"an action: one of {', '.join(_OPS)}", text, nearest(parts[0], _OPS)))
        return ()
    if op in STAGE_OPS and len(parts) > 1:
        problems.append(_problem(f"no microbatch after {op}, which concerns the whole {noun}", text))
    return (op,)


def _names(text: str, op: Op) -> bool:
    """Returns whether a kill names this op."""
    return op.value in text.partition("@")[0].split(":")


def _action(job: Job, slot: Slot, ops: Sequence[Op], microbatch: int | None) -> Action:
    """Returns the action of a slot with one of these ops, the middle one by default; it may not be in the program."""
    pipeline, stage = slot
    if ops[0] in STAGE_OPS:
        return Action(stage, ops[0], WHOLE_STAGE, pipeline)
    own = own_actions(*initial_program(job), slot) if job.has_program else ()
    numbers = {each.microbatch: each for each in own if each.op in ops}
    middle = sorted(numbers)[len(numbers) // 2] if numbers else job.program_microbatches // 2
    microbatch = middle if microbatch is None else microbatch
    return numbers.get(microbatch, Action(stage, ops[0], microbatch, pipeline))


def _number(what: str, part: str, text: str, problems: list[Problem]) -> int:
    """Returns the integer that `part` spells; else appends a problem and returns 0."""
    if part.isascii() and part.isdigit() and len(part) < 10:
        return int(part)
    problems.append(Problem(f"--kill {text}", f"{what}, a whole number", repr(part) if part else "nothing"))
    return 0


def _problem(expected: str, text: str, hint: str = "") -> Problem:
    return Problem("--kill", expected, repr(text), hint)
