"""The rules of the fields about the update of the weights: optimizer, parameter groups, schedule of the rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from engine.core.errors import Problem, nearest
from engine.core.job.hugging_face import IMPORTS, MODEL
from engine.core.job.job import FACTORY, Job
from engine.core.job.torch_parts import (
    LR_SCHEDULES,
    NO_OPTIMIZERS,
    NO_SCHEDULES,
    OPTIMIZERS,
    PLATEAU,
    SCHEDULES,
    argument_problems,
)
from engine.core.monitors import (
    EARLY_STOP_FORM,
    FIGURE_FORM,
    TRAIN_LOSS,
    MonitorRules,
    PlateauRule,
    early_stop_of,
    figure_of,
)
from engine.core.texts import pattern_error
from engine.core.units import MOST_FLOAT, Args, Scalar

# Parameter groups: other arguments of the optimizer for parameters whose names match a regular expression.
#
# The text of a job: ``PATTERN: NAME=VALUE, NAME=VALUE; PATTERN: ...``. Rules: a pattern is searched for in the plain
# name of a parameter, which is that of the model's state_dict. The first group that matches has the parameter; the
# others keep the job's own arguments. ``lr`` is a factor of the rate that the schedule gives.

PARAM_GROUPS_FORM = "PATTERN: NAME=VALUE, NAME=VALUE; PATTERN: ..., such as 'bias|norm: weight_decay=0'"
LR = "lr"
MATCH = "match"  # the key of a pattern in a list of mappings
_MOST_NAMES = 8  # in a message
_NAMED = re.compile(r"\s*([^\W\d]\w*)\s*=\s*(.*?)\s*")
_NEXT = re.compile(r",(?=\s*[^\W\d]\w*\s*=)")  # a list of numbers has commas of its own


class ParamGroup(NamedTuple):
    """A group: its pattern, the factor of its rate, and its other arguments."""

    pattern: str
    lr: float
    args: Args


def param_groups(text: str) -> tuple[ParamGroup, ...]:
    """Returns the groups of a job's text; raises ValueError with the part that is wrong."""
    return tuple(_group(part) for part in text.split(";") if part.strip())


def group_problems(text: str, of_args: Callable[[Args], Iterable[Problem]]) -> list[Problem]:
    """Returns the problem of a job's text, or those that `of_args` has with the arguments of its groups."""
    try:
        groups = param_groups(text)
    except ValueError as error:
        return [Problem("param_groups", PARAM_GROUPS_FORM, repr(text), str(error))]
    return [problem for each in groups for problem in of_args(each.args)]


def _group(part: str) -> ParamGroup:
    pattern, colon, rest = part.rpartition(":")
    pattern = pattern.strip()
    if not colon or not pattern:
        raise ValueError(f"{part.strip()!r} has no pattern before a colon")
    if wrong := pattern_error(pattern):
        raise ValueError(f"{pattern!r} is not a regular expression: {wrong}")
    args: Args = {}
    for setting in _NEXT.split(rest):
        match = _NAMED.fullmatch(setting)
        if match is None or not match[2]:
            raise ValueError(f"{setting.strip()!r} is not NAME=VALUE")
        if match[1] in args:
            raise ValueError(f"{match[1]!r} stands twice for {pattern!r}")
        args[match[1]] = _value(match[2])
    factor = args.pop(LR, 1.0)
    if isinstance(factor, (str, bool)) or not 0 <= factor <= MOST_FLOAT:
        raise ValueError(f"lr of {pattern!r} is {factor!r}, and not a factor of the schedule's rate, at least 0")
    return ParamGroup(pattern, float(factor), args)


