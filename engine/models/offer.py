"""What is built in, by name: models and data, which of them go together, and what is wrong with a job that names them.

A model takes data of certain tasks, a data source offers some: the first task of the model that the source offers is
the one that is trained. Rules: the tables are the only list of names. Nothing here loads torch; a factory is imported
when it is called, so that a mistake in a job is told before anything starts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.core.config.job import FACTORY, Job
from engine.core.config.partition import MOST_LAYERS, cutting_problems
from engine.core.errors import Problem, nearest
from engine.core.scalar import Args
from engine.models.arguments import argument_problems, builtin_arguments

if TYPE_CHECKING:
    from engine.models.data import Task


@dataclass(frozen=True, slots=True)
class Builtin:
    """A function or a class of this package: its module, its name, its first arguments."""

    module: str
    name: str
    first: tuple[object, ...] = ()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Imports it and calls it."""
        return getattr(import_module(self._module), self.name)(*self.first, *args, **kwargs)

    def problems(self, field: str, args: Args) -> list[Problem]:
        """Returns what is wrong with arguments that a user gave in a field."""
        return argument_problems(field, self._module, self.name, args)

    def arguments(self, args: Args) -> Args:
        """Returns all arguments that it is called with where a user gave these."""
        return {**builtin_arguments(self._module, self.name), **args}

    @property
    def _module(self) -> str:
        return f"{__package__}.{self.module}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A built-in model: its factory, the tasks it can learn, the data that it gets where the job says "auto"."""

    factory: Builtin
    tasks: tuple[Task, ...]
    data: str
    # Batch norm over a single sample of one pixel has no variance.
    least_microbatch_size: int = 1
    # So many layers it has, and as many more as this argument says.
    layers: int = 0
    more_layers: str = ""
    divisor: tuple[str, str] | None = None  # the first of these arguments divides the second

    def num_layers(self, args: Args) -> int:
        """Returns the number of layers with these arguments, which are good ones."""
        return self.layers + (int(self.factory.arguments(args)[self.more_layers]) if self.more_layers else 0)


def _resnet(is_bottleneck: bool, *blocks: int) -> Entry:
    factory = Builtin("networks.resnet", "resnet", (blocks, is_bottleneck))
    return Entry(factory, _IMAGES, "digits", least_microbatch_size=2, layers=2 + sum(blocks))


def _transformer(name: str, task: Task) -> Entry:
    divisor = ("heads", "width")
    return Entry(Builtin("networks.transformer", name), (task,), "text", layers=2, more_layers="depth", divisor=divisor)


_IMAGES: tuple[Task, ...] = ("classify",)
MODELS: dict[str, Entry] = {
    "gpt": _transformer("gpt", "causal"),
    "bert": _transformer("bert", "masked"),
    "resnet18": _resnet(False, 2, 2, 2, 2),
    "resnet34": _resnet(False, 3, 4, 6, 3),
    "resnet50": _resnet(True, 3, 4, 6, 3),
    "resnet101": _resnet(True, 3, 4, 23, 3),
    "resnet152": _resnet(True, 3, 8, 36, 3),
    "vgg19": Entry(Builtin("networks.conv_stacks", "vgg19"), _IMAGES, "digits", layers=19),
    "alexnet": Entry(Builtin("networks.conv_stacks", "alexnet"), _IMAGES, "digits", layers=8),
    "mlp": Entry(Builtin("networks.mlp", "mlp"), ("regress", "classify"), "synthetic", layers=1, more_layers="depth"),
    "timed": Entry(Builtin("networks.timed", "timed"), ("regress",), "synthetic", more_layers="layers"),
}


def _text(path: str) -> dict[Task, Builtin]:
    tasks: tuple[Task, ...] = ("causal", "masked")
    return {task: Builtin("datasets.text", "text", (task, path)) for task in tasks}


# Each factory takes the seed, and its keyword-only parameters are the job's data_args.
DATA: dict[str, dict[Task, Builtin]] = {
    "text": _text(""),
    "digits": {"classify": Builtin("datasets.images", "digits")},
    "synthetic": {
        "regress": Builtin("datasets.synthetic", "VectorData"),
        "classify": Builtin("datasets.synthetic", "synthetic_images"),
        "causal": Builtin("datasets.synthetic", "synthetic_tokens", ("causal",)),
        "masked": Builtin("datasets.synthetic", "synthetic_tokens", ("masked",)),
    },
}


def is_own(name: str) -> bool:
    """Says whether a model or a data source is the user's own, ``package.module:factory``."""
    return FACTORY.fullmatch(name) is not None


