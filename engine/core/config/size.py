"""Sizes as people write them (``200MB``; in the program they are whole bytes), and the sizes that a job can have."""

from __future__ import annotations

import re

from engine.core.config.job import Job
from engine.core.duration import whole_units
from engine.core.errors import Problem

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
    "redundancy_level": 1,
    "steps": 1,
    "epochs": 0,
    "load_ahead": 0,
    "threads": 1,
    "seed": 0,
    "warmup_steps": 0,
    "log_every": 0,
    "fsdp": 0,
    "workers": 0,
    "restarts": 0,
    "standby": 0,
    "activation_checkpoint": 0,
    "audit": 0,
    "validate_every": 0,
    "validation_microbatches": 0,
    "keep": 1,
}
# A typo should not try to start thousands of workers, nor a file from elsewhere have their program made.
_MAX_FORWARDS = 1_000_000
_MOST_WORKERS = 1024
AT_MOST = {
    "load_ahead": 256,
    "stages": 4096,
    "blocks": 4096,
    "standby": 1024,
    "pipelines": 1024,
    "microbatches": 65536,
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
    num_actions = job.slots * job.pipelines * job.microbatches
    if num_actions > _MAX_FORWARDS and not AT_MOST.keys() & {each.field for each in problems}:
        expected = f"stages {'x blocks ' * (job.blocks > 1)}x pipelines x microbatches <= {_MAX_FORWARDS}"
        problems.append(Problem("microbatches", expected, str(num_actions)))
    if not problems and (num_workers := job.most_workers) > _MOST_WORKERS:
        expected = f"stages x pipelines / stages_per_worker <= {_MOST_WORKERS}, the workers of a job"
        problems.append(Problem("stages", expected, str(num_workers)))
    return problems
