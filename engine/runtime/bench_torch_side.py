"""The pipeline benchmark's peer: torch.distributed.pipelining over the same layers and microbatches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.runtime.executor import Surroundings

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class TorchSide:
    """One stage of torch's pipeline over the default process group."""

    def __init__(self, around: Surroundings):
        job, ((_, index), stage) = around.job, next(iter(around.stages.items()))
        layers = nn.Sequential(*stage.layers.values())
        peer = PipelineStage(layers, index, job.stages, torch.device("cpu"))
        loss = stage.model.loss

        def loss_of(output: Tensor, target: Tensor) -> Tensor:
            return loss((output,), (target,))

        self.schedule = _SCHEDULES[job.schedule](peer, job.microbatches, loss_fn=loss_of)
        batches = [around.data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
        self.inputs = (torch.cat([batch.inputs[0] for batch in batches]),) if index == 0 else ()
        self.targets = torch.cat([batch.targets[0] for batch in batches]) if stage.is_last else None

    def run(self, iteration: int) -> None:
        """Runs the schedule once on the whole batch."""
        self.schedule.step(*self.inputs, target=self.targets, return_outputs=False)

    def tidy(self) -> None:
        """Nothing is left over."""
