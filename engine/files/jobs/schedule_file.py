"""A schedule of the user's own: a CSV file, or a generator named ``package.module:generator``; both become CSV text.

Rules: the file is read, or the generator (trusted code) called with P workers, V stages per worker and M microbatches,
once, when the job is resolved: the text goes with the job, so every process runs the same lists. A generator returns
one list per worker, of actions or of texts such as 2F0. Whether the lists can run is for the check of the job to say.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.config.job import FACTORY, Job
from engine.core.errors import Problem, nearest
from engine.core.schedules.csv_text import is_text


def own_schedule(job: Job) -> str | Problem:
    """Returns the schedule of `job` as a name or as CSV text, or why it cannot be had."""
    name = job.schedule
    if is_text(name) or not (name.endswith(".csv") or FACTORY.fullmatch(name)):
        return name
    try:
        text = Path(name).read_text(encoding="utf-8") if name.endswith(".csv") else _generated(name, job)
    except UnicodeDecodeError:
        return Problem("schedule", "a CSV file with compute lists", repr(name), "it is no UTF-8 text")
    except OSError as error:
        return Problem("schedule", "a file or a generator that can be read", repr(name), error.strerror or str(error))
    except Exception as error:  # a user's generator may raise anything
        what = f"{type(error).__name__}: {error}"
        return Problem("schedule", "a generator that makes compute lists", repr(name), what)
    return text if is_text(text) else text + "\n"


def _generated(name: str, job: Job) -> str:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise AttributeError(f"{attribute} in {module_name} {nearest(attribute, dir(module))}")
    lists: Iterable[Iterable[object]] = getattr(module, attribute)(
        job.stages // max(1, job.stages_per_worker), job.stages_per_worker, job.microbatches
    )
    return "".join(",".join(str(action) for action in line) + "\n" for line in lists)
