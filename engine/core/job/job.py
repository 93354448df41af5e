"""The job: the complete configuration of a run, as plain values.

The fields and their defaults are defined only here. Job files, ``BAMBOO_*``, ``--set``, flags and schemas derive from
them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from engine.core.errors import MASK, Problem, is_secret, nearest
from engine.core.ownership import Grid, PlacementChoice, Redundancy, directions_of
from engine.core.texts import counted
from engine.core.units import Args, described, whole_units

Backend = Literal["auto", "direct", "nccl"]
DeviceKind = Literal["auto", "cpu", "cuda"]
OffloadPlace = Literal["none", "host"]
RetainPlace = Literal["device", "cpu"]
ResidualChoice = Literal["auto", "recompute", "ship"]
Dtype = Literal["float32", "bfloat16", "float16"]
LogFormat = Literal["text", "json"]
LossNormalisation = Literal["microbatches", "tokens", "next-tokens"]

PARTITION_FORMS = "uniform, parameters, profile, type:REGEX, or the layers at which stages 1, 2, ... begin: 2,4,6"
CODE_FIELDS = ("model", "data", "collate", "loss", "metrics", "schedule", "optimizer", "lr_schedule", "logger")
PLACES = ("results", "checkpoints")  # each can name a place that bamboo writes to
ACTING = (*CODE_FIELDS, *PLACES)  # fields that reach beyond the job: to other code, to another folder
FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # names of Python, which may have letters beyond ASCII


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A resolved job. Sizes are counts; the learning rate is per optimizer step."""

    model: str = described("gpt", "built-in model, or package.module:factory (trusted code)")
    model_args: Args = described(dict, "arguments of the model, such as width or tied")
    data: str = described(
        "auto",
        "text, digits, synthetic, FILE.txt, FILE.bin (tokens), a folder of MNIST or CIFAR-10 files, or "
        "package.module:factory (trusted code)",
    )
    data_args: Args = described(dict, "arguments of the data source")
    collate: str = described(
        "",
        "package.module:function that turns a list of samples into a microbatch (trusted code); default: the data "
        "source's own",
    )
    loss: str = described(
        "",
        "cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, or package.module:loss (trusted code); default: "
        "the model's own",
    )
    loss_args: Args = described(dict, "arguments of the loss, such as label_smoothing")
    load_ahead: int = described(
        1,
        "microbatches to prefetch, one thread each; used only if the source is slow and draws no random numbers; 0 = "
        "off",
    )
    data_retries: int = described(
        8,
        "retry a call of the data source at most N times after a transient error (EIO, ESTALE, a broken connection, a "
        "timeout, or an exception with is_transient = True); 0 = off",
    )
    data_retry_for: str = described("1m", "longest time to keep retrying one call of the data source")
    variable_shapes: bool = described(False, "let microbatches differ in shape, such as in sequence length")
    stages: int = described(4, "stages of each pipeline (P)")
    blocks: int = described(
        1,
        "blocks per stage, each with its own owner and shadow; kills and scenarios then name blocks, not stages; auto "
        "= the fewest, up to 4, whose step after a death is within 5 % of the shortest; elastic jobs default to auto",
    )
    elastic: bool = described(
        False,
        "move blocks (with --blocks 1: stages) between workers when one is lost, leaves or joins; a run of several "
        "workers moves whole stages by default",
    )
    adapt_schedule: int = described(
        0,
        "switch to another schedule once measured times predict steps at least 10 % shorter with it; it may stash at "
        "most N microbatches per worker; 0 = never",
    )
    standby: int = described(
        0, "extra workers, with code and data loaded, that replace dead ones; makes the job elastic"
    )
    max_workers: int = described(
        0,
        "most workers that train at the same time; others wait; makes the job elastic, with blocks for all of them "
        "(--blocks auto); 0 = no limit",
    )
    pipelines: int = described(1, "data-parallel copies of the whole model (D)")
    microbatches: int = described(8, "microbatches per pipeline and step (M)")
    microbatch_size: int = described(4, "samples per microbatch")
    slices: int = described(
        1,
        "slices per microbatch along the sequence, to save activation memory (Seq1F1B); the program treats each as a "
        "microbatch; needs layers with a forward_slice method, such as those of gpt; changes bits",
    )
    steps: int = described(80, "optimizer steps")
    epochs: int = described(0, "passes over a finite training set, which determine the number of steps; 0 = use steps")
    schedule: str = described(
        "1f1b",
        "pipeline schedule: {schedules}, FILE.csv with each worker's compute actions, or package.module:generator "
        "(trusted code)",
    )
    stages_per_worker: int = described(1, "stages of one pipeline on each worker (V)")
    workers: int = described(
        0, "worker processes; 0 = pipelines x stages / stages-per-worker; fewer workers get several stages each"
    )
    placement: PlacementChoice = described(
        "auto", "which stages share a worker: loop, v (there and back), or auto (the schedule's default)"
    )
    optimizer: str = described(
        "adamw", "adamw, sgd, another optimizer of torch.optim, or package.module:Class (trusted code)"
    )
    optimizer_args: Args = described(dict, "arguments of the optimizer, such as weight_decay or momentum")
    param_groups: str = described(
        "",
        "optimizer arguments by parameter name: 'bias|norm: weight_decay=0; ^head: lr=0.1'; lr multiplies the job's "
        "learning rate",
    )
    lr: float = described(2e-3, "peak learning rate")
    lr_schedule: str = described(
        "cosine",
        "constant, linear, cosine, another schedule of torch such as onecycle, or package.module:function (trusted "
        "code)",
    )
    lr_args: Args = described(dict, "arguments of the learning-rate schedule, such as gamma")
    warmup_steps: int = described(10, "steps of linear learning-rate warm-up")
    clip_norm: float = described(1.0, "clip gradients to this global norm; 0 = off")
    ema: float = described(
        0.0, "decay of an exponential moving average of the weights, such as 0.999; for bamboo export --ema; 0 = off"
    )
    dtype: Dtype = described(
        "float32", "bfloat16 and float16 run the layers under autocast; float16 also scales the loss"
    )
    scaler_args: Args = described(dict, "arguments of the float16 loss scale, such as growth_interval")
    loss_normalisation: LossNormalisation = described(
        "microbatches",
        "how the loss of a step is averaged: over its microbatches, or over its tokens (targets that are not -100); "
        "next-tokens: the same for a loss that shifts its targets by one",
    )
    partition: str = described("uniform", PARTITION_FORMS)
    split: str = described(
        "",
        "where to split a module that is not an nn.Sequential: at submodules such as blocks.*, or into N equal pieces; "
        "default: at its repeated submodules",
    )
    redundancy: Redundancy = described(
        "lazy",
        "who can take over a stage. lazy: a shadow with up-to-date weights; eager: a shadow that also runs the stage's "
        "forwards when idle; reroute: the next pipeline, or else a shadow; none: only another pipeline",
    )
    redundancy_level: int = described(
        1, "shadows per stage with lazy and eager; the job survives this many simultaneous failures"
    )
    log_every: int = described(
        0, "send gradients to the shadows every N microbatches, so that less is redone after a failure; 0 = off"
    )
    fsdp: int = described(
        0, "shard weights and optimizer state over the pipelines, with at most N unsharded stages per worker; 0 = off"
    )
    activation_checkpoint: int = described(0, "recompute activations in groups of N layers; 0 = off")
    device: DeviceKind = described(
        "auto", "where layers compute: cpu, cuda, or auto (cuda if every worker can have its own GPU); changes bits"
    )
    share_gpu: bool = described(False, "let several workers share a GPU; slow, because they take turns: for tests")
    residuals: ResidualChoice = described(
        "auto",
        "when a worker leaves between a microbatch's forward and backward: ship = send the activations saved for the "
        "backward; recompute = run the forward again elsewhere; auto = whichever is quicker",
    )
    retain: RetainPlace = described(
        "device",
        "where values sent to other workers are kept until the commit: device, or cpu (pinned host memory, to save "
        "GPU memory)",
    )
    offload: OffloadPlace = described(
        "none",
        "host: copy as many activations saved for the backward to host memory and back as overlap with compute; none: "
        "keep all on the device",
    )
    offload_time: float = described(
        0.5, "with --offload host: time to copy the activations of one forward, in units of that forward's time"
    )
    deterministic: bool = described(True, "use the deterministic settings of torch and CUDA; changes bits")
    backend: Backend = described("auto", "auto, direct (links through host memory) or nccl (between GPUs)")
    seed: int = described(0, "seed of weights, data and dropout")
    init: str = described(
        "",
        "start from these weights: FILE.safetensors, FILE.pt or a folder, with names and shapes as in the state_dict",
    )
    threads: int = described(1, "compute threads per worker; changes bits")
    check_pure: bool = described(
        True, "before training, reject layers whose results depend on anything but weights, buffers and inputs"
    )
    audit: int = described(1, "hash weights and optimizer state every N steps; 0 = off")
    layer_norms: int = described(0, "record the gradient norm of each layer every N steps; 0 = off")
    validate_every: int = described(20, "run a validation every N steps or epochs (1epoch); 0 = off")
    validation_microbatches: int = described(
        8, "microbatches that a validation takes from each evaluation set; 0 = every sample once"
    )
    predict_args: Args = described(
        dict, "set by bamboo predict, which runs only forwards over these samples: samples, rows, file"
    )
    metrics: str = described(
        "", "validation metrics, comma-separated: accuracy, perplexity, NAME=package.module:function (trusted code)"
    )
    name: str = described("", "name of the run; default: the model's name")
    events_max: str = described(
        "500MB",
        "maximum size of a run's events; beyond it, action records of ordinary steps are dropped; 0B = keep everything",
    )
    hang_after: str = described(
        "1s",
        "evict a worker stuck in one action for this long, or for 10x its slowest recent action if that is longer; a "
        "worker that uses the CPU gets five times as long",
    )
    silent_after: str = described("5s", "evict a worker that has been stopped or silent for this long")
    checkpoint_every: str = described(
        "10m",
        "write a checkpoint every N steps (100), epochs (1epoch) or minutes (10m), and at the end; end = only at the "
        "end; 0 = never",
    )
    keep: int = described(3, "keep the newest N checkpoints of a run; older ones are deleted")
    best: str = described(
        "",
        "also keep the checkpoint with the best validation, by loss (of the first evaluation set), by a metric such as "
        "accuracy (higher is better), or by NAME:min (lower is better)",
    )
    early_stop: str = described(
        "",
        "stop when validations no longer improve: METRIC[:PATIENCE[:MIN_DELTA]], such as loss:3 or accuracy:5:0.001; "
        "patience counts validations (default 3)",
    )
    checkpoints: str = described("", "folder or URL (s3://...) for checkpoints; default: the run's folder")
    restarts: int = described(
        3, "restart from the newest good checkpoint when a stage's state is lost, at most N times per hour; 0 = off"
    )
    results: str = described("results", "folder that holds the run folders")
    logger: str = described(
        "",
        "csv, tensorboard, wandb, mlflow, otel, kubeflow, prometheus, prometheus:FILE.prom, prometheus:PORT or "
        "package.module:Class (trusted code); comma-separated",
    )
    log_format: LogFormat = described(
        "text", "logs of the workers in the run folder: text, or json (lines with time, level, host, worker, step, ...)"
    )

    @property
    def masked(self) -> Job:
        """The job as files and messages show it: without the values of secret arguments."""
        masked: dict[str, Any] = {}
        for field_name in ARGS_FIELDS:
            args = getattr(self, field_name).items()
            masked[field_name] = {name: MASK if is_secret(name, value) else value for name, value in args}
        return replace(self, **masked)

    @property
    def names_code(self) -> bool:
        """Whether a field names code of the user's."""
        return any(code_in(getattr(self, name)) for name in CODE_FIELDS)

    @property
    def has_program(self) -> bool:
        """Whether its schedule is known: the name of a generator that was not called stands for no schedule."""
        return not FACTORY.fullmatch(self.schedule)

    @property
    def has_steps(self) -> bool:
        """Whether the number of its steps is known; it is 0 for epochs of data that were not counted."""
        return self.steps > 0

    @property
    def slots(self) -> int:
        """The number of slots of one pipeline: its stages, or their blocks."""
        return self.stages * self.blocks

    @property
    def slot_noun(self) -> str:
        """The noun for a slot of a pipeline in messages: a whole stage, or a block of one."""
        return self.grid.noun

    @property
    def cut(self) -> str:
        """The cut of a pipeline in words, such as ``4 stages`` or ``4 stages of 2 blocks``."""
        return counted(self.stages, "stage") + (f" of {self.blocks} blocks" if self.blocks > 1 else "")

    @property
    def grid(self) -> Grid:
        """The slots of all pipelines; without the ties of the model."""
        shape = self.slots, self.program_microbatches, self.pipelines
        return Grid(*shape, blocks=self.blocks, fsdp=self.fsdp, slices=self.slices)

    @property
    def program_microbatches(self) -> int:
        """The microbatches of a pipeline's program: those of the job, or their slices."""
        return self.microbatches * self.slices

    @property
    def most_workers(self) -> int:
        """The number of workers without `workers`: P / V in each pipeline, or in two of opposite directions."""
        return self.stages // max(1, self.stages_per_worker) * self.pipelines // directions_of(self.schedule)

    @property
    def num_workers(self) -> int:
        """The number of workers before any failure."""
        return self.workers or self.most_workers

    @property
    def copy_time(self) -> float | None:
        """The time of a residual's copy to the host, in forwards; None if none is copied."""
        return self.offload_time if self.offload == "host" else None

    @property
    def retains(self) -> bool:
        """Whether another worker can take over a slot; each worker then keeps until the commit what it sends."""
        return self.redundancy != "none" or (self.pipelines > 1 and not self.fsdp)


