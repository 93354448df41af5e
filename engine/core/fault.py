"""Faults: what is to be done to a worker, and at which moment of which action; and how a user writes one.

Rules: a fault has a logical time, never one of a clock: before, during or after an action of the owner of a slot in a
step. It strikes once, also when its step is run again by an heir. A fault that never strikes proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.errors import Problem, UserError, nearest
from engine.core.job import Job

When = Literal["before", "during", "after"]
Do = Literal["kill", "terminate", "stop"]  # SIGKILL, SIGTERM, SIGSTOP

WHENS: tuple[When, ...] = ("before", "during", "after")
KILL_FORM = "STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE]"

_OPS = {op.value: op for op in Op}
# Stages at the ends of a pipeline have nobody to exchange these with.
_NOT_ON_FIRST = frozenset({Op.RECV_F, Op.SEND_B})
_NOT_ON_LAST = frozenset({Op.RECV_B, Op.SEND_F})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `id` is unique in a run. `microbatch` is -1 for the ops that concern a whole stage."""

    id: str
    step: int
    pipeline: int
    stage: int
    op: Op
    microbatch: int = WHOLE_STAGE
    when: When = "before"
    do: Do = "kill"

    @property
    def action(self) -> Action:
        """The action at which it strikes."""
        return Action(self.stage, self.op, self.microbatch, self.pipeline)

    def __str__(self) -> str:
        return f"{self.do} {self.when} {self.action} of step {self.step}"


def struck_by(faults: Sequence[Fault], step: int, action: Action, when: When) -> Fault | None:
    """Returns the first of the faults that strike at this moment, or None."""
    return next((each for each in faults if (each.step, each.action, each.when) == (step, action, when)), None)


def parse_kills(texts: Sequence[str], job: Job) -> tuple[Fault, ...]:
    """Returns the faults that the values of ``--kill`` spell for a job.

    Raises:
        UserError: with every problem found.
    """
    faults: list[Fault] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            fault = parse_kill(text, job)
        except UserError as error:
            problems += error.problems
            continue
        if struck_by(faults, fault.step, fault.action, fault.when) is not None:
            problems.append(_problem("each fault once", text))
        faults.append(fault)
    if problems:
        raise UserError(problems)
    return tuple(faults)


def parse_kill(text: str, job: Job) -> Fault:
    """Returns the fault that a value of ``--kill`` spells; its id is the text.

    Without an action it is before the middle backward of the stage; without a pipeline it is pipeline 0.

    Raises:
        UserError: with every problem found.
    """
    left, _, pipeline_text = text.strip().partition("@")
    step_text, *rest = left.split(":")
    if not rest or len(rest) > 4 or ("@" in text and not pipeline_text):
        raise UserError([_problem(KILL_FORM, text, "such as 5:2 or 5:2:B:3")])
    problems: list[Problem] = []
    stage_text, *moment = rest
    step = _count("a step", step_text, job.steps, text, problems)
    stage = _count("a stage", stage_text, job.stages, text, problems)
    pipeline = _count("a pipeline", pipeline_text or "0", job.pipelines, text, problems)
    when = next((each for each in WHENS if moment and moment[-1] == each), None)
    op, microbatch = _action(moment[:-1] if when else moment, stage, job, text, problems)
    if problems:
        raise UserError(problems)
    return Fault(text.strip(), step, pipeline, stage, op, microbatch, when or "before")


def _action(parts: Sequence[str], stage: int, job: Job, text: str, problems: list[Problem]) -> tuple[Op, int]:
    """Returns op and microbatch of ``ACTION[:MICROBATCH]``; appends what is wrong with them."""
    if len(parts) > 2:
        problems.append(_problem(KILL_FORM, text, f"WHEN is one of {', '.join(WHENS)}"))
    name = parts[0] if parts else Op.B.value
    op = _OPS.get(name)
    if op is None:
        problems.append(_problem(f"an action: one of {', '.join(_OPS)}", text, nearest(name, _OPS)))
        return Op.B, WHOLE_STAGE
    if (op in _NOT_ON_FIRST and stage == 0) or (op in _NOT_ON_LAST and stage == job.stages - 1):
        problems.append(_problem(f"an action of stage {stage}", text, f"it has no {op}"))
    if op in STAGE_OPS:
        if len(parts) > 1:
            problems.append(_problem(f"no microbatch after {op}, which concerns the whole stage", text))
        return op, WHOLE_STAGE
    middle = str(job.microbatches // 2)
    return op, _count("a microbatch", parts[1] if len(parts) > 1 else middle, job.microbatches, text, problems)


def _count(what: str, part: str, number: int, text: str, problems: list[Problem]) -> int:
    """Returns the whole number that `part` spells, or 0; appends what is wrong with it."""
    if part.isascii() and part.isdigit() and int(part) < number:
        return int(part)
    problems.append(_problem(f"{what} from 0 to {number - 1}", text, f"found {part!r}" if part else "it is missing"))
    return 0


def _problem(expected: str, text: str, hint: str = "") -> Problem:
    return Problem("--kill", expected, repr(text), hint)
