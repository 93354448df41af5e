"""Opens the model of a job: built in (`engine.models.model_registry`) or the user's own. It depends only on the job."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.models.data import DataFacts
from engine.models.layers import Model
from engine.models.model_registry import MODELS, model_problems
from engine.models.skips import with_skips
from engine.models.user_factory import user_model
from engine.models.whole_batches import with_form


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
