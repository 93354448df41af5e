"""The peer of the pipeline benchmarks: torch.distributed.pipelining over our layers and microbatches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Store
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.core.job import Job
from engine.models.layers import Batch, Model
from engine.runtime.executor import Surroundings

LOOPBACK_INTERFACE = "lo"
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def join_default_group(store: Store, rank: int, size: int) -> None:
    """Forms torch's default process group over the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


class TorchPipeline:
    """One stage of torch's pipeline over the default process group."""

    def __init__(self, job: Job, model: Model, stage: int, layers: Iterable[nn.Module], batches: Sequence[Batch]):
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return model.loss((output,), (target,))

        peer = PipelineStage(nn.Sequential(*layers), stage, job.stages, torch.device("cpu"))
        self.schedule = _SCHEDULES[job.schedule](peer, job.microbatches, loss_fn=loss)
        self.inputs = (torch.cat([batch.inputs[0] for batch in batches]),) if stage == 0 else ()
        is_last = stage == job.stages - 1
        self.targets = torch.cat([batch.targets[0] for batch in batches]) if is_last else None

    def run_step(self) -> None:
        """Runs forwards and backwards of all microbatches."""
        self.schedule.step(*self.inputs, target=self.targets, return_outputs=False)


class TorchSide:
    """The pipeline as one of the two sides of the benchmark."""

    def __init__(self, around: Surroundings):
        job, ((_, index), stage) = around.job, next(iter(around.replicas.stages.items()))
        batches = [around.data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
        self.pipeline = TorchPipeline(job, stage.model, index, stage.layers.values(), batches)

    def run(self, iteration: int) -> None:
        """Runs the schedule once on the whole batch."""
        self.pipeline.run_step()

    def tidy(self) -> None:
        """Nothing is left over."""