ARGS_FIELDS = tuple(each.name for each in fields(Job) if each.default_factory is dict)  # each can have a secret


def code_in(value: str) -> list[str]:
    """Returns each ``package.module:attribute`` in the value of a field, which may be a list with names."""
    named = (part.rpartition("=")[2].strip() for part in value.split(","))
    return [each for each in named if FACTORY.fullmatch(each)]


def logger_names(text: str) -> tuple[str, ...]:
    """Returns the loggers in the value of the field `logger`, in their order; each once."""
    return tuple(dict.fromkeys(name for each in text.split(",") if (name := each.strip())))


def is_due(every: int, step: int, is_last: bool) -> bool:
    """Returns whether periodic work follows `step`: after each `every` steps and after the last; never if 0."""
    return every > 0 and ((step + 1) % every == 0 or is_last)


# The metrics of a job: their names, and the function that each stands for.
#
# accuracy,f1=mine:f1_score        accuracy is built in, f1 is the function f1_score of the user's module mine

PERPLEXITY = "perplexity"
BUILT_IN = ("accuracy", PERPLEXITY)


def named_metrics(job: Job) -> dict[str, str]:
    """Returns the built-in name, or ``package.module:function``, of each metric of a job by the metric's name."""
    return dict(map(_named, _parts(job)))


