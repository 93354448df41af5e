"""The samples of a microbatch by arithmetic: of a finite data set in its order, and of a validation pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from engine.core.errors import Problem, UserError, ensure
from engine.core.job.job import Job
from engine.core.random_key import random_key

# A permutation of 0 .. size - 1 by key, one number at a time: any worker finds any sample without list or state.
#
# A balanced Feistel network permutes the numbers of an even count of bits. A result beyond `size` is permuted again
# until it is below ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, section 3):
# fewer than four times on average, because the network has fewer than four times `size` numbers.

_ROUNDS = 6  # of four rounds, a small network shows its structure


def permuted(position: int, size: int, key: int) -> int:
    """Returns the number at a position of the permutation of 0 .. size - 1 that `key` names."""
    ensure(0 <= position < size, f"position {position} of a permutation of {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    number = _network(position, half, key)
    while number >= size:
        number = _network(number, half, key)
    return number


def _network(number: int, half: int, key: int) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (random_key(key, turn, right) & mask)
    return left << half | right


# The ledger of a finite data set: which samples a microbatch has, by arithmetic.
#
# The samples of a run form one row, pass after pass, each pass in its own order. Microbatches take from this row by
# step, then by pipeline, then by number, and skip nothing: every sample is trained once in every pass. A microbatch at
# the end of a pass continues in the next one.


class Share(NamedTuple):
    """`length` samples of one pass over the data set, beginning with the `first` in the order of that pass."""

    data_epoch: int
    first: int
    length: int


def samples_per_step(job: Job) -> int:
    """Returns the samples of one optimizer step, over all pipelines."""
    return job.pipelines * job.microbatches * job.microbatch_size


def passes(job: Job, num_steps: int, num_samples: int) -> float:
    """Returns the passes over the training set that a number of steps make."""
    return num_steps * samples_per_step(job) / num_samples


def epoch_at(job: Job, num_steps: int, num_samples: int) -> int:
    """Returns the epoch of the job, from 1 on, in which training is after a number of steps; 0 if it has none."""
    return min(job.epochs, num_steps * samples_per_step(job) // num_samples + 1) if num_samples else 0


def first_position(job: Job, step: int, pipeline: int, microbatch: int) -> int:
    """Returns the place of the first sample of a microbatch in the row of all samples of a run."""
    return ((step * job.pipelines + pipeline) * job.microbatches + microbatch) * job.microbatch_size


def shares(position: int, count: int, num_samples: int) -> Iterator[Share]:
    """Yields the shares of `count` samples from a place on, in order; one for each pass that they touch."""
    while count:
        data_epoch, first = divmod(position, num_samples)
        here = min(count, num_samples - first)
        yield Share(data_epoch, first, here)
        position, count = position + here, count - here


def sample_at(data_epoch: int, place: int, num_samples: int, seed: int) -> int:
    """Returns the number of a sample in the data set, from its place in the order of a pass."""
    return permuted(place, num_samples, random_key(seed, "samples", data_epoch))


# The microbatches of a validation pass: set after set, each in its order, a finite set at most once.
#
# The last microbatch of a finite set may have fewer samples than rows: the other rows are filled with samples from its
# beginning, so that shapes stay, and do not count. A loss that is known for whole microbatches only leaves that
# microbatch out.

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
    """Returns a note for each set whose last samples are left out; raises UserError if nothing would be left."""
    parts = [part for part in parts_of(job, sets) if part.rows < job.microbatch_size]
    why = "the loss that the forward returns is known for whole microbatches only"
    if empty := [part for part in parts if part.number == 0]:
        hint = f"{why}: more samples, a smaller microbatch_size, a model that returns its output, or --validate-every 0"
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
