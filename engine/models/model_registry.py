"""The registry of built-in models and data, and the checks of a job that names them.

A model can learn certain tasks, a data source offers some; the job trains the first task of the model that the source
offers. Rules: the tables are the only list of names. This module does not import torch, and a factory is imported when
it is called, so that mistakes in a job are reported at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.core.errors import Problem, nearest
from engine.core.job.hugging_face import MODEL as HF_MODEL
from engine.core.job.job import FACTORY, Job
from engine.core.job.partition import MOST_LAYERS, cutting_problems, smallest_stage
from engine.core.units import Args, Scalar
from engine.models.arguments import argument_problems, builtin_arguments

if TYPE_CHECKING:
    from engine.models.data import Task


@dataclass(frozen=True, slots=True)
class Builtin:
    """A factory of this package: its module, its name, its first arguments, other defaults than its own."""

    module: str
    name: str
    first: tuple[object, ...] = ()
    defaults: Args = field(default_factory=dict)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Imports the factory and calls it."""
        return getattr(import_module(self._module), self.name)(*self.first, *args, **(self.defaults | kwargs))

    def problems(self, field: str, args: Args) -> list[Problem]:
        """Returns the problems with the arguments that a user gave in a field."""
        return argument_problems(field, self._module, self.name, args)

    def arguments(self, args: Args) -> Args:
        """Returns the user's arguments together with the defaults of the others."""
        return {**builtin_arguments(self._module, self.name), **self.defaults, **args}

    @property
    def _module(self) -> str:
        return f"{__package__}.{self.module}"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A built-in model: its factory, the tasks it can learn, and the data for ``auto``."""

    factory: Builtin
    tasks: tuple[Task, ...]
    data: str
    # Batch norm over a single sample of one pixel has no variance.
    least_microbatch_size: int = 1
    # The number of layers: `layers` plus the value of the argument `more_layers`.
    layers: int = 0
    more_layers: str = ""
    divisor: tuple[str, str] | None = None  # the first of these arguments divides the second
    job: Mapping[str, Scalar] = field(default_factory=dict)  # other defaults of a job with this model, by field

    def num_layers(self, args: Args) -> int:
        """Returns the number of layers for valid arguments."""
        return self.layers + (int(self.factory.arguments(args)[self.more_layers]) if self.more_layers else 0)


def _resnet(is_bottleneck: bool, *blocks: int) -> ModelEntry:
    factory = Builtin("networks", "resnet", (blocks, is_bottleneck))
    return ModelEntry(factory, _IMAGES, "digits", least_microbatch_size=2, layers=2 + sum(blocks))


def _transformer(name: str, task: Task, **others: Any) -> ModelEntry:
    divisor, defaults = ("heads", "width"), others.pop("defaults", {})
    factory = Builtin("transformer", name, (), defaults)
    return ModelEntry(factory, (task,), "text", layers=2, more_layers="depth", divisor=divisor, **others)


def _large_gpt(width: int, depth: int, heads: int) -> ModelEntry:
    """Returns a gpt of a real size, as such ones are trained: in bfloat16, with fused attention and no dropout."""
    defaults: Args = {"width": width, "depth": depth, "heads": heads, "dropout": 0.0, "fused": True}
    job: dict[str, Scalar] = {"dtype": "bfloat16", "lr": 3e-4, "data_args.sequence": 1024}
    return _transformer("gpt", "causal", defaults=defaults, job=job)


_IMAGES: tuple[Task, ...] = ("classify",)
MODELS: dict[str, ModelEntry] = {
    "gpt": _transformer("gpt", "causal"),
    "gpt-100m": _large_gpt(width=768, depth=14, heads=12),
    "gpt-1b": _large_gpt(width=2048, depth=20, heads=16),
    "bert": _transformer("bert", "masked"),
    "resnet18": _resnet(False, 2, 2, 2, 2),
    "resnet34": _resnet(False, 3, 4, 6, 3),
    "resnet50": _resnet(True, 3, 4, 6, 3),
    "resnet101": _resnet(True, 3, 4, 23, 3),
    "resnet152": _resnet(True, 3, 8, 36, 3),
    "vgg19": ModelEntry(Builtin("networks", "vgg19"), _IMAGES, "digits", layers=19),
    "alexnet": ModelEntry(Builtin("networks", "alexnet"), _IMAGES, "digits", layers=8),
    "mlp": ModelEntry(Builtin("networks", "mlp"), ("regress", "classify"), "synthetic", layers=1, more_layers="depth"),
    "timed": ModelEntry(Builtin("networks", "timed"), ("regress",), "synthetic", more_layers="layers"),
}


def _text(path: str) -> dict[Task, Builtin]:
    tasks: tuple[Task, ...] = ("causal", "masked")
    return {task: Builtin("datasets", "text", (task, path)) for task in tasks}


_OF_BYTES = frozenset({"text", "VectorData"})  # factories whose samples are no tokens of a model of transformers

# Each factory takes the seed; its keyword-only parameters are the job's data_args.
DATA: dict[str, dict[Task, Builtin]] = {
    "text": _text(""),
    "digits": {"classify": Builtin("datasets", "digits")},
    "synthetic": {
        "regress": Builtin("datasets", "VectorData"),
        "classify": Builtin("datasets", "synthetic_images"),
        "causal": Builtin("datasets", "synthetic_tokens", ("causal",)),
        "masked": Builtin("datasets", "synthetic_tokens", ("masked",)),
    },
}


# Each loss takes (outputs, targets); its keyword-only parameters are the job's loss_args.
_LOSSES = ("bce_with_logits", "cross_entropy", "huber", "l1", "mse", "smooth_l1")
LOSSES = {name: Builtin("losses", name) for name in _LOSSES}


def is_own(name: str) -> bool:
    """Returns whether the name of a model or data source is a user's factory, ``package.module:factory``."""
    return FACTORY.fullmatch(name) is not None


