"""The built-in models and data by name, and which of them go together.

A model takes data of certain tasks, a data source offers some: the first task of the model that the source offers is
the one that is trained. Rule: the tables are the only list of names; both are opened from nothing but the job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from engine.core.errors import Problem, UserError, nearest
from engine.core.job import FACTORY, Job
from engine.models import conv_stacks, mlp, resnet, timed, transformer
from engine.models.arguments import Factory, check_builtin_args
from engine.models.data import Data, DataFacts, Task
from engine.models.image_files import image_folder
from engine.models.images import digits
from engine.models.layers import Model
from engine.models.skips import with_skips
from engine.models.synthetic import VectorData, synthetic_images, synthetic_tokens
from engine.models.text import text
from engine.models.user_factory import user_data, user_model
from engine.models.whole_batches import with_form


@dataclass(frozen=True, slots=True)
class Entry:
    """A built-in model: its factory, the tasks it can learn, the data that it gets where the job says "auto"."""

    factory: Factory
    tasks: tuple[Task, ...]
    data: str
    # Batch norm over a single sample of one pixel has no variance.
    least_microbatch_size: int = 1


_IMAGES: tuple[Task, ...] = ("classify",)
MODELS: dict[str, Entry] = {
    "gpt": Entry(transformer.gpt, ("causal",), "text"),
    "bert": Entry(transformer.bert, ("masked",), "text"),
    "resnet18": Entry(resnet.resnet18, _IMAGES, "digits", least_microbatch_size=2),
    "resnet34": Entry(resnet.resnet34, _IMAGES, "digits", least_microbatch_size=2),
    "resnet50": Entry(resnet.resnet50, _IMAGES, "digits", least_microbatch_size=2),
    "resnet101": Entry(resnet.resnet101, _IMAGES, "digits", least_microbatch_size=2),
    "resnet152": Entry(resnet.resnet152, _IMAGES, "digits", least_microbatch_size=2),
    "vgg19": Entry(conv_stacks.vgg19, _IMAGES, "digits"),
    "alexnet": Entry(conv_stacks.alexnet, _IMAGES, "digits"),
    "mlp": Entry(mlp.mlp, ("regress", "classify"), "synthetic"),
    "timed": Entry(timed.timed, ("regress",), "synthetic"),
}
# Each factory takes the seed, and its keyword-only parameters are the job's data_args.
DATA: dict[str, dict[Task, Factory]] = {
    "text": {"causal": partial(text, "causal", ""), "masked": partial(text, "masked", "")},
    "digits": {"classify": digits},
    "synthetic": {
        "regress": VectorData,
        "classify": synthetic_images,
        "causal": partial(synthetic_tokens, "causal"),
        "masked": partial(synthetic_tokens, "masked"),
    },
}


def open_data(job: Job) -> Data:
    """Opens the data of `job`; raises UserError or EnvironmentLacksError where that cannot be."""
    _check_model_name(job.model)
    if FACTORY.fullmatch(job.data):
        return user_data(job)
    entry = MODELS.get(job.model)
    name = job.data if job.data != "auto" else entry.data if entry else "synthetic"
    offered = DATA.get(name) or _offered_by_path(name)
    wanted = entry.tasks if entry else tuple(offered)
    task = next((task for task in wanted if task in offered), None)
    if task is None:
        fitting = [known for known, tasks in DATA.items() if not tasks.keys().isdisjoint(wanted)]
        raise UserError([Problem("data", f"data that {job.model} can learn, such as {', '.join(fitting)}", repr(name))])
    check_builtin_args("data_args", offered[task], job.data_args)
    data: Data = offered[task](job.seed, **job.data_args)
    return data


def build_model(job: Job, facts: DataFacts) -> Model:
    """Makes the model of `job` for data with these facts, no layer of it built; raises UserError where it cannot."""
    _check_model_name(job.model)
    made = _builtin_model(job, facts) if job.model in MODELS else user_model(job)
    # The form first: what is passed on between layers are tensors alone, without names.
    return with_skips(with_form(made, facts.form))


def _builtin_model(job: Job, facts: DataFacts) -> Model:
    entry = MODELS[job.model]
    if facts.task not in entry.tasks:
        raise UserError([Problem("data", f"data for the task {' or '.join(entry.tasks)}", repr(facts.task))])
    if job.microbatch_size < entry.least_microbatch_size:
        expected = f"a whole number >= {entry.least_microbatch_size} for batch norm"
        raise UserError([Problem("microbatch_size", expected, repr(job.microbatch_size))])
    check_builtin_args("model_args", entry.factory, job.model_args)
    model: Model = entry.factory(facts, **job.model_args)
    return model


def _check_model_name(name: str) -> None:
    if name not in MODELS and not FACTORY.fullmatch(name):
        expected = f"one of {', '.join(sorted(MODELS))}, or package.module:factory"
        raise UserError([Problem("model", expected, repr(name), nearest(name, MODELS))])


def _offered_by_path(path: str) -> dict[Task, Factory]:
    """Says what a file (text) or a folder (images) of the user's offers; raises UserError where there is neither."""
    if os.path.isdir(path):
        return {"classify": partial(image_folder, path)}
    if os.path.exists(path) or "/" in path or "." in path:
        return {"causal": partial(text, "causal", path), "masked": partial(text, "masked", path)}
    expected = f"one of auto, {', '.join(sorted(DATA))}, a file, a folder, or package.module:factory"
    raise UserError([Problem("data", expected, repr(path), nearest(path, ("auto", *DATA)))])
