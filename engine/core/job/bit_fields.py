"""The fields of a job that decide the bits of training, and those that do not.

Rule: a field decides bits unless it is in `NEUTRAL`, and so does a new field. The cut of the model, the worker that
computes a slot, and the ways in which state is kept or moved change no bit.

The math libraries choose their kernels by the processor, unless variables of the environment name an instruction set.
They read them when torch is loaded. A set is fixed if all three variables have its values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from engine.core.job.job import CODE_FIELDS, Job, code_in
from engine.core.job.update_rules import depends_on_steps, follows_validations
from engine.core.units import Scalar

# The neutral fields that a fault-free twin has as its run does, and those for which it has the cheapest value.
_AS_RUN = {
    *("stages", "blocks", "stages_per_worker", "workers", "placement", "schedule", "partition", "share_gpu"),
    *("activation_checkpoint", "audit", "load_ahead", "data_retries", "data_retry_for"),
    *("validation_microbatches", "early_stop"),
}
_CHEAPEST: Mapping[str, Any] = {
    "elastic": False,
    "adapt_schedule": 0,
    "standby": 0,
    "max_workers": 0,
    "retain": "device",
    "offload": "none",
    "offload_time": Job().offload_time,
    "residuals": "recompute",
    "epochs": 0,  # the steps decide
    "metrics": "",
    "predict_args": {},
    "redundancy": "none",
    "redundancy_level": 1,
    "log_every": 0,
    "fsdp": 0,
    "check_pure": False,  # the run itself was checked
    "validate_every": 0,
    "layer_norms": 0,
    "events_max": Job().events_max,
    "hang_after": Job().hang_after,
    "silent_after": Job().silent_after,
    "checkpoint_every": "0",  # the twin keeps nothing
    "keep": Job().keep,
    "best": "",
    "checkpoints": "",
    "restarts": Job().restarts,
    "name": "",
    "results": "",
    "logger": "",
    "log_format": "text",
}
NEUTRAL = frozenset(_AS_RUN | _CHEAPEST.keys())
_OF_FIGURES = frozenset({"validate_every", "validation_microbatches", "metrics"})  # they decide what a validation finds
# The fields that shape a checkpoint's tensors: it cannot be loaded with others. Each pipeline has its own buffers.
OF_TENSORS = frozenset({"model", "model_args", "pipelines", "split"})
# The fields that tell one job from another. A job with another learning rate is the same one, changed: it is neither
# resumed nor begun anew without a word.
_IDENTITY = ("model", "model_args", "data", "data_args", "seed", "name")
# The fields that matter to training alone, or to a run that keeps something.
_OF_TRAINING = (
    "epochs",
    "lr_schedule",
    "lr_args",
    "param_groups",
    "metrics",
    "best",
    "early_stop",
    "checkpoints",
    "logger",
)
# What older versions did where they lacked a field, if not the default of today: on a GPU they were deterministic.
_BEFORE: Mapping[str, object] = {"device": "cpu", "deterministic": True}
# The facts of a host that select the compute kernels, and so the bits.
BIT_FACTS = ("python", "torch", "machine", "cpu", "isa", "kernel_variables")
OF_GPUS = ("gpus", "torch_cuda")  # of a job that computes on GPUs


class InstructionSet(NamedTuple):
    """A set: the variables that fix it, and the flags of /proc/cpuinfo that a processor needs for it."""

    variables: Mapping[str, str]
    needs: tuple[str, ...]


def _named(aten: str, mkl: str, onednn: str, *needs: str) -> InstructionSet:
    return InstructionSet({"ATEN_CPU_CAPABILITY": aten, "MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}, needs)


INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "portable": _named("default", "COMPATIBLE", "SSE41"),
    "avx2": _named("avx2", "AVX2", "AVX2", "avx2", "fma"),
    "avx512": _named("avx512", "AVX512", "AVX512_CORE", "avx2", "fma", "avx512f"),
}


def fixed_set(kernel_variables: object) -> str:
    """Returns the set that some ``NAME=VALUE`` fix; empty if they fix none."""
    settings = set(kernel_variables) if isinstance(kernel_variables, Iterable) else set()
    for name, instructions in INSTRUCTION_SETS.items():
        if {f"{variable}={value}" for variable, value in instructions.variables.items()} <= settings:
            return name
    return ""


class BitDifference(NamedTuple):
    """A field or a fact that decides bits, with its value before and now."""

    name: str
    before: object
    now: object


def own_code(job: Job) -> list[str]:
    """Returns each ``package.module:attribute`` of the user's that decides bits."""
    neutral = neutral_of(asdict(job))
    return [each for name in CODE_FIELDS if name not in neutral for each in code_in(getattr(job, name))]