def metric_problems(job: Job) -> list[Problem]:
    """Returns a problem for each metric that is neither built in nor a function, and for a name that comes twice."""
    named = list(map(_named, _parts(job)))
    expected = f"{', '.join(BUILT_IN)}, or NAME=package.module:function, with commas between them"
    problems = [
        Problem("metrics", expected, repr(path), nearest(path, BUILT_IN))
        for name, path in named
        if path not in BUILT_IN and not (FACTORY.fullmatch(path) and name.isidentifier())
    ]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    return problems or [Problem("metrics", "another name for one of them: NAME=", repr(name)) for name in twice]


def _parts(job: Job) -> list[str]:
    return [part.strip() for part in job.metrics.split(",")] if job.metrics.strip() else []


def _named(part: str) -> tuple[str, str]:
    name, equals, path = part.partition("=")
    return (name.strip(), path.strip()) if equals else (part.rpartition(":")[2], part)


# Sizes as people write them (``200MB``; in the program they are whole bytes), and the sizes that a job can have.
SIZE_FORM = "a size in B, kB, MB, GB or TB, such as 200MB"
# For the schemas of files: whole bytes, with spaces around them.
SIZE_PATTERN = r"^\s*[0-9]{1,6}(?:(?:\.[0-9]{1,3})?(?:kB|MB|GB|TB)|(?:\.0{1,3})?B)\s*$"
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TEXT = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?(B|kB|MB|GB|TB)")
_AT_LEAST = {
    "stages": 1,
    "blocks": 1,
    "stages_per_worker": 1,
    "pipelines": 1,
    "microbatches": 1,
    "microbatch_size": 1,
    "slices": 1,
    "redundancy_level": 1,
    "steps": 1,
    "epochs": 0,
    "load_ahead": 0,
    "data_retries": 0,
    "adapt_schedule": 0,
    "threads": 1,
    "seed": 0,
    "warmup_steps": 0,
    "log_every": 0,
    "fsdp": 0,
    "workers": 0,
    "restarts": 0,
    "standby": 0,
    "max_workers": 0,
    "activation_checkpoint": 0,
    "audit": 0,
    "layer_norms": 0,
    "validate_every": 0,
    "validation_microbatches": 0,
    "keep": 1,
}
# A typo should not try to start thousands of workers, nor a file from elsewhere have their program made.
_MAX_FORWARDS = 1_000_000
_MOST_WORKERS = 1024
AT_MOST = {
    "load_ahead": 256,
    "data_retries": 1000,
    "stages": 4096,
    "blocks": 4096,
    "standby": 1024,
    "max_workers": 4096,
    "pipelines": 1024,
    "microbatches": 65536,
    "slices": 4096,
    "threads": 1024,
    "steps": 1_000_000_000_000,
}


