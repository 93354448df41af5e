"""The microbatches of a validation pass: set after set, each in its order, a finite set at most once.

The last microbatch of a finite set may have fewer samples of it than rows: the others are filled with samples from its
begin, so that shapes stay, and do not count. A loss that is known for whole microbatches only leaves that one out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError

EvaluationSets = Mapping[str, int]  # the samples of each set by its name; 0 for a set without limit
_OF_ENDLESS = Job().validation_microbatches  # of a set that has no end, where the whole set was asked for


class EvaluationPart(NamedTuple):
    """A microbatch of a validation pass: `number` of a set, of which the first `rows` samples count."""

    name: str
    number: int
    rows: int


def parts_of(job: Job, sets: EvaluationSets, *, only_whole: bool = False) -> tuple[EvaluationPart, ...]:
    """Returns the microbatches of a validation pass, in order."""
    parts = (part for name, samples in sets.items() for part in _of_set(job, name, samples))
    return tuple(part for part in parts if part.rows == job.microbatch_size or not only_whole)


def left_out(job: Job, sets: EvaluationSets) -> tuple[str, ...]:
    """Returns a note for each set whose last samples a pass of whole microbatches leaves out.

    Raises UserError for a set of which nothing would be left.
    """
    parts = [part for part in parts_of(job, sets) if part.rows < job.microbatch_size]
    why = "the loss that the forward returns is known for whole microbatches only"
    if empty := [part for part in parts if part.number == 0]:
        hint = f"{why}: more samples, a smaller microbatch_size, or a model that returns its output"
        expected = f"at least {job.microbatch_size} samples (microbatch_size) in an evaluation set"
        raise UserError([Problem("data", expected, f"{each.rows} in {each.name}", hint) for each in empty])
    return tuple(
        f"the last {part.rows} of {sets[part.name]} samples of {part.name} are not measured: {why}" for part in parts
    )


def _of_set(job: Job, name: str, samples: int) -> Iterable[EvaluationPart]:
    size, most = job.microbatch_size, job.validation_microbatches
    if not samples:
        return [EvaluationPart(name, index, size) for index in range(most or _OF_ENDLESS)]
    whole = -(-samples // size)
    count = min(most or whole, whole)
    return [EvaluationPart(name, index, min(size, samples - index * size)) for index in range(count)]
