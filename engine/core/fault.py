"""Faults: what is done to whom, and at which moment; their plain form; and how the command line spells a kill.

Rules: a fault has a logical time: at an action of the owner of a slot in a step, or in a phase of the recovery from
another fault; a delay by the clock counts from such a moment. It strikes once, also when its step is run again by an
heir. A fault that never strikes proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engine.core.action import SHARD_OPS, STAGE_OPS, WHOLE_STAGE, Action, Op, parse_action
from engine.core.duration import duration_text
from engine.core.errors import Problem, UserError, nearest
from engine.core.job import Job, Scalar
from engine.core.stream_pass import is_streamed

When = Literal["before", "during", "after"]
Phase = Literal["detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal"]
RoleName = Literal["recoverer", "shadow", "neighbour"]

WHENS: tuple[When, ...] = get_args(When)
PHASES: tuple[Phase, ...] = get_args(Phase)
ROLES: tuple[RoleName, ...] = get_args(RoleName)
KILL_FORM = "STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE]"

_OPS = {op.value: op for op in Op}
# Stages at the ends of a pipeline have nobody to exchange these with.
_NOT_ON_FIRST = frozenset({Op.RECV_F, Op.SEND_B})
_NOT_ON_LAST = frozenset({Op.RECV_B, Op.SEND_F})


@dataclass(frozen=True, slots=True)
class At:
    """The moment at which the owner of a slot is before, in, or after an action of a step."""

    step: int
    action: Action
    when: When = "before"

    def __str__(self) -> str:
        return f"{self.when} {self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class After:
    """The moment `delay_ns` after a phase of the recovery from another fault began, or after that fault itself."""

    fault: str
    phase: Phase | None = None
    delay_ns: int = 0

    def __str__(self) -> str:
        delay = f"{duration_text(self.delay_ns)} after " if self.delay_ns else "at "
        what = f"the phase {self.phase} of the recovery from" if self.phase else "the strike of"
        return f"{delay}{what} {self.fault}"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whoever owns a slot at the moment of the strike."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"the owner of stage {self.stage}" + (f" of pipeline {self.pipeline}" if self.pipeline else "")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, whatever it owns."""

    worker: int

    def __str__(self) -> str:
        return f"worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Role:
    """Who plays a part for a slot at the moment of the strike: that of the action, or that which `After.fault` struck.

    The recoverer is its owner by the newest verdict, the shadow its first one, the neighbour the owner of the stage
    after it (after the last: of the first) in its pipeline.
    """

    role: RoleName

    def __str__(self) -> str:
        return f"the {self.role}"


Moment = At | After
Victim = Owner | Worker | Role


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `id` is unique in a run. All victims are struck at the same moment.

    `do` names a kind of the registry, `parameters` are its own, by `Parameter.key`.
    """

    id: str
    moment: Moment
    victims: tuple[Victim, ...]
    do: str = "kill"
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        usual = isinstance(self.moment, At) and self.victims == (slot_owner(self.moment.action),)
        whom = "" if usual else " " + " and ".join(str(each) for each in self.victims)
        how = ", ".join(f"{key.removesuffix('_ns')} {_shown(key, value)}" for key, value in self.parameters.items())
        return f"{self.do}{whom} {self.moment}{f' ({how})' if how else ''}"


def slot_owner(action: Action) -> Owner:
    """Returns the victim that is meant when a fault at an action names nobody."""
    return Owner(action.pipeline, action.stage)


def struck_by(faults: Sequence[Fault], step: int, action: Action, when: When) -> Fault | None:
    """Returns the first of the faults that strike at this moment, or None."""
    return next((each for each in faults if each.moment == At(step, action, when)), None)


def to_plain(fault: Fault) -> dict[str, Any]:
    """Returns a fault as values that JSON can hold; `from_plain` reads them."""
    moment: dict[str, Any]
    if isinstance(fault.moment, At):
        moment = {"step": fault.moment.step, "action": str(fault.moment.action), "when": fault.moment.when}
    else:
        moment = {"fault": fault.moment.fault, "phase": fault.moment.phase, "delay_ns": fault.moment.delay_ns}
    victims = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in fault.victims]
    parameters = dict(fault.parameters)
    return {"id": fault.id, "moment": moment, "victims": victims, "do": fault.do, "parameters": parameters}


def from_plain(plain: Mapping[str, Any]) -> Fault:
    """Returns the fault that `to_plain` made these values of."""
    moment = dict(plain["moment"])
    at = At(moment["step"], parse_action(moment["action"]), moment["when"]) if "step" in moment else After(**moment)
    victims = tuple(_VICTIMS[next(iter(each))](**each) for each in plain["victims"])
    return Fault(plain["id"], at, victims, plain["do"], dict(plain["parameters"]))


_VICTIMS: dict[str, Any] = {"pipeline": Owner, "worker": Worker, "role": Role}


def _shown(key: str, value: Scalar) -> str:
    return duration_text(int(value)) if key.endswith("_ns") else str(value)


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
        if any(each.moment == fault.moment for each in faults):
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
    action = Action(stage, op, microbatch, pipeline)
    return Fault(text.strip(), At(step, action, when or "before"), (slot_owner(action),))


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
    if op in SHARD_OPS and not job.fsdp:
        problems.append(_problem("an action of the job", text, f"it has no {op} without fsdp"))
    if op in STAGE_OPS:
        if len(parts) > 1:
            problems.append(_problem(f"no microbatch after {op}, which concerns the whole stage", text))
        return op, WHOLE_STAGE
    middle = str(job.microbatches // 2)
    microbatch = _count("a microbatch", parts[1] if len(parts) > 1 else middle, job.microbatches, text, problems)
    if op is Op.STREAM and not is_streamed(microbatch, job.log_every, job.microbatches):
        hint = f"log_every is {job.log_every}"
        problems.append(_problem(f"a microbatch after which the job streams, not {microbatch}", text, hint))
    return op, microbatch


def _count(what: str, part: str, number: int, text: str, problems: list[Problem]) -> int:
    """Returns the whole number that `part` spells, or 0; appends what is wrong with it."""
    if part.isascii() and part.isdigit() and int(part) < number:
        return int(part)
    problems.append(Problem(f"--kill {text}", f"{what} from 0 to {number - 1}", repr(part) if part else "nothing"))
    return 0


def _problem(expected: str, text: str, hint: str = "") -> Problem:
    return Problem("--kill", expected, repr(text), hint)