def parse_size(text: str) -> int | None:
    """Returns the bytes that `text` spells; None if it is no size, or has a fraction of a byte."""
    return whole_units(text, _TEXT, _UNITS)


def size_problems(job: Job) -> list[Problem]:
    """Returns a problem for each size of `job` that no job can have; the types of its fields must be right already."""
    problems = [
        Problem(name, f"a whole number >= {least}", repr(getattr(job, name)))
        for name, least in _AT_LEAST.items()
        if getattr(job, name) < least
    ]
    problems += [
        Problem(name, f"a whole number <= {most}", repr(getattr(job, name)))
        for name, most in AT_MOST.items()
        if getattr(job, name) > most
    ]
    num_actions = job.slots * job.pipelines * job.program_microbatches
    if num_actions > _MAX_FORWARDS and not AT_MOST.keys() & {each.field for each in problems}:
        blocks, slices = "x blocks " * (job.blocks > 1), "x slices " * (job.slices > 1)
        expected = f"stages {blocks}x pipelines x microbatches {slices}<= {_MAX_FORWARDS}"
        problems.append(Problem("microbatches", expected, str(num_actions)))
    if not problems and (num_workers := job.most_workers) > _MOST_WORKERS:
        expected = f"stages x pipelines / stages_per_worker <= {_MOST_WORKERS}, the workers of a job"
        problems.append(Problem("stages", expected, str(num_workers)))
    return problems
