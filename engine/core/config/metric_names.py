"""The metrics of a job: their names, and the function that each stands for.

accuracy,f1=mine:f1_score        accuracy is built in, f1 is the function f1_score of the user's module mine
"""

from __future__ import annotations

from collections import Counter

from engine.core.config.job import FACTORY, Job
from engine.core.errors import Problem, nearest

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