def problems_of(job: Job) -> list[Problem]:
    """Returns the problems with the built-in model and data of a job."""
    return [*model_problems(job), *loss_problems(job), *([] if is_own(job.data) else data_problems(job))]


def loss_problems(job: Job) -> list[Problem]:
    """Returns the problems with the loss of a job, and with its arguments unless it is the user's."""
    if is_own(job.loss):
        return []
    if job.loss in LOSSES:
        return LOSSES[job.loss].problems("loss_args", job.loss_args)
    if job.loss:
        expected = f"one of {', '.join(LOSSES)}, or package.module:loss"
        return [Problem("loss", expected, repr(job.loss), _with_colon(job.loss) or nearest(job.loss, LOSSES))]
    hint = "name the loss that takes them, such as cross_entropy"
    return [Problem("loss_args", "no arguments without a loss", ", ".join(job.loss_args), hint)] * bool(job.loss_args)


def name_problems(job: Job) -> list[Problem]:
    """Returns a problem if the model of a job is neither built in nor a user's factory."""
    if job.model in MODELS or is_own(job.model):
        return []
    expected = f"one of {', '.join(sorted(MODELS))}, or package.module:factory"
    return [Problem("model", expected, repr(job.model), _with_colon(job.model) or nearest(job.model, MODELS))]


def _with_colon(name: str) -> str:
    """Returns a hint for the path of a factory that has a dot where the colon belongs, else an empty string."""
    module, _, factory = name.rpartition(".")
    return f"did you mean '{module}:{factory}'?" if is_own(f"{module}:{factory}") else ""


def model_problems(job: Job) -> list[Problem]:
    """Returns the problems with the built-in model of a job; a user's factory is not checked."""
    entry = MODELS.get(job.model)
    if entry is None:
        return name_problems(job)
    problems = entry.factory.problems("model_args", job.model_args)
    if entry.divisor and not problems:
        problems += _division_problems(*entry.divisor, entry.factory.arguments(job.model_args), job.model_args)
    if job.microbatch_size < entry.least_microbatch_size:
        expected = f"a whole number >= {entry.least_microbatch_size} for batch norm"
        problems.append(Problem("microbatch_size", expected, repr(job.microbatch_size)))
    if job.split:
        hint = "a built-in model is a list of layers: give --partition"
        problems.append(Problem("split", f"no value with the model {job.model}", repr(job.split), hint))
    return problems


def argument_names(job: Job) -> list[str]:
    """Returns the arguments of the built-in model and data of a job, such as ``model_args.width``."""
    entry, data = MODELS.get(job.model), None if is_own(job.data) else data_factory(job)
    factories = {"model_args": entry.factory if entry else None, "data_args": data, "loss_args": LOSSES.get(job.loss)}
    return [f"{field}.{name}" for field, each in factories.items() if each is not None for name in each.arguments({})]


def _division_problems(part: str, whole: str, args: Args, arguments: Args) -> list[Problem]:
    if int(args[whole]) % int(args[part]) == 0:
        return []
    if part not in arguments:
        return [Problem(f"model_args.{whole}", f"a multiple of {part} {args[part]}", repr(args[whole]))]
    return [Problem(f"model_args.{part}", f"a divisor of {whole} {args[whole]}", repr(args[part]))]


def layer_problems(job: Job) -> list[Problem]:
    """Returns the problems of the job's partition with the layers of a built-in model."""
    entry = MODELS.get(job.model)
    if entry is None or entry.factory.problems("model_args", job.model_args):
        return []
    num_layers, more = entry.num_layers(job.model_args), entry.more_layers
    if more and num_layers > MOST_LAYERS:
        expected = f"a whole number <= {MOST_LAYERS - entry.layers}"
        return [Problem(f"model_args.{more}", expected, str(num_layers - entry.layers))]
    return cutting_problems(job.partition, job.stages, num_layers, job.blocks)


