"""What a job may name: built-in models, data and optimizers, and their arguments, all read without torch."""

from __future__ import annotations

from engine.core.config.job import Job
from engine.core.errors import Problem
from engine.models.arguments import argument_problems
from engine.models.offer import layer_problems, problems_of


def offered(job: Job) -> list[Problem]:
    """Returns what is wrong with what a job names, as far as it is built in, and with the cut into stages."""
    return [*named(job), *layer_problems(job)]


def named(job: Job) -> list[Problem]:
    """Returns what is wrong with what a job names: enough for who asks for the program alone, whatever the layers."""
    optimizer = argument_problems("optimizer_args", "engine.runtime.stage.optimizer", job.optimizer, job.optimizer_args)
    return [*problems_of(job), *optimizer]
