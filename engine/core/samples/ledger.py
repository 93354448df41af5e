"""The ledger of a finite data set: which samples a microbatch has, by arithmetic.

The samples of a run stand in one row, pass after pass, each pass in an order of its own. Microbatches take from this
row by step, then by pipeline, then by number, and leave nothing out: every sample is trained once in every pass. A
microbatch at the end of a pass goes on in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.random_key import random_key
from engine.core.samples.permutation import permuted


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