def job_defaults(job: Job) -> Mapping[str, Scalar]:
    """Returns the fields that have other defaults with the model of a job; those of data with its own data only."""
    entry = MODELS.get(job.model)
    own = entry.job if entry is not None else {}
    return {name: value for name, value in own.items() if job.data == "auto" or not name.startswith("data_args.")}


def layers_of_smallest_stage(job: Job) -> int | None:
    """Returns the layers of the smallest stage of a built-in model; None if only the cut of the model tells."""
    entry = MODELS.get(job.model)
    if entry is None or entry.factory.problems("model_args", job.model_args) or job.stages < 1:
        return None
    return smallest_stage(job.partition, job.stages, entry.num_layers(job.model_args))


def data_problems(job: Job) -> list[Problem]:
    """Returns the problems with a job's built-in data, or of its name alone for a user's model; opens no file."""
    entry = MODELS.get(job.model)
    offered = _offered(job)
    if not offered:
        expected = f"one of auto, {', '.join(sorted(DATA))}, a file, a folder, or package.module:factory"
        return [Problem("data", expected, repr(job.data), nearest(job.data, ("auto", *DATA)))]
    if entry is None and not is_own(job.model):
        return []
    if job.model == HF_MODEL and not _OF_BYTES.isdisjoint(each.name for each in offered.values()):
        hint = "a FILE.txt as --data with --hf is read with the tokenizer of the model"
        return [
            Problem("data", "tokens of the model: FILE.txt, FILE.bin or package.module:factory", repr(job.data), hint)
        ]
    factory = data_factory(job)
    if factory is None:
        tasks_of_model = entry.tasks if entry else ()
        fitting = [name for name, tasks in DATA.items() if not tasks.keys().isdisjoint(tasks_of_model)]
        return [Problem("data", f"data that {job.model} can learn, such as {', '.join(fitting)}", repr(job.data))]
    return factory.problems("data_args", job.data_args)


def unreadable_files(job: Job, *, begins: bool = True) -> list[Problem]:
    """Returns a problem for each unreadable path of a job: of its data and, if it `begins`, of its weights."""
    paths = {} if job.data in ("auto", *DATA) or is_own(job.data) else {"data": job.data}
    if job.init and begins:
        paths["init"] = job.init
    return [
        Problem(
            field,
            "a file or a folder that can be read",
            repr(path),
            os.strerror(errno.EACCES if os.path.exists(path) else errno.ENOENT),
        )
        for field, path in paths.items()
        if not os.access(path, os.R_OK)
    ]


def data_factory(job: Job) -> Builtin | None:
    """Returns the factory of the built-in data of a job, or None if the model cannot learn from that data."""
    entry = MODELS.get(job.model)
    offered = _offered(job)
    return next((offered[task] for task in (entry.tasks if entry else offered) if task in offered), None)


def _offered(job: Job) -> Mapping[Task, Builtin]:
    """Returns task -> factory of the data of a job: built in, or from a file (text, tokens) or a folder (images)."""
    entry = MODELS.get(job.model)
    name = job.data if job.data != "auto" else entry.data if entry else "synthetic"
    if name in DATA:
        return DATA[name]
    if os.path.isdir(name):
        return {"classify": Builtin("datasets", "image_folder", (name,))}
    if name.endswith(".bin"):
        return {"causal": Builtin("datasets", "tokens", (name,))}
    return _text(name) if "/" in name or "." in name or os.path.exists(name) else {}


# One line about each built-in model and data source; without torch, so that a list of them comes at once.
#
# Rule: `tests/runtime/test_data.py` holds the samples in these lines against those that the sources yield.

_RESIDUAL = "residual network with {} weight layers, for images"
MODEL_TEXTS: dict[str, str] = {
    "gpt": "transformer that predicts the next byte of a text",
    "gpt-100m": "the same with 100 million parameters, in bfloat16, with fused attention",
    "gpt-1b": "the same with a thousand million parameters",
    "bert": "transformer that predicts hidden bytes of a text",
    **{f"resnet{layers}": _RESIDUAL.format(layers) for layers in (18, 34, 50, 101, 152)},
    "vgg19": "convolutional network of 19 weight layers, for images",
    "alexnet": "convolutional network of 8 weight layers, for images",
    "mlp": "fully connected layers, for vectors or flattened images",
    "timed": "layers that sleep instead of computing: a stand-in for an accelerator",
}
DATA_TEXTS: dict[str, str] = {
    "text": "the documentation that ships with Python, as bytes",
    "digits": "scikit-learn's 1797 handwritten digits, gray values from 0 to 1",
    "synthetic": "random data that can be learned, made from the seed",
}
# source -> task -> one sample with the default arguments
SAMPLES: dict[str, Mapping[Task, str]] = {
    "text": {"causal": "int64 32, below 256", "masked": "int64 32, below 257"},
    "digits": {"classify": "float32 1x8x8, 10 classes"},
    "synthetic": {
        "regress": "float32 32, target float32 1",
        "classify": "float32 3x32x32, 10 classes",
        "causal": "int64 32, below 256",
        "masked": "int64 32, below 257",
    },
}
