"""The defaults of a job that its model has: a model of a real size is trained in another dtype, on longer samples.

Rule: a value that is given wins. So the record of a run, which has every field, repeats its job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from engine.core.config.job import Job
from engine.core.config.offered import Offered


def with_model_defaults(job: Job, given: Collection[tuple[str, ...]], offered: Offered) -> tuple[Job, dict[str, str]]:
    """Returns the job with the defaults of its model, and the origin of each; `given` has the paths of given values."""
    origins = {}
    for name, value in offered.defaults(job).items():
        path = tuple(name.split(".", 1))
        if path in given:
            continue
        field = path[0]
        changed: dict[str, Any] = {field: value if len(path) == 1 else {**getattr(job, field), path[1]: value}}
        job = replace(job, **changed)
        origins[name] = f"default of {job.model}"
    return job, origins
