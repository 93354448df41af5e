"""The trial of a worker's stages at the start; `engine/core/protocol/coordinator_state.py` has the rules of borders.

A stage is tried behind the first border before the true one is known, unless the kinds of the layers between tell that
it is another one. A trial behind a border that may be wrong may raise an exception, and counts for nothing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from engine.core.job.job import Job
from engine.core.messages import BorderMessage, BordersMessage, BorderSpecs
from engine.core.ownership import Ownership
from engine.models.data import Data
from engine.models.data_sources import evaluation, evaluation_sets, largest
from engine.models.layers import Model, Tensors
from engine.models.slices import slice_of
from engine.runtime.device.device import Device, WithoutForm
from engine.runtime.process.control import Control
from engine.runtime.stage.replicas import Replicas
from engine.runtime.transport.transport import Border, TensorSpec
from engine.runtime.worker.microbatches import on_device


def before_trial(job: Job, model: Model) -> contextlib.AbstractContextManager[object]:
    """Returns the block in which layers run before their trial, which names the operations without a fixed form."""
    is_tried = job.deterministic and job.check_pure and model.check_pure
    return WithoutForm() if is_tried else contextlib.nullcontext()


def learn_borders(
    control: Control, worker: int, ownership: Ownership, replicas: Replicas, starts: Sequence[int], data: Data
) -> tuple[Border, ...]:
    """Tries its stages of pipeline 0, and tells the agent. Every worker learns every border: it may own any later."""
    stages, job, model = ownership.grid.stages, replicas.job, replicas.model
    own = [index for index in range(stages) if ownership.owner(0, index) == worker]

    @cache
    def loaded() -> tuple[Tensors, Tensors, Sequence[Tensors]]:
        with before_trial(job, model):
            return _loaded(job, data, replicas.device)

    def tell(index: int, *before: BorderSpecs) -> None:
        stage = replicas.stages[0, index]
        inputs, targets, validation = loaded() if stage.is_last or not before else ((), (), ())
        if before:
            inputs = tuple(spec.zeros(stage.device) for spec in _border_of(before[0]))
        is_asked = stage.is_last and not job.predict_args
        with before_trial(job, model):
            border = stage.probe(inputs, targets if is_asked else None, validation if is_asked else ())
        control.send(BorderMessage(index, before, tuple(spec.to_json() for spec in border)))

    if 0 in own:
        tell(0)
    behind: dict[int, BorderSpecs] = {}  # the border that each stage was last tried behind
    while len(borders := control.take(BordersMessage).borders) < stages:
        for index in own:
            if index < len(borders) or behind.get(index) == borders[-1]:
                continue
            if index == len(borders):
                tell(index, borders[-1])
                behind[index] = borders[-1]
            elif len(borders) == 1 and are_alike(model, starts[1 : index + 1]):
                if index == stages - 1:
                    loaded()  # a mistake in the data is one behind any border
                with contextlib.suppress(Exception):
                    tell(index, borders[-1])
                    behind[index] = borders[-1]
    return tuple(_border_of(each, is_open=job.variable_shapes) for each in borders)


def are_alike(model: Model, starts: Sequence[int]) -> bool:
    """Returns whether the stages between these first layers have layers of the same kinds."""
    kinds = [{layer.kind for layer in model.layers[first:last]} for first, last in pairwise(starts)]
    return all(each == kinds[0] for each in kinds)


def _border_of(specs: BorderSpecs, *, is_open: bool = False) -> Border:
    return tuple(TensorSpec.from_json(spec, is_open=is_open) for spec in specs)


def _loaded(job: Job, data: Data, device: Device) -> tuple[Tensors, Tensors, Sequence[Tensors]]:
    """Returns inputs for the first stage, and the targets of a microbatch and of each evaluation set for the last."""
    size, slices = job.microbatch_size, job.slices
    batch = on_device(slice_of(data.microbatch(*largest(job, data), size), 0, slices), device)
    # With variable shapes its targets are not those of these outputs.
    sets = evaluation_sets(data) if job.validate_every and not job.variable_shapes else ()
    validation = [device.put_all(slice_of(evaluation(data, each, 0, size), 0, slices).targets) for each in sets]
    return batch.inputs, batch.targets, validation
