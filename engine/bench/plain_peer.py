"""The peer of one worker on a GPU: a training loop as one writes it with torch alone, of the same layers and data.

It prints the median time of a step. Its optimizer is torch's with torch's own defaults. It has the settings of the job,
because the question is what bamboo costs.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
from torch import nn

from engine.core.checks.determinism import settings_of
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.layers import as_tensors
from engine.models.model_loader import build_model
from engine.runtime.device.device import open_device, set_up
from engine.runtime.stage.stage import build_layer

_NUM_WARM_UP = 2


def step_seconds(job: Job) -> float:
    """Returns the median seconds of a step of a job of one worker."""
    set_up(settings_of(job))
    torch.set_num_threads(job.threads)
    device, data = open_device(job.device, 0, shares=True), open_data(job)
    model = build_model(job, data.facts)
    layers = nn.ModuleList(build_layer(job, model, index, device) for index in range(len(model.layers)))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=job.lr)
    dtype = getattr(torch, job.dtype)
    times = []
    for step in range(job.steps + _NUM_WARM_UP):
        start_s = time.perf_counter()
        for microbatch in range(job.microbatches):
            batch = data.microbatch(step, 0, microbatch, job.microbatch_size)
            values = device.put_all(batch.inputs)
            with device.autocast(dtype, enabled=dtype != torch.float32):
                for index, layer in enumerate(layers):
                    values = as_tensors(layer(*values), f"layer {index}")
                loss = model.loss(values, device.put_all(batch.targets))
            (loss / job.microbatches).backward()
        nn.utils.clip_grad_norm_(layers.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        device.wait()
        times.append(time.perf_counter() - start_s)
    return median(times[_NUM_WARM_UP:])


if __name__ == "__main__":
    print(f"step_s={step_seconds(Job(**json.loads(sys.argv[1])))}")
