"""Checks the models, data and optimizers that a job names, and their arguments, without torch."""

from __future__ import annotations

from engine.core.config.job import Job
from engine.core.errors import Problem
from engine.models.arguments import argument_problems
from engine.models.model_registry import layer_problems, problems_of


def offered(job: Job) -> list[Problem]:
    """Returns the problems of the built-in parts that a job names, and of its cut into stages."""
    return [*named(job), *layer_problems(job)]


def named(job: Job) -> list[Problem]:
    """Returns the problems of the built-in parts that a job names; enough for commands that only make the program."""
    optimizer = argument_problems("optimizer_args", "engine.runtime.stage.optimizer", job.optimizer, job.optimizer_args)
    return [*problems_of(job), *optimizer]