def problems_of(job: Job) -> list[Problem]:
    """Returns all that is wrong with what a job names, as far as it is built in."""
    return [*model_problems(job), *([] if is_own(job.data) else data_problems(job))]


def name_problems(job: Job) -> list[Problem]:
    """Says so when the model of a job is neither built in nor the user's own."""
    if job.model in MODELS or is_own(job.model):
        return []
    expected = f"one of {', '.join(sorted(MODELS))}, or package.module:factory"
    return [Problem("model", expected, repr(job.model), nearest(job.model, MODELS))]


def model_problems(job: Job) -> list[Problem]:
    """Returns what is wrong with the model of a job; of the user's own, nothing is known here."""
    entry = MODELS.get(job.model)
    if entry is None:
        return name_problems(job)
    problems = entry.factory.problems("model_args", job.model_args)
    if entry.divisor and not problems:
        problems += _division_problems(*entry.divisor, entry.factory.arguments(job.model_args), job.model_args)
    if job.microbatch_size < entry.least_microbatch_size:
        expected = f"a whole number >= {entry.least_microbatch_size} for batch norm"
        problems.append(Problem("microbatch_size", expected, repr(job.microbatch_size)))
    return problems


def _division_problems(part: str, whole: str, args: Args, given: Args) -> list[Problem]:
    """Says so, of the argument that the user gave, when one argument does not divide the other."""
    if int(args[whole]) % int(args[part]) == 0:
        return []
    if part not in given:
        return [Problem(f"model_args.{whole}", f"a multiple of {part} {args[part]}", repr(args[whole]))]
    return [Problem(f"model_args.{part}", f"a divisor of {whole} {args[whole]}", repr(args[part]))]


def layer_problems(job: Job) -> list[Problem]:
    """Returns why the layers of a job's model cannot be cut as it says; of the user's own, nothing is known here."""
    entry = MODELS.get(job.model)
    if entry is None or entry.factory.problems("model_args", job.model_args):
        return []
    num_layers, more = entry.num_layers(job.model_args), entry.more_layers
    if more and num_layers > MOST_LAYERS:
        expected = f"a whole number <= {MOST_LAYERS - entry.layers}"
        return [Problem(f"model_args.{more}", expected, str(num_layers - entry.layers))]
    return cutting_problems(job.partition, job.stages, num_layers)


def data_problems(job: Job) -> list[Problem]:
    """Returns what is wrong with the data of a job, which is not a user's factory; whether a file is good is not asked.

    Where nobody knows the model, nobody knows what it learns from, and only the name is looked at.
    """
    entry = MODELS.get(job.model)
    offered = _offered(job)
    if not offered:
        expected = f"one of auto, {', '.join(sorted(DATA))}, a file, a folder, or package.module:factory"
        return [Problem("data", expected, repr(job.data), nearest(job.data, ("auto", *DATA)))]
    if entry is None and not is_own(job.model):
        return []
    factory = data_factory(job)
    if factory is None:
        wanted = entry.tasks if entry else ()
        fitting = [known for known, tasks in DATA.items() if not tasks.keys().isdisjoint(wanted)]
        return [Problem("data", f"data that {job.model} can learn, such as {', '.join(fitting)}", repr(job.data))]
    return factory.problems("data_args", job.data_args)


def unreadable_data(job: Job) -> list[Problem]:
    """Says so when a job's data is named by a path and cannot be read here; whoever only plans need not ask."""
    if job.data in ("auto", *DATA) or is_own(job.data) or os.access(job.data, os.R_OK):
        return []
    why = os.strerror(errno.EACCES if os.path.exists(job.data) else errno.ENOENT)
    return [Problem("data", "a file or a folder that can be read", repr(job.data), why)]


def data_factory(job: Job) -> Builtin | None:
    """Returns what makes the data of a job that is not a user's factory; None where the model cannot learn from it."""
    entry = MODELS.get(job.model)
    offered = _offered(job)
    return next((offered[task] for task in (entry.tasks if entry else offered) if task in offered), None)


def _offered(job: Job) -> Mapping[Task, Builtin]:
    """Returns what is offered by the data that a job names: built in, or a file (text) or a folder (images) by path."""
    entry = MODELS.get(job.model)
    name = job.data if job.data != "auto" else entry.data if entry else "synthetic"
    if name in DATA:
        return DATA[name]
    if os.path.isdir(name):
        return {"classify": Builtin("datasets.image_files", "image_folder", (name,))}
    return _text(name) if "/" in name or "." in name or os.path.exists(name) else {}
