"""A resolved job: its values, and the origin of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from engine.core.errors import MASK, Problem
from engine.core.job.job import ARGS_FIELDS, Job

if TYPE_CHECKING:
    from engine.core.checkpoint_rules import Resumption


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job and, per field (``stages``, ``model_args.width``), the place that gave it, such as ``job.yaml:3:9``.

    `with_faults` is the command that repeats the faults too, if the job is that of a run with faults. `foreign` has the
    values that a run takes with ``--trust-code`` only. A job that is resumed begins after the checkpoint `origin`. A
    run that is repeated was given weights with the hash `init`. `why_blocks` says why bamboo has chosen the blocks of a
    stage, if it has.
    """

    job: Job
    origins: dict[str, str]
    with_faults: str = ""
    foreign: tuple[Problem, ...] = ()
    origin: Resumption | None = None
    init: str = ""
    why_blocks: str = ""

    @property
    def blocks_line(self) -> str:
        """The line about the blocks that bamboo has chosen; empty if it has not."""
        return f"blocks: {self.job.blocks} per stage, because {self.why_blocks}" if self.why_blocks else ""


def secret_arguments(job: Job) -> list[str]:
    """Returns the names of the arguments whose values are secret, such as ``data_args.token``."""
    hidden = job.masked
    return [f"{name}.{key}" for name in ARGS_FIELDS for key, value in getattr(hidden, name).items() if value == MASK]


def explain(resolved: ResolvedJob) -> list[tuple[str, object, str]]:
    """Returns (field, value, origin) of each field and argument, secrets masked, and of NCCL's variables."""
    job = resolved.job.masked
    rows: list[tuple[str, object, str]] = []
    for field in fields(Job):
        value = getattr(job, field.name)
        values = {f"{field.name}.{key}": value[key] for key in value} if isinstance(value, dict) and value else None
        for name, part in (values or {field.name: value}).items():
            rows.append((name, part, resolved.origins[name]))
    if resolved.job.backend == "nccl":
        from engine.files.accelerators import nccl_settings

        settings = nccl_settings("<number>", shares=resolved.job.share_gpu, environment=os.environ)
        for name, value in settings.items():
            is_set = os.environ.get(name) == value
            rows.append((name, value, "environment" if is_set else "each worker, before NCCL is loaded"))
    return rows
