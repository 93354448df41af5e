"""Weights of layers for the partition: their number of parameters, or their measured time on this machine."""

from __future__ import annotations

import time
from statistics import median

from engine.core.config.job import Job
from engine.models.data import Data
from engine.models.layers import Model, Tensors
from engine.runtime.device.device import Device
from engine.runtime.stage.build_layer import build_layer
from engine.runtime.stage.stage import Stage

_ROUNDS = 3


def weigh_layers(job: Job, model: Model, data: Data, device: Device) -> list[int]:
    """Returns the weight of each layer: its parameters, or for ``profile`` the ns of its forward and backward."""
    if job.partition == "parameters":
        layers = (build_layer(job, model, index) for index in range(len(model.layers)))
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    batch = data.microbatch(0, 0, 0, job.microbatch_size)
    inputs, weights = device.put_all(batch.inputs), []
    for index in range(len(model.layers)):
        stage = Stage(job, model, 0, index, index + 1, device)
        targets = device.put_all(batch.targets) if stage.is_last else None
        times = []
        # The first round warms caches and does not count.
        for microbatch in range(1 + _ROUNDS):
            start_ns = time.perf_counter_ns()
            outputs = stage.forward(0, microbatch, inputs, targets)
            stage.backward(0, microbatch, () if stage.is_last else _ones(outputs))
            device.wait()
            times.append(time.perf_counter_ns() - start_ns)
        weights.append(max(1, round(median(times[1:]))))
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
    return weights


def _ones(outputs: Tensors) -> Tensors:
    return tuple(output.new_ones(output.shape) for output in outputs if output.requires_grad)
