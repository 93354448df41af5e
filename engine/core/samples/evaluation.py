"""The microbatches of a validation pass: set after set, each in its order, a finite set at most once.

The last microbatch of a finite set may have fewer samples of it than rows: the others are filled with samples from its
begin, so that shapes stay, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.core.config.job import Job

EvaluationSets = Mapping[str, int]  # the samples of each set by its name; 0 for a set without limit
_OF_ENDLESS = Job().validation_microbatches  # of a set that has no end, where the whole set was asked for


class EvaluationPart(NamedTuple):
    """A microbatch of a validation pass: `number` of a set, of which the first `rows` samples count."""

    name: str
    number: int
    rows: int


def parts_of(job: Job, sets: EvaluationSets) -> tuple[EvaluationPart, ...]:
    """Returns the microbatches of a validation pass, in order."""
    return tuple(part for name, samples in sets.items() for part in _of_set(job, name, samples))


def _of_set(job: Job, name: str, samples: int) -> Iterable[EvaluationPart]:
    size, most = job.microbatch_size, job.validation_microbatches
    if not samples:
        return [EvaluationPart(name, index, size) for index in range(most or _OF_ENDLESS)]
    whole = -(-samples // size)
    count = min(most or whole, whole)
    return [EvaluationPart(name, index, min(size, samples - index * size)) for index in range(count)]