def _value(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def as_text(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of groups that a file has as mappings, each with the key `match`; raises ValueError."""
    parts = []
    for group in groups:
        args = {name: value for name, value in group.items() if name != MATCH}
        pattern = group.get(MATCH)
        if not isinstance(pattern, str) or not args:
            raise ValueError(f"each group has {MATCH!r}, a text, and arguments")
        if ";" in pattern:
            raise ValueError(f"write \\x3b in place of the semicolon in {pattern!r}")
        parts.append(f"{pattern}: " + ", ".join(f"{name}={_written(value)}" for name, value in args.items()))
    return "; ".join(parts)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(type(each) in (int, float) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, (int, float, str)):
        return str(value)
    raise ValueError(f"{value!r} cannot be the value of an argument")


def group_of(groups: Sequence[ParamGroup], name: str) -> ParamGroup | None:
    """Returns the first group whose pattern is found in the plain name of a parameter; None without one."""
    return next((each for each in groups if re.search(each.pattern, name)), None)


def idle_groups(groups: Sequence[ParamGroup], names: Iterable[str]) -> list[Problem]:
    """Returns a problem for each group that has no parameter among the plain `names` of a model."""
    params = tuple(names)
    used = {id(group_of(groups, name)) for name in params}
    problems = []
    for group in groups:
        if id(group) not in used:
            matched = next((name for name in params if re.search(group.pattern, name)), "")
            hint = f"the names are {', '.join(params[:_MOST_NAMES])}{', ...' if len(params) > _MOST_NAMES else ''}"
            if matched:
                hint = f"an earlier group has each of its parameters, such as {matched}"
            problems.append(Problem("param_groups", "patterns that match a parameter", repr(group.pattern), hint))
    return problems


OWN_OPTIMIZERS = ("adamw", "sgd")  # by torch's functions, without the classes, whose first use imports the compiler

COMPILER = ("torch._dynamo",)  # imported by the first use of a class of optimizers


def update_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of these fields of a job, without those of arguments of `OWN_OPTIMIZERS`."""
    own_optimizers = dict.fromkeys(OWN_OPTIMIZERS)
    yield from _named("optimizer", job.optimizer, {**own_optimizers, **OPTIMIZERS}, NO_OPTIMIZERS)
    yield from _named("lr_schedule", job.lr_schedule, {**LR_SCHEDULES, **SCHEDULES}, NO_SCHEDULES)
    if (optimizer := OPTIMIZERS.get(job.optimizer)) is not None:
        yield from argument_problems("optimizer_args", optimizer.arguments, job.optimizer_args)
        if job.fsdp and not optimizer.shards:
            hint = "it reads whole tensors, or torch has no such step for shards"
            yield Problem("optimizer", "an optimizer that steps shards, with fsdp", repr(job.optimizer), hint)
    problems: list[Problem] = []
    if (schedule := SCHEDULES.get(job.lr_schedule)) is not None:
        problems = argument_problems("lr_args", schedule.arguments, job.lr_args)
        yield from problems
    elif job.lr_schedule in LR_SCHEDULES:
        yield from argument_problems("lr_args", {}, job.lr_args)
    yield from _early_stop_problems(job)
    yield from () if problems else _monitor_problems(job)
    arguments = None if optimizer is None else optimizer.arguments
    yield from group_problems(
        job.param_groups,
        lambda args: () if arguments is None else argument_problems("param_groups", arguments, args, all_of=False),
    )


# The rules about figures: an early stop, and a rate that follows the figure `lr_args.monitor`.
#
# Without a monitor a plateau is one of the loss of validations, or of the steps in a job that has no validations.

MONITOR = "monitor"


def _early_stop_problems(job: Job) -> Iterator[Problem]:
    if job.early_stop and early_stop_of(job.early_stop) is None:
        yield Problem("early_stop", EARLY_STOP_FORM, repr(job.early_stop))
    elif job.early_stop and not job.validate_every:
        yield Problem("early_stop", "validations with it", repr(job.early_stop), "set --validate-every")


def _monitor_problems(job: Job) -> Iterator[Problem]:
    if not (text := monitored_by(asdict(job))):
        return
    if (monitor := figure_of(text)) is None:
        yield Problem("lr_args.monitor", f"train_loss, {FIGURE_FORM}", repr(text))
    elif monitor.name != TRAIN_LOSS and not job.validate_every:
        hint = "set --validate-every, or let it watch train_loss"
        yield Problem("lr_args.monitor", "a figure of this job", repr(text), hint)
    if job.lr_schedule == PLATEAU:
        yield from _plateau_problems(job.lr_args)


def _plateau_problems(args: Args) -> Iterator[Problem]:
    limits = {
        "factor": (0 < args.get("factor", 0.1) < 1, "a number > 0 and < 1"),  # type: ignore[operator]
        "patience": (args.get("patience", 0) >= 0, "a whole number >= 0"),  # type: ignore[operator]
        "cooldown": (args.get("cooldown", 0) >= 0, "a whole number >= 0"),  # type: ignore[operator]
        "threshold": (args.get("threshold", 0) >= 0, "a number >= 0"),  # type: ignore[operator]
        "min_lr": (args.get("min_lr", 0) >= 0, "a number >= 0"),  # type: ignore[operator]
        "threshold_mode": (args.get("threshold_mode", "rel") in ("rel", "abs"), "rel or abs"),
    }
    for name, (holds, expected) in limits.items():
        if not holds:
            yield Problem(f"lr_args.{name}", expected, repr(args[name]))


def monitored_by(job: Mapping[str, Any]) -> str:
    """Returns the figure that the rate of a job, by its fields, follows, as text; empty if it follows the step."""
    schedule, monitor = job.get("lr_schedule", ""), str(job.get("lr_args", {}).get(MONITOR, ""))
    if schedule == PLATEAU:
        return monitor or ("loss" if job.get("validate_every", True) else TRAIN_LOSS)
    return monitor if FACTORY.fullmatch(str(schedule)) else ""


def follows_validations(job: Mapping[str, Any]) -> bool:
    """Returns whether the rate of a job, by its fields, follows figures of validations."""
    return monitored_by(job).partition(":")[0] not in ("", TRAIN_LOSS)


def monitor_rules(job: Job) -> MonitorRules:
    """Returns what a job asks of its figures."""
    text = monitored_by({"lr_schedule": job.lr_schedule, "lr_args": job.lr_args, "validate_every": job.validate_every})
    args: dict[str, Any] = {name: value for name, value in job.lr_args.items() if name != MONITOR}
    plateau = PlateauRule(**args) if job.lr_schedule == PLATEAU else None
    return MonitorRules(
        job.steps, job.best, job.early_stop, figure_of(text) if text else None, plateau, job.lr, job.warmup_steps
    )


def depends_on_steps(job: Job) -> bool:
    """Returns whether the learning rate of a step depends on the number of steps."""
    if (part := SCHEDULES.get(job.lr_schedule)) is not None:
        return bool(part.horizon) and part.horizon not in job.lr_args
    return job.lr_schedule in LR_SCHEDULES and job.lr_schedule != "constant"


def preloads(job: Job) -> tuple[str, ...]:
    """Returns the modules that every worker of a job imports late, and a fork server can import once."""
    compiler = () if job.optimizer in OWN_OPTIMIZERS else COMPILER
    return (*compiler, *IMPORTS) if job.model == MODEL else compiler


def _named(field: str, name: str, names: Mapping[str, object], never: Mapping[str, str]) -> Iterator[Problem]:
    """Yields the problem of a name that is neither known nor that of the user's code."""
    if name in names or FACTORY.fullmatch(name):
        return
    expected = f"one of {', '.join(sorted(names))}, or package.module:name"
    if (reason := never.get(name.lower().replace("_", ""))) is not None:
        yield Problem(field, expected, repr(name), reason)
        return
    by_class = {part.cls.lower(): key for table in (SCHEDULES, OPTIMIZERS) for key, part in table.items()}
    word = by_class.get(name.lower(), "")
    yield Problem(field, expected, repr(name), nearest(name, names) or (f"did you mean {word!r}?" if word else ""))
