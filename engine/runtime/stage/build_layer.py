"""Builds one layer of a model, with the same bits on every worker."""

from __future__ import annotations

import torch
from torch import nn

from engine.core.config.job import Job
from engine.core.random_key import weights_key
from engine.models.layers import Model
from engine.models.memory_rules import refuse_what_cannot_be_kept
from engine.models.user_code import running
from engine.runtime.device.device import HOST, Device
from engine.runtime.stage.buffers import modules_of, snapshot_of


def build_layer(job: Job, model: Model, index: int, device: Device = HOST) -> nn.Module:
    """Returns layer `index` on a device; its weights are drawn on the host, so that they do not depend on the device.

    A later use of a tied parameter copies the first use.
    """
    layer = _built(job, model, index)
    if not device.is_host:
        modules = modules_of([layer])
        moved = snapshot_of(modules).put(device).buffers()
        for parameter in layer.parameters():
            parameter.data = device.put(parameter.data)  # a parameter with two names stays one
        for module, own in zip(modules, moved, strict=True):
            module._buffers.update(own)
    return layer


def _built(job: Job, model: Model, index: int) -> nn.Module:
    torch.default_generator.manual_seed(weights_key(job.seed, index))
    with running(f"the constructor of layer {index} ({model.layers[index].name})"):
        layer = model.layers[index].build()
    refuse_what_cannot_be_kept({index: layer})
    for module in layer.modules():
        # The input of a layer is a leaf for autograd and must not be overwritten; out of place gives the same bits.
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    for tie in model.ties:
        (first, first_name), *later = tie.uses
        for use, name in later:
            if use == index:
                source = _built(job, model, first)
                with torch.no_grad():
                    layer.get_parameter(name).copy_(source.get_parameter(first_name))
    return layer
