"""The rules of the fields about the update of the weights: optimizer, parameter groups, schedule of the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.core.config.job import FACTORY, Job
from engine.core.config.lr_schedule import LR_SCHEDULES
from engine.core.config.param_groups import group_problems
from engine.core.config.torch_parts import (
    NO_OPTIMIZERS,
    NO_SCHEDULES,
    OPTIMIZERS,
    SCHEDULES,
    TorchPart,
    argument_problems,
)
from engine.core.errors import Problem, nearest

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
    if (schedule := SCHEDULES.get(job.lr_schedule)) is not None:
        yield from argument_problems("lr_args", schedule.arguments, job.lr_args)
    elif job.lr_schedule in LR_SCHEDULES:
        yield from argument_problems("lr_args", {}, job.lr_args)
    known = None if optimizer is None else optimizer.arguments
    yield from group_problems(
        job.param_groups,
        lambda args: () if known is None else argument_problems("param_groups", known, args, all_of=False),
    )


def depends_on_steps(job: Job) -> bool:
    """Returns whether the learning rate of a step depends on the number of steps."""
    if (part := SCHEDULES.get(job.lr_schedule)) is not None:
        return bool(part.horizon) and part.horizon not in job.lr_args
    return job.lr_schedule in LR_SCHEDULES and job.lr_schedule != "constant"


def preloads(job: Job) -> tuple[str, ...]:
    """Returns the modules that every worker of a job imports late, and a fork server can import once."""
    return () if job.optimizer in OWN_OPTIMIZERS else COMPILER


def _named(field: str, name: str, known: Mapping[str, object], never: Mapping[str, str]) -> Iterator[Problem]:
    """Yields the problem of a name that is neither known nor that of the user's code."""
    if name in known or FACTORY.fullmatch(name):
        return
    expected = f"one of {', '.join(sorted(known))}, or package.module:name"
    if (reason := never.get(name.lower().replace("_", ""))) is not None:
        yield Problem(field, expected, repr(name), reason)
        return
    yield Problem(field, expected, repr(name), nearest(name, known) or _by_class(name))


def _by_class(name: str) -> str:
    """Returns a hint for the name of a class of torch."""
    tables: tuple[Mapping[str, TorchPart], ...] = (OPTIMIZERS, SCHEDULES)
    found = next((each for table in tables for each, part in table.items() if part.cls.lower() == name.lower()), "")
    return f"did you mean {found!r}?" if found else ""
