"""The job: everything that decides what a run computes, resolved to plain values; and the rules between its fields.

The fields and their defaults stand here once: job files, ``BAMBOO_*``, ``--set``, flags and schemas are made from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from engine.core.errors import Problem, nearest
from engine.core.lr_schedule import LR_SCHEDULES
from engine.core.ownership import Redundancy
from engine.core.partition import written
from engine.core.schedules.choice import PlacementChoice, check_schedule
from engine.core.schedules.registry import SCHEDULES

Scalar = str | int | float | bool
Args = dict[str, Scalar]
Backend = Literal["auto", "gloo", "nccl"]
Dtype = Literal["float32", "bfloat16"]
OptimizerName = Literal["sgd", "adamw"]

PARTITION_FORMS = "uniform, parameters, profile, type:REGEX, or the first layers of stages 1.. as 2,4,6"
FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


MOST_FLOAT = (2 - 2**-23) * 2.0**127  # the greatest number of float32, which torch refuses to exceed


def _field(default: Scalar, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _args(text: str) -> Any:
    return field(default_factory=dict, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A resolved job. Sizes are counts, learning rates are per optimizer step."""

    model: str = _field("gpt", "built-in model, or package.module:factory (trusted code)")
    model_args: Args = _args("arguments of the model, such as width or tied")
    data: str = _field(
        "auto", "text, digits, synthetic, a FILE.txt, a folder of MNIST or CIFAR-10 files, or package.module:factory"
    )
    data_args: Args = _args("arguments of the data source")
    stages: int = _field(4, "stages of one pipeline (P)")
    pipelines: int = _field(1, "pipelines (D): copies of the whole model, data parallel")
    microbatches: int = _field(8, "microbatches of one pipeline in one step (M)")
    microbatch_size: int = _field(4, "samples in one microbatch")
    steps: int = _field(80, "optimizer steps")
    schedule: str = _field(
        "1f1b",
        f"pipeline schedule: {', '.join(sorted(SCHEDULES))}, FILE.csv with compute lists, "
        "or package.module:generator (trusted code)",
    )
    stages_per_worker: int = _field(1, "stages of one pipeline on each worker (V)")
    placement: PlacementChoice = _field(
        "auto", "which stages stand on one worker: loop, v (there and back), or what the schedule wants"
    )
    optimizer: OptimizerName = _field("adamw", "optimizer")
    optimizer_args: Args = _args("arguments of the optimizer, such as weight_decay or momentum")
    lr: float = _field(2e-3, "peak learning rate")
    lr_schedule: str = _field("cosine", "constant, linear or cosine")
    warmup_steps: int = _field(10, "steps of linear warm-up of the learning rate")
    clip_norm: float = _field(1.0, "clip gradients to this global norm; 0 = off")
    dtype: Dtype = _field("float32", "bfloat16 runs the layers under autocast")
    partition: str = _field("uniform", PARTITION_FORMS)
    redundancy: Redundancy = _field(
        "lazy",
        "who can take over a stage: none; lazy: a shadow keeps its weights in step; eager: the shadow also runs its "
        "forwards when idle; reroute: the next pipeline",
    )
    redundancy_level: int = _field(1, "shadows of each stage with lazy and eager: failures at once that it survives")
    log_every: int = _field(0, "send gradients to the shadows every N microbatches, to redo less after a kill; 0 = off")
    fsdp: int = _field(
        0, "shard weights and optimizer state over the pipelines; stages of a worker whole at once, at most; 0 = off"
    )
    activation_checkpoint: int = _field(0, "recompute the activations of every N layers; 0 = off")
    backend: Backend = _field("auto", "auto, gloo (CPU) or nccl (one GPU per worker)")
    seed: int = _field(0, "seed of weights, data and dropout")
    threads: int = _field(1, "compute threads of each worker; another count changes bits")
    check_pure: bool = _field(
        True,
        "the check before training, which refuses layers whose bits depend on more than weights, buffers and inputs",
    )
    audit: int = _field(1, "hash weights and optimizer state every N steps; 0 = off")
    validate_every: int = _field(20, "validation pass every N steps; 0 = off")
    validation_microbatches: int = _field(8, "microbatches of one validation pass")
    name: str = _field("", "name of the run; the model's by default")
    results: str = _field("results", "folder that receives one folder per run")


FIELD_HELP = {each.name: str(each.metadata["help"]) for each in fields(Job)}

_AT_LEAST = {
    "stages": 1,
    "stages_per_worker": 1,
    "pipelines": 1,
    "microbatches": 1,
    "microbatch_size": 1,
    "redundancy_level": 1,
    "steps": 1,
    "threads": 1,
    "seed": 0,
    "warmup_steps": 0,
    "log_every": 0,
    "fsdp": 0,
    "activation_checkpoint": 0,
    "audit": 0,
    "validate_every": 0,
    "validation_microbatches": 1,
}
# 4096 workers or microbatches are far beyond what one machine starts; a typo should not try.
_MAX_FORWARDS = 1_000_000
_AT_MOST = {"stages": 4096, "pipelines": 4096, "microbatches": 65536, "threads": 1024}


