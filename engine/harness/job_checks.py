"""Checks the models, data and optimizers that a job names, and their arguments, without torch and without user code."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.core.errors import BambooError, ExitCode, Problem, UserCodeError, UserError, nearest
from engine.core.job.job import CODE_FIELDS, Job, code_in
from engine.core.job.job_rules import BlockChoice, JobParts
from engine.core.job.torch_parts import OPTIMIZERS, SCHEDULES
from engine.core.job.update_rules import OWN_OPTIMIZERS, group_problems
from engine.core.protocol.block_choice import block_choice
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
    problems = [*problems_of(job)]
    if job.optimizer in OWN_OPTIMIZERS:  # `engine.core.job.update_rules` checks the arguments of all others
        problems += argument_problems("optimizer_args", _OPTIMIZERS, job.optimizer, job.optimizer_args)
        problems += group_problems(
            job.param_groups, lambda args: argument_problems("param_groups", _OPTIMIZERS, job.optimizer, args, ["lr"])
        )
    return problems


def _argument_names(job: Job) -> list[str]:
    schedule = SCHEDULES[job.lr_schedule].arguments if job.lr_schedule in SCHEDULES else ()
    optimizer = optimizer_arguments(job.optimizer)
    return [
        *argument_names(job),
        *(f"optimizer_args.{name}" for name in optimizer),
        *(f"lr_args.{name}" for name in schedule),
    ]


def optimizer_arguments(name: str) -> dict[str, Scalar | None]:
    """Returns the arguments of an optimizer with their defaults; none for user code."""
    if name in OWN_OPTIMIZERS:
        return dict(builtin_arguments(_OPTIMIZERS, name))
    arguments = OPTIMIZERS[name].arguments if name in OPTIMIZERS else {}
    return {key: argument.default for key, argument in arguments.items()}


def missing_modules(job: Job) -> list[Problem]:
    """Returns the problems with missing top-level modules of user code, and names in them; nothing is imported."""
    problems: list[Problem | None] = []
    for field in CODE_FIELDS:
        for name in code_in(getattr(job, field)):
            if _is_found(module := top_level(name)):
                problems.append(missing_name(field, name))
            else:
                own = [path.stem for path in Path.cwd().glob("*.py")]
                hint = nearest(module, own) or "in this folder or PYTHONPATH"
                problems.append(Problem(field, "a module that Python finds", repr(name), hint))
    return [problem for problem in problems if problem is not None]


def samples_of(job: Job) -> int:
    """Returns the number of training samples of a job, 0 for endless data; raises BambooError if it cannot."""
    of_data = {name: getattr(job, name) for name in _OF_DATA}
    return _num_samples(json.dumps(of_data), str(Path.cwd()))


def samples_without_code(job: Job) -> int | None:
    """Returns the number of training samples of a job; None if that needs user code, or the data are not here."""
    if any(code_in(getattr(job, name)) for name in ("data", "collate")):
        return None
    try:
        return samples_of(job)
    except BambooError:  # the run, which may be for another machine, will report it
        return None


@functools.lru_cache(maxsize=64)  # the cells of a matrix mostly have the same data
def _num_samples(of_data: str, folder: str) -> int:
    return int(_answer_of("engine.models.data_sources", json.loads(of_data))["samples"])


def layer_costs(job: Job) -> dict[str, Any]:
    """Builds a job's model in another process; returns what its layers cost (`worker.layer_costs`), or raises."""
    return _answer_of("engine.runtime.worker.layer_costs", asdict(job))


def _answer_of(module: str, question: Mapping[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = ask(module, question)
    if problems := answer.get("problems"):
        raise UserError([Problem(**problem) for problem in problems])
    if "raised" in answer:
        raise UserCodeError(answer["raised"])
    if "error" in answer:
        raise BambooError(answer["error"], ExitCode(answer["code"]))
    return answer


def _is_found(module: str) -> bool:
    try:
        return module_spec(module) is not None
    except (ImportError, ValueError):  # another package's finder, or a module without a file: only importing can tell
        return True


def _blocks(job: Job) -> BlockChoice:
    return block_choice(job, layers_of_smallest_stage(job))


# For commands that only build the program.
named = JobParts(_named_problems, _argument_names, acts_on=("schedule",), blocks=_blocks, defaults=job_defaults)
# Also checks the partition of the model, the modules of user code, and the place of checkpoints.
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
    blocks=_blocks,
    defaults=job_defaults,
)
# For dry runs and checks of files, which do not run user code.
readable = replace(offered, acts_on=(), samples_of=samples_without_code)
# For faults in a running job: only looks up the folder of its run.
findable = replace(offered, acts_on=("results",), samples_of=None)
