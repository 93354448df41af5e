"""Opens the model and the data of a job: built-in ones (`engine.models.model_registry`) or the user's own.

Rule: they depend only on the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError, required
from engine.models.data import Data, DataFacts
from engine.models.indexed import bound
from engine.models.layers import Model
from engine.models.model_registry import MODELS, data_factory, data_problems, is_own, model_problems, name_problems
from engine.models.skips import with_skips
from engine.models.user_factory import user_data, user_model
from engine.models.whole_batches import with_form


def open_data(job: Job) -> Data:
    """Opens the data of `job`; raises UserError or EnvironmentLacksError if it cannot."""
    _refuse(name_problems(job))
    if is_own(job.data):
        return user_data(job)
    _refuse(data_problems(job))
    factory = required(data_factory(job), "data without a problem have a factory")
    return bound(factory(job.seed, **job.data_args), job)


def build_model(job: Job, facts: DataFacts) -> Model:
    """Returns the model of `job` for data with these facts, with no layer built; raises UserError if it cannot."""
    _refuse(model_problems(job))
    made = _builtin_model(job, facts) if job.model in MODELS else user_model(job)
    # The form is innermost: skip connections see tensors only.
    return with_skips(with_form(made, facts.form))


def _builtin_model(job: Job, facts: DataFacts) -> Model:
    entry = MODELS[job.model]
    if facts.task not in entry.tasks:
        raise UserError([Problem("data", f"data for the task {' or '.join(entry.tasks)}", repr(facts.task))])
    model: Model = entry.factory(facts, **job.model_args)
    return model


def _refuse(problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise UserError(found)