def check_job(job: Job) -> list[Problem]:
    """Returns every rule between values that `job` breaks; types have been checked by whoever built it."""
    problems = [
        Problem(name, f"a whole number >= {least}", repr(getattr(job, name)))
        for name, least in _AT_LEAST.items()
        if getattr(job, name) < least
    ]
    problems += [
        Problem(name, f"a whole number <= {most}", repr(getattr(job, name)))
        for name, most in _AT_MOST.items()
        if getattr(job, name) > most
    ]
    if not 0 < job.lr <= MOST_FLOAT:
        problems.append(Problem("lr", "a finite float32 number > 0", repr(job.lr)))
    if not 0 <= job.clip_norm <= MOST_FLOAT:
        problems.append(Problem("clip_norm", "a finite float32 number >= 0", repr(job.clip_norm)))
    num_actions = job.stages * job.pipelines * job.microbatches
    if num_actions > _MAX_FORWARDS and not _AT_MOST.keys() & {each.field for each in problems}:
        problems.append(
            Problem("microbatches", f"stages x pipelines x microbatches <= {_MAX_FORWARDS}", str(num_actions))
        )
    problems += check_schedule(job.schedule, job.stages, job.stages_per_worker, job.microbatches, job.placement)
    problems += _unknown("lr_schedule", job.lr_schedule, LR_SCHEDULES)
    problems += _check_partition(job)
    problems += [*_check_shards(job), *_check_streams(job), *_check_redundancy(job)]
    if job.name and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,39}", job.name):
        problems.append(Problem("name", "up to 40 of a-z 0-9 . _ - (first a letter or digit)", repr(job.name)))
    return problems


def _unknown(name: str, value: str, known: Collection[str]) -> list[Problem]:
    if value in known:
        return []
    return [Problem(name, f"one of {', '.join(sorted(known))}", repr(value), nearest(value, known))]


def _check_shards(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.fsdp and job.pipelines == 1:
        expected, hint = "0 with one pipeline", "shards lie over the pipelines: give --pipelines 2 or more"
    elif job.fsdp and job.redundancy != "none":
        expected = "0 with redundancy"
        hint = "nobody can take over from shards, and a shadow holds whole stages: give --redundancy none"
    elif job.fsdp > job.stages_per_worker >= 1:
        expected = f"a whole number <= {job.stages_per_worker}"
        hint = f"a worker has {job.stages_per_worker} of the stages (stages_per_worker)"
    return [Problem("fsdp", expected, repr(job.fsdp), hint)] if expected else []


def _check_streams(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.log_every and job.redundancy not in ("lazy", "eager"):
        expected = "0 without shadows"
        hint = f"with redundancy {job.redundancy} there is no shadow to send to: give --redundancy lazy or eager"
    elif job.log_every >= job.microbatches >= 1:
        expected = f"a whole number <= {job.microbatches - 1}"
        hint = f"of {job.microbatches} microbatches; behind the last follows the log of the whole step"
    return [Problem("log_every", expected, repr(job.log_every), hint)] if expected else []


def _check_redundancy(job: Job) -> list[Problem]:
    """A shadow is another worker than the owner; the one worker of a job of one slot has nobody, and trains alone."""
    if job.redundancy == "reroute" and job.pipelines == 1:
        hint = "the next pipeline takes over: give --pipelines 2 or more"
        return [Problem("redundancy", "none, lazy or eager with one pipeline", "'reroute'", hint)]
    num_workers = job.stages // max(1, job.stages_per_worker) * job.pipelines
    most = max(1, num_workers - 1)
    if job.redundancy in ("lazy", "eager") and job.redundancy_level > most:
        expected = f"a whole number <= {most}"
        hint = f"{num_workers} workers, and a shadow is another one than the owner"
        return [Problem("redundancy_level", expected, repr(job.redundancy_level), hint)]
    return []


def _check_partition(job: Job) -> list[Problem]:
    form = job.partition
    if form in ("uniform", "parameters", "profile"):
        return []
    if form.startswith("type:"):
        try:
            re.compile(form[len("type:") :])
        except re.error as error:
            return [Problem("partition", "a regular expression after type:", repr(form), str(error))]
        return []
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", form) or (job.stages == 1 and form == ""):
        fits = written(form, job.stages) or job.stages < 1
        return [] if fits else [Problem("partition", f"{job.stages - 1} rising layer numbers from 1", repr(form))]
    return [Problem("partition", PARTITION_FORMS, repr(form), nearest(form, ("uniform", "parameters", "profile")))]
