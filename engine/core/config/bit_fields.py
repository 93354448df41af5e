"""The fields of a job that decide the bits of training, and those that do not.

Rule: a field decides bits unless it stands in `NEUTRAL`, and so does a new field. The cut of the model, the worker that
computes a slot, and the ways in which state is kept or moved change no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from engine.core.config.job import CODE_FIELDS, Job, code_in
from engine.core.config.update_rules import depends_on_steps


class _OfRun:
    """Stands for the value that the run has."""


_AS_RUN: Final = _OfRun()
# The neutral fields, each with its cheapest value: that of the fault-free twin.
NEUTRAL: Mapping[str, Any] = {
    "stages": _AS_RUN,
    "blocks": _AS_RUN,
    "elastic": False,
    "standby": 0,
    "stages_per_worker": _AS_RUN,
    "workers": _AS_RUN,
    "placement": _AS_RUN,
    "schedule": _AS_RUN,
    "partition": _AS_RUN,
    "activation_checkpoint": _AS_RUN,
    "audit": _AS_RUN,
    "share_gpu": _AS_RUN,
    "retain": "device",
    "epochs": 0,  # the steps decide
    "load_ahead": _AS_RUN,
    "validation_microbatches": _AS_RUN,
    "metrics": "",
    "redundancy": "none",
    "redundancy_level": 1,
    "log_every": 0,
    "fsdp": 0,
    "check_pure": False,  # the run itself was checked
    "validate_every": 0,
    "events_max": Job().events_max,
    "hang_after": Job().hang_after,
    "silent_after": Job().silent_after,
    "checkpoint_every": "0",  # the twin keeps nothing
    "keep": Job().keep,
    "checkpoints": "",
    "restarts": Job().restarts,
    "name": "",
    "results": "",
    "logger": "",
}
# The fields that a checkpoint's tensors fit: with others it cannot be loaded. Each pipeline has buffers of its own.
OF_TENSORS = frozenset({"model", "model_args", "pipelines", "split"})
# The values that older versions had for fields that they did not know.
# On a GPU they were deterministic, and on the CPU that changes no bits but those that were others each time.
_BEFORE: Mapping[str, object] = {"device": "cpu", "deterministic": True}
# The facts of a host that select the compute kernels, and so the bits.
BIT_FACTS = ("python", "torch", "machine", "cpu", "isa", "kernel_variables")
OF_GPUS = ("gpus", "torch_cuda")  # of a job that computes on GPUs


class BitDifference(NamedTuple):
    """A field or a fact that decides bits, with its value before and now."""

    name: str
    before: object
    now: object


def own_code(job: Job) -> list[str]:
    """Returns each ``package.module:attribute`` of the user's that decides bits."""
    return [each for name in CODE_FIELDS if name not in NEUTRAL for each in code_in(getattr(job, name))]


def cheapest(job: Job) -> Job:
    """Returns the job with the same bits whose neutral fields have their cheapest values."""
    return replace(job, **{name: value for name, value in NEUTRAL.items() if not isinstance(value, _OfRun)})


def bit_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the facts of a host that decide bits."""
    return {name: facts.get(name) for name in (*BIT_FACTS, *OF_GPUS)}


def bit_differences(
    before: Mapping[str, object], facts: Mapping[str, object], job: Job, now: Mapping[str, object]
) -> list[BitDifference]:
    """Returns what decides bits and differs between a kept job on a host with `facts`, and `job` on this host.

    The number of steps decides bits only where the learning rate depends on it.
    """
    ours = asdict(job.masked)
    names = [name for name in ours if name not in NEUTRAL and (name != "steps" or depends_on_steps(job))]
    of_job = [BitDifference(name, before.get(name, _BEFORE.get(name)), ours[name]) for name in names]
    known = (*BIT_FACTS, *(OF_GPUS if job.device == "cuda" else ()))
    of_host = [BitDifference(name, facts.get(name), now.get(name)) for name in known]
    return [each for each in (*of_job, *of_host) if _plain(each.before) != _plain(each.now)]


def _plain(value: object) -> object:
    """Returns a value as JSON would give it back."""
    return list(value) if isinstance(value, tuple) else value
