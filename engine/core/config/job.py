"""The job: the complete configuration of a run, as plain values.

The fields and their defaults are defined only here. Job files, ``BAMBOO_*``, ``--set``, flags and schemas derive from
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from engine.core.errors import MASK, is_secret
from engine.core.ownership import Grid, Redundancy
from engine.core.placement import PlacementChoice
from engine.core.scalar import Args, Scalar
from engine.core.texts import counted

Backend = Literal["auto", "direct", "nccl"]
DeviceKind = Literal["auto", "cpu", "cuda"]
RetainPlace = Literal["device", "cpu"]
Dtype = Literal["float32", "bfloat16", "float16"]

PARTITION_FORMS = "uniform, parameters, profile, type:REGEX, or the first layers of stages 1.. as 2,4,6"
CODE_FIELDS = ("model", "data", "collate", "metrics", "schedule", "optimizer", "lr_schedule", "logger")  # name code
PLACES = ("results", "checkpoints")  # each can name a place that bamboo writes to
ACTING = (*CODE_FIELDS, *PLACES)  # fields that reach beyond the job: to other code, to another folder
FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # names of Python, which may have letters beyond ASCII


def _field(default: Scalar, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _args(text: str) -> Any:
    return field(default_factory=dict, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A resolved job. Sizes are counts; the learning rate is per optimizer step."""

    model: str = _field("gpt", "built-in model, or package.module:factory (trusted code)")
    model_args: Args = _args("arguments of the model, such as width or tied")
    data: str = _field(
        "auto",
        "text, digits, synthetic, a FILE.txt, a FILE.bin of tokens, a folder of MNIST or CIFAR-10 files, or "
        "package.module:factory",
    )
    data_args: Args = _args("arguments of the data source")
    collate: str = _field(
        "", "package.module:function that makes a microbatch of a list of samples (trusted code); the data's by default"
    )
    load_ahead: int = _field(
        1, "microbatches that a worker loads ahead, each in a thread, from a slow source that draws nothing; 0 = none"
    )
    stages: int = _field(4, "stages of one pipeline (P)")
    blocks: int = _field(
        1,
        "blocks of each stage: each is owned, shadowed and taken over by itself; kills and scenarios then name blocks",
    )
    elastic: bool = _field(
        False,
        "share out slots anew, by moves at step boundaries, when a worker has been lost or leaves; use it with blocks",
    )
    standby: int = _field(
        0, "waiting workers beside the owners: each has code and data loaded, and takes the place of a worker that dies"
    )
    pipelines: int = _field(1, "pipelines (D): copies of the whole model, data parallel")
    microbatches: int = _field(8, "microbatches of one pipeline in one step (M)")
    microbatch_size: int = _field(4, "samples in one microbatch")
    steps: int = _field(80, "optimizer steps")
    epochs: int = _field(
        0, "passes over a finite training set; sets the steps: as many as train each sample so often; 0 = as steps says"
    )
    schedule: str = _field(
        "1f1b",
        "pipeline schedule: {schedules}, FILE.csv with compute lists, or package.module:generator (trusted code)",
    )
    stages_per_worker: int = _field(1, "stages of one pipeline on each worker (V)")
    workers: int = _field(
        0, "worker processes; 0 = one for the stages of each pipeline that stand together; fewer carry several of them"
    )
    placement: PlacementChoice = _field(
        "auto", "which stages stand on one worker: loop, v (there and back), or auto: the schedule's own"
    )
    optimizer: str = _field(
        "adamw", "optimizer: adamw, sgd, another of torch.optim, or package.module:Class (trusted code)"
    )
    optimizer_args: Args = _args("arguments of the optimizer, such as weight_decay or momentum")
    param_groups: str = _field(
        "",
        "other arguments for parameters whose names match: 'bias|norm: weight_decay=0; ^head: lr=0.1'; lr is a factor",
    )
    lr: float = _field(2e-3, "peak learning rate")
    lr_schedule: str = _field(
        "cosine",
        "constant, linear, cosine, another of torch's such as onecycle, or package.module:function (trusted code)",
    )
    lr_args: Args = _args("arguments of the schedule of the learning rate, such as gamma")
    warmup_steps: int = _field(10, "steps of linear warm-up of the learning rate")
    clip_norm: float = _field(1.0, "clip gradients to this global norm; 0 = off")
    dtype: Dtype = _field("float32", "bfloat16 and float16 run the layers under autocast; float16 scales the loss")
    scaler_args: Args = _args("arguments of the scale of the loss in float16, such as growth_interval")
    partition: str = _field("uniform", PARTITION_FORMS)
    split: str = _field(
        "",
        "layers of an ordinary module: names of submodules such as blocks.*, or a number of about equal pieces; by "
        "default its repeated blocks",
    )
    redundancy: Redundancy = _field(
        "lazy",
        "which worker can take over a stage: none; lazy: a shadow keeps its weights in step; eager: the shadow also "
        "runs its forwards when idle; reroute: the next pipeline",
    )
    redundancy_level: int = _field(1, "shadows of each stage with lazy and eager: failures at once that it survives")
    log_every: int = _field(0, "send gradients to the shadows every N microbatches, to redo less after a kill; 0 = off")
    fsdp: int = _field(
        0, "shard weights and optimizer state over the pipelines: at most N unsharded stages per worker; 0 = off"
    )
    activation_checkpoint: int = _field(0, "recompute the activations of every N layers; 0 = off")
    device: DeviceKind = _field(
        "auto", "where layers compute: cpu, cuda, or auto: cuda if each worker gets a GPU of its own; it decides bits"
    )
    share_gpu: bool = _field(False, "several workers may share a GPU: a mode for tests, as they wait for each other")
    retain: RetainPlace = _field(
        "device",
        "where the values for other workers stay until the commit: device, or cpu, in pinned host memory: more room on "
        "a GPU",
    )
    deterministic: bool = _field(
        True, "the settings of torch and CUDA that give an operation the same bits each time; they decide bits"
    )
    backend: Backend = _field("auto", "auto, direct (links through host memory) or nccl (between GPUs)")
    seed: int = _field(0, "seed of weights, data and dropout")
    init: str = _field(
        "", "begin with these weights: FILE.safetensors, FILE.pt, or a folder; names and shapes as in the state_dict"
    )
    threads: int = _field(1, "compute threads of each worker; another count changes bits")
    check_pure: bool = _field(
        True,
        "the check before training, which refuses layers whose bits depend on more than weights, buffers and inputs",
    )
    audit: int = _field(1, "hash weights and optimizer state every N steps; 0 = off")
    validate_every: int = _field(20, "validation pass every N steps, or every so many epochs (1epoch); 0 = off")
    validation_microbatches: int = _field(
        8, "microbatches of each evaluation set in a validation pass; 0 = every sample once"
    )
    metrics: str = _field(
        "",
        "metrics of a validation: accuracy, perplexity, NAME=package.module:function (trusted code), comma-separated",
    )
    name: str = _field("", "name of the run; the model's by default")
    events_max: str = _field(
        "500MB", "size of a run's events, beyond which actions of ordinary steps are left out; 0B = keep all"
    )
    hang_after: str = _field(
        "1s",
        "a worker is put out that stays inside one action for this time without running, or five times as long while "
        "it runs; ten times as long as its slowest action of late, if that is more",
    )
    silent_after: str = _field("5s", "a worker is put out that is stopped, or answers nothing, for this time")
    checkpoint_every: str = _field(
        "end",
        "keep the state as a checkpoint: every N steps (100), epochs (1epoch) or span of time (10m), end: the last; "
        "0 = off",
    )
    keep: int = _field(3, "newest checkpoints of a run that stay; older ones are deleted")
    checkpoints: str = _field("", "folder or URL (s3://...) of the checkpoints; in the run's folder by default")
    restarts: int = _field(
        3, "after the loss of a state, go on from the newest good checkpoint, at most N times in an hour; 0 = off"
    )
    results: str = _field("results", "folder that receives one folder per run")
    logger: str = _field(
        "", "csv, tensorboard, wandb, mlflow or package.module:Class (trusted code); with commas between several"
    )

    @property
    def masked(self) -> Job:
        """The job as files and messages show it: without the values of secret arguments."""
        hidden: dict[str, Any] = {name: _masked(getattr(self, name)) for name in ARGS_FIELDS}
        return replace(self, **hidden)

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
        return Grid(self.slots, self.microbatches, self.pipelines, blocks=self.blocks, fsdp=self.fsdp)

    @property
    def most_workers(self) -> int:
        """The number of workers without `workers`: P / V in each pipeline."""
        return self.stages // max(1, self.stages_per_worker) * self.pipelines

    @property
    def num_workers(self) -> int:
        """The number of workers before any failure."""
        return self.workers or self.most_workers

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


def _masked(args: Args) -> Args:
    return {name: MASK if is_secret(name, value) else value for name, value in args.items()}


def is_due(every: int, step: int, is_last: bool) -> bool:
    """Returns whether periodic work follows `step`: after each `every` steps and after the last; never if 0."""
    return every > 0 and ((step + 1) % every == 0 or is_last)
