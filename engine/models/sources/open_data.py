"""Opens the data of a job: built in (`engine.models.model_registry`) or the user's own. It depends only on the job."""

from __future__ import annotations

from engine.core.config.job import Job
from engine.core.errors import UserError, required
from engine.models.data import Data
from engine.models.model_registry import data_factory, data_problems, is_own, name_problems
from engine.models.sources.indexed_data import bound
from engine.models.sources.user_data import user_data


def open_data(job: Job) -> Data:
    """Opens the data of `job`; raises UserError or EnvironmentLacksError if it cannot."""
    if problems := name_problems(job):
        raise UserError(problems)
    if is_own(job.data):
        return user_data(job)
    if problems := data_problems(job):
        raise UserError(problems)
    factory = required(data_factory(job), "data without a problem have a factory")
    return bound(factory(job.seed, **job.data_args), job)