def neutral_of(job: Mapping[str, Any]) -> frozenset[str]:
    """Returns the fields that decide no bits of a job, by its fields: validations do, if its rate follows them."""
    return NEUTRAL - _OF_FIGURES if follows_validations(job) else NEUTRAL


def prediction_of(job: Job, step: int, args: Mapping[str, Scalar]) -> Job:
    """Returns the job that predicts with the weights after a step of `job`; `args` are its `predict_args`.

    It begins after that step, trains nothing and keeps nothing.
    """
    usual = {name: getattr(Job(), name) for name in _OF_TRAINING}
    nothing: dict[str, Any] = {
        "warmup_steps": 0,
        "audit": 0,
        "validate_every": 0,
        "layer_norms": 0,
        "checkpoint_every": "0",
    }
    return replace(job, **usual, **nothing, check_pure=False, elastic=False, steps=step + 2, predict_args=dict(args))


def twin_of(job: Job) -> Job:
    """Returns the job of the twin: fields that do not decide bits have their cheapest values.

    Where validations decide a rate, or end the run, the twin validates as the run does.
    """
    is_led = bool(job.early_stop) or follows_validations(asdict(job))
    return replace(job, **{name: each for name, each in _CHEAPEST.items() if not (is_led and name in _OF_FIGURES)})


def bit_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the facts of a host that decide bits; a fixed instruction set replaces the processor and its own set."""
    chosen = {name: facts.get(name) for name in (*BIT_FACTS, *OF_GPUS)}
    fixed = fixed_set(facts.get("kernel_variables"))
    return chosen | {"cpu": None, "isa": [fixed]} if fixed else chosen


def compared_facts(facts: Mapping[str, object], job: Job) -> dict[str, object]:
    """Returns those facts of a host that decide the bits of a job."""
    of_host = bit_facts(facts)
    return {name: of_host[name] for name in (*BIT_FACTS, *(OF_GPUS if job.device == "cuda" else ()))}


def different_facts(before: Mapping[str, object], now: Mapping[str, object]) -> list[BitDifference]:
    """Returns the facts that differ; values count as equal if JSON would make them so."""
    names = sorted(before.keys() | now.keys())
    pairs = [BitDifference(name, _plain(before.get(name)), _plain(now.get(name))) for name in names]
    return [each for each in pairs if each.before != each.now]


def bit_differences(
    before: Mapping[str, object], facts: Mapping[str, object], job: Job, now: Mapping[str, object]
) -> list[BitDifference]:
    """Returns what decides bits and differs between a kept job on a host with `facts`, and `job` here.

    The number of steps decides bits only where the learning rate depends on it.
    """
    ours = asdict(job.masked)
    neutral = neutral_of(ours) & neutral_of(before)
    names = [name for name in ours if name not in neutral and (name != "steps" or depends_on_steps(job))]
    of_job = [BitDifference(name, _kept(before, name), ours[name]) for name in names]
    different = [each for each in of_job if _plain(each.before) != _plain(each.now)]
    return different + different_facts(compared_facts(facts, job), compared_facts(now, job))


def job_fingerprint(job: Mapping[str, object]) -> str:
    """Returns 16 hex digits that tell the job of a run from others; empty for an unreadable record.

    `--resume auto` resumes no run with other ones, and `--resume latest` replaces none by it.
    """
    identity = {name: job.get(name, getattr(Job(), name)) for name in _IDENTITY}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16] if job else ""


def fingerprint_of(job: Job) -> str:
    """Returns the fingerprint of a job, which is that of its record."""
    return job_fingerprint(asdict(job.masked))


def identity_difference(before: Mapping[str, object], job: Job) -> BitDifference | None:
    """Returns the first field that tells a kept job from another one; None if they are one job."""
    now = asdict(job.masked)
    pairs = (
        BitDifference(name, *(each.get(name, getattr(Job(), name)) for each in (before, now))) for name in _IDENTITY
    )
    return next((each for each in pairs if each.before != each.now), None)


def is_same_job(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Returns whether two kept jobs are one job, and decide the same bits."""
    neutral = neutral_of(one) & neutral_of(other)
    names = [name for name in asdict(Job()) if name not in neutral]
    values = [[_kept(each, name) for name in names] for each in (one, other)]
    fingerprints = [job_fingerprint(each) for each in (one, other)]
    return bool(fingerprints[0]) and fingerprints[0] == fingerprints[1] and values[0] == values[1]


def _kept(job: Mapping[str, object], name: str) -> object:
    """Returns the value of a field in a kept job, which may be older than the field."""
    return job[name] if name in job else _BEFORE.get(name, getattr(Job(), name))


def _plain(value: object) -> object:
    """Returns a value as JSON would give it back."""
    return list(value) if isinstance(value, tuple) else value
