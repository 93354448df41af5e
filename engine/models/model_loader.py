"""Opens the model of a job: built in (`engine.models.model_registry`) or the user's own. It depends only on the job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from engine.core.errors import Problem, UserError, required
from engine.core.job.job import PERPLEXITY, Job, named_metrics
from engine.models import losses
from engine.models.arguments import check_user_args
from engine.models.data import Data, DataFacts, with_form
from engine.models.layers import Loss, Model, with_skips
from engine.models.losses import METRICS
from engine.models.model_registry import LOSSES, MODELS, Builtin, loss_problems, model_problems
from engine.models.user_factory import import_factory, user_model

_ORDINARY = Builtin("traced.ordinary", "ordinary_model")  # few jobs need its modules
_IMAGE = ("channels", "height", "width")
_SIZES = {  # that a built-in model is made with
    "causal": ("vocabulary", "sequence"),
    "masked": ("vocabulary", "sequence"),
    "classify": ("num_classes", *_IMAGE),
    "regress": ("features", "outputs"),
}


def build_model(job: Job, facts: DataFacts, data: Data | None = None) -> Model:
    """Returns the model of `job` without layers; an ordinary module is called with a microbatch. Raises UserError."""
    if problems := [*model_problems(job), *loss_problems(job)]:
        raise UserError(problems)
    form = facts.form

    def ordinary(module: nn.Module, inputs: object) -> Model:
        nonlocal form
        form = None  # it is in the record
        model: Model = _ORDINARY(job, required(data, "an ordinary module is called with data"), module, inputs)
        return model

    built = _builtin_model(job, facts) if job.model in MODELS else user_model(job, ordinary)
    built = replace(built, loss=_loss(job) or built.loss, metrics={**built.metrics, **_metrics(job)})
    # The form is innermost: skip connections see tensors only.
    return with_skips(with_form(built, form))


def _loss(job: Job) -> Loss | None:
    """Returns the loss that a job names with its arguments; None if it is the model's own."""
    if job.loss in LOSSES:
        return partial(getattr(losses, job.loss), **job.loss_args)
    if not job.loss:
        return None
    function = import_factory("loss", job.loss)
    check_user_args("loss_args", partial(function, (), ()), job.loss_args)
    return partial(function, **job.loss_args)


def _metrics(job: Job) -> dict[str, Loss]:
    """Returns the metrics of a job by name; the perplexity is no mean over microbatches, so it is none of them."""
    named = {name: path for name, path in named_metrics(job).items() if path != PERPLEXITY}
    return {name: METRICS.get(path) or import_factory("metrics", path) for name, path in named.items()}


def _builtin_model(job: Job, facts: DataFacts) -> Model:
    entry = MODELS[job.model]
    if facts.task not in entry.tasks:
        raise UserError([Problem("data", f"data for the task {' or '.join(entry.tasks)}", repr(facts.task))])
    if unknown := [name for name in _SIZES[facts.task] if not getattr(facts, name)]:
        hint = "give them: indexed(training, evaluation, DataFacts(...))"
        raise UserError([Problem("data", f"data whose facts have {', '.join(unknown)}", repr(job.data), hint)])
    model: Model = entry.factory(facts, **job.model_args)
    return model
