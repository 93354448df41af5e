"""Turns a user's schedule, a CSV file or a generator named ``package.module:generator``, into CSV text.

Rules: a generator is trusted code. It is called with P workers, V stages per worker and M microbatches, and returns one
list per worker, of actions or of texts such as 2F0. File and generator are read once, when the job is resolved; every
process gets the text in the job and so runs the same lists. The check of the job decides whether the lists can run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.config.job import FACTORY, Job
from engine.core.errors import Problem, nearest
from engine.core.schedules.csv_text import is_text
from engine.files.atomic_write import open_to_read

_MOST_BYTES = 16 << 20


def own_schedule(job: Job) -> str | Problem:
    """Returns the schedule of `job` as a built-in name or as CSV text, or the problem with its file or generator."""
    name = job.schedule
    if is_text(name) or not (name.endswith(".csv") or FACTORY.fullmatch(name)):
        return name
    try:
        text = _read(name) if name.endswith(".csv") else _generated(name, job)
    except UnicodeDecodeError:
        return Problem("schedule", "a CSV file with compute lists", repr(name), "it is not UTF-8 text")
    except OSError as error:
        return Problem("schedule", "a file or a generator that can be read", repr(name), error.strerror or str(error))
    except Exception as error:  # a user's generator may raise anything
        reason = f"{type(error).__name__}: {error}"
        return Problem("schedule", "a generator that makes compute lists", repr(name), reason)
    return text if is_text(text) else text + "\n"


def _read(name: str) -> str:
    """Returns the text of a file; raises OSError for a pipe or a device, of which a read may never end."""
    with open(open_to_read(Path(name).resolve()), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"it is longer than {_MOST_BYTES} bytes")
    return data.decode()


def _generated(name: str, job: Job) -> str:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise AttributeError(f"{attribute} in {module_name} {nearest(attribute, dir(module))}")
    lists: Iterable[Iterable[object]] = getattr(module, attribute)(
        job.stages // max(1, job.stages_per_worker), job.stages_per_worker, job.microbatches
    )
    return "".join(",".join(str(action) for action in line) + "\n" for line in lists)
