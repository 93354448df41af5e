"""Turns what a job says in epochs into steps: those of the job, and those between validations or checkpoints.

Rules: the samples are counted once, and only if a field is in epochs. A number of steps is rounded up, so that an epoch
is whole. A command that does not count them gets a job with 0 steps, which stand for an unknown number, and its
`checkpoint_every` stays in epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.core.config.job import ARGS_FIELDS, Job
from engine.core.config.offered import Offered
from engine.core.duration import MILLI, parse_epochs
from engine.core.errors import Problem, UserError, required
from engine.files.jobs.job_layers import Layer, last_with
from engine.files.jobs.job_value import FIELD_TYPES, IN_EPOCHS, Given


def spans_of(given: Iterable[Given]) -> dict[str, str]:
    """Returns the text of each field that is given in epochs, such as ``2epochs``, by its name."""
    return {each.name: each.value for each in given if each.name in IN_EPOCHS and parse_epochs(str(each.value))}


def in_steps(job: Job, layers: Sequence[Layer], spans: Mapping[str, str], offered: Offered) -> Job:
    """Returns the job with steps in the place of epochs; `steps` of a later layer counts instead of `epochs`.

    The record of a run has both, and its steps stay. Raises UserError if another layer has both, and for epochs of data
    without an end.
    """
    by_epochs = _goes_by_epochs(job, layers)
    if by_epochs is None:
        job = replace(job, epochs=0)
    if not by_epochs and not spans:
        return job
    samples = None if offered.samples_of is None else offered.samples_of(job)
    if samples is None:
        every = spans.get("checkpoint_every", job.checkpoint_every)
        return replace(job, checkpoint_every=every, steps=0 if by_epochs else job.steps)
    if not samples:
        field, hint = next(iter(spans), "epochs"), "this source has no end: give a number of steps"
        raise UserError([Problem("epochs" if by_epochs else field, "a finite training set", repr(job.data), hint)])
    counted: dict[str, Any] = {
        name: FIELD_TYPES[name](_steps(job, required(parse_epochs(text), "a span in epochs"), samples))
        for name, text in spans.items()
    }
    if by_epochs:
        counted["steps"] = _steps(job, job.epochs * MILLI, samples)
    return replace(job, **counted)


def _steps(job: Job, thousandths: int, samples: int) -> int:
    """Returns the steps that train so many thousandths of an epoch, rounded up."""
    return -(-thousandths * samples // (MILLI * job.pipelines * job.microbatches * job.microbatch_size))


def _goes_by_epochs(job: Job, layers: Sequence[Layer]) -> bool | None:
    """Returns whether epochs decide the steps, False for a record with both, None if steps count instead."""
    at = {name: last_with(name, layers) for name in ("epochs", "steps")}
    if not job.epochs or at["steps"] > at["epochs"]:
        return None
    layer = layers[at["epochs"]]
    if at["steps"] < at["epochs"]:
        return True
    if not FIELD_TYPES.keys() - ARGS_FIELDS <= {each.name for each in layer.given}:  # no record
        (given,) = [each for each in layer.given if each.name == "epochs"]
        raise UserError([given.problem("no steps beside it", str(job.steps), "give epochs or steps, not both")])
    return False
