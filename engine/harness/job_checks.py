"""Checks the models, data and optimizers that a job names, and their arguments, without torch and without user code."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

from engine.core.errors import BambooError, ExitCode, Problem, UserCodeError, UserError, nearest
from engine.core.job.job import CODE_FIELDS, Job, code_in
from engine.core.job.job_rules import JobParts
from engine.core.job.torch_parts import OPTIMIZERS, SCHEDULES
from engine.core.job.update_rules import OWN_OPTIMIZERS, group_problems
from engine.core.units import Scalar
from engine.files.jobs.checkpoint_place import place_problems
from engine.files.jobs.user_files import missing_name, module_spec, top_level
from engine.models.arguments import argument_problems, builtin_arguments
from engine.models.model_registry import (
    argument_names,
    job_defaults,
    layer_problems,
    layers_of_smallest_stage,
    problems_of,
)
from engine.observers.observers import logger_problems
from engine.runtime.process.subprocesses import ask

# The fields that open_data reads.
_OF_DATA = ("model", "data", "data_args", "collate", "seed", "pipelines", "microbatches", "microbatch_size", "threads")
_OPTIMIZERS = "engine.runtime.stage.optimizer"


def _named_problems(job: Job) -> list[Problem]:
    return [*problems_of(job), *_optimizer_problems(job)]


def _optimizer_problems(job: Job) -> list[Problem]:
    """Returns the problems with the arguments of adamw and sgd; `engine.core.job.update_rules` has all others."""
    if job.optimizer not in OWN_OPTIMIZERS:
        return []
    problems = argument_problems("optimizer_args", _OPTIMIZERS, job.optimizer, job.optimizer_args)
    return problems + group_problems(
        job.param_groups, lambda args: argument_problems("param_groups", _OPTIMIZERS, job.optimizer, args, ["lr"])
    )


def _argument_names(job: Job) -> list[str]:
    schedule = SCHEDULES[job.lr_schedule].arguments if job.lr_schedule in SCHEDULES else ()
    optimizer = optimizer_arguments(job.optimizer)
    return [
        *argument_names(job),
        *(f"optimizer_args.{each}" for each in optimizer),
        *(f"lr_args.{each}" for each in schedule),
    ]


def optimizer_arguments(name: str) -> dict[str, Scalar | None]:
    """Returns the arguments of an optimizer with their defaults; none for code of the user's."""
    if name in OWN_OPTIMIZERS:
        return dict(builtin_arguments(_OPTIMIZERS, name))
    return (
        {each: argument.default for each, argument in OPTIMIZERS[name].arguments.items()} if name in OPTIMIZERS else {}
    )


def missing_modules(job: Job) -> list[Problem]:
    """Returns the problems with the modules of a user's code that no file has, and with names that their files lack.

    None is imported. Only the top-level module is looked for: a package decides while it is imported where others are.
    """
    named = [(field, name) for field in CODE_FIELDS for name in code_in(getattr(job, field))]
    return [problem for each in named if (problem := _unfound(*each)) is not None]


def _unfound(field: str, name: str) -> Problem | None:
    if not _is_found(module := top_level(name)):
        hint = _nearest_module(module) or "in this folder or PYTHONPATH"
        return Problem(field, "a module that Python finds", repr(name), hint)
    return missing_name(field, name)


def samples_of(job: Job) -> int:
    """Returns the training samples of a job, 0 for data without an end; raises BambooError if it cannot open them."""
    of_data = {name: getattr(job, name) for name in _OF_DATA}
    return _num_samples(json.dumps(of_data), str(Path.cwd()))


def samples_without_code(job: Job) -> int | None:
    """Returns the training samples of a job; None if only the user's code can tell, or if the data are not here."""
    if any(code_in(getattr(job, name)) for name in ("data", "collate")):
        return None
    try:
        return samples_of(job)
    except BambooError:  # the run will tell: it may be meant for another machine
        return None


@functools.lru_cache(maxsize=64)  # the cells of a matrix mostly have the same data
def _num_samples(of_data: str, folder: str) -> int:
    answer = ask("engine.models.data_sources", json.loads(of_data))
    if problems := answer.get("problems"):
        raise UserError([Problem(**each) for each in problems])
    if "raised" in answer:
        raise UserCodeError(answer["raised"])
    if "error" in answer:
        raise BambooError(answer["error"], ExitCode(answer["code"]))
    return int(answer["samples"])


def _is_found(module: str) -> bool:
    try:
        return module_spec(module) is not None
    except (ImportError, ValueError):  # a finder of another package, or a module without a file: importing it will tell
        return True


def _nearest_module(module: str) -> str:
    return nearest(module, [path.stem for path in Path.cwd().glob("*.py")])


# Enough for commands that only make the program.
named = JobParts(
    _named_problems,
    _argument_names,
    acts_on=("schedule",),
    smallest_stage=layers_of_smallest_stage,
    defaults=job_defaults,
)
# Also the cut of the model into stages, the modules of a user's own model and data, and the place of checkpoints.
offered = JobParts(
    lambda job: [
        *_named_problems(job),
        *layer_problems(job),
        *missing_modules(job),
        *place_problems(job),
        *logger_problems(job.logger),
    ],
    _argument_names,
    samples_of=samples_of,
    smallest_stage=layers_of_smallest_stage,
    defaults=job_defaults,
)
# For dry runs and checks of files, which run no code of the user's.
readable = replace(offered, acts_on=(), samples_of=samples_without_code)
# For faults in a running job: only the folder of its run is looked up.
findable = replace(offered, acts_on=("results",), samples_of=None)
