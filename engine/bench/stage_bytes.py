"""Weighs the stages of a job: prints, for each, the bytes of its weights, of a microbatch's residual and of its output.

A residual is all that the graph of a forward keeps alive: what autograd has saved, the outputs of the layers and the
loss; not the weights, nor the input, which is the output of the stage before. A process of its own, because torch has
no place in the launcher.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.core.config.job import Job
from engine.core.config.partition import partition
from engine.models.catalogue import build_model, open_data
from engine.models.layers import Tensors
from engine.runtime.stage.residual import Residual
from engine.runtime.stage.segment import Segment
from engine.runtime.stage.stage import Stage


def main() -> None:
    """Prints one JSON list of [weights, residual, output] by stage; the job is the only argument, as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    data = open_data(job)
    model = build_model(job, data.facts)
    starts = partition(job.partition, job.stages, [layer.kind for layer in model.layers], ())
    batch = data.microbatch(0, 0, 0, job.microbatch_size)
    found, inputs = [], batch.inputs
    for first, last in zip(starts, (*starts[1:], len(model.layers)), strict=True):
        stage = Stage(job, model, 0, first, last)
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_keep, saved), lambda kept: kept):
            outputs = stage.forward(0, 0, inputs, batch.targets if stage.is_last else None)
        weights = [parameter for layer in stage.layers.values() for parameter in layer.parameters()]
        elsewhere = [*weights, *stage.buffers(), *inputs]
        residual = _num_bytes([*saved, *_tensors(stage.residuals[0])], elsewhere)
        found.append([_num_bytes(weights), residual, _num_bytes(outputs)])
        inputs = tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)
    print(json.dumps(found))


def _keep(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


def _tensors(residual: Residual) -> Tensors:
    segments = [segment for group in residual.groups if isinstance(group, list) for segment in group]
    segments += [residual.loss] if isinstance(residual.loss, Segment) else []
    return tuple(tensor for segment in segments for tensor in (*segment.inputs, *segment.outputs))


def _num_bytes(tensors: Sequence[Tensor], elsewhere: Sequence[Tensor] = ()) -> int:
    """Returns the bytes of the memory behind some tensors, each once, without what others hold."""
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for tensor in elsewhere:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(held.values())


if __name__ == "__main__":
    main()
