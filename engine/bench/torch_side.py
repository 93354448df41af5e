"""The peer of the pipeline benchmarks: torch.distributed.pipelining over our layers and microbatches."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Store
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from engine.bench.figures import TORCH_NAMES
from engine.core.job.job import Job
from engine.core.job.partition import partition
from engine.core.messages import KeyMessage
from engine.models.data_sources import open_data
from engine.models.layers import Batch, Model
from engine.models.model_loader import build_model
from engine.runtime.device.device import HOST, Device
from engine.runtime.process.control import Control
from engine.runtime.stage.stage import build_layer
from engine.runtime.worker.step_end import WorkerContext

LOOPBACK_INTERFACE = "lo"
_TIMEOUT = timedelta(minutes=30)


class AgentStore(Store):
    """The keys of torch's process group, which go over the agent."""

    def __init__(self, control: Control, epoch: int, group: str):
        super().__init__()
        self._control, self._epoch, self._group = control, epoch, group

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub has text
        """Sets a key, for all workers."""
        self._control.send(KeyMessage(self._epoch, f"{self._group}/{key}", base64.b64encode(value).decode()))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits as `wait` does."""
        (value,) = self._control.keys.wait(self._epoch, self._group, [key], _TIMEOUT.total_seconds())
        return base64.b64decode(value)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Waits until all keys are set; raises RuntimeError after `timeout`."""
        self._control.keys.wait(self._epoch, self._group, keys, timeout.total_seconds())


def join_default_group(store: Store, rank: int, size: int, device: Device = HOST) -> None:
    """Forms torch's default group over loopback, by NCCL for GPUs: each rank is a host. Not run on a GPU yet."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if not device.is_host:
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    backend = "gloo" if device.is_host else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


class TorchPipeline:
    """One worker's stages of torch's pipeline over the default process group."""

    def __init__(
        self,
        job: Job,
        model: Model,
        stages: Mapping[int, Iterable[nn.Module]],
        batches: Sequence[Batch],
        device: Device = HOST,
    ):
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return model.loss((output,), (target,))

        peers = [
            PipelineStage(nn.Sequential(*layers), stage, job.stages, device.place) for stage, layers in stages.items()
        ]
        schedule = getattr(schedules, TORCH_NAMES[job.schedule])
        is_single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(peers[0] if is_single else peers, job.microbatches, loss_fn=loss)
        self.inputs = (device.put(torch.cat([batch.inputs[0] for batch in batches])),) if 0 in stages else ()
        is_last = job.stages - 1 in stages
        self.targets = device.put(torch.cat([batch.targets[0] for batch in batches])) if is_last else None
        self._autocast = partial(device.autocast, getattr(torch, job.dtype), enabled=job.dtype != "float32")

    def run_step(self) -> None:
        """Runs forwards and backwards of all microbatches."""
        with self._autocast():
            self.schedule.step(*self.inputs, target=self.targets, return_outputs=False)


class TorchSide:
    """Torch's pipeline as one side of the pipeline benchmark."""

    def __init__(self, context: WorkerContext):
        job, stages = context.job, context.replicas.stages
        batches = [context.data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
        layers = {index: stage.layers.values() for (_, index), stage in stages.items()}
        model, device = next(iter(stages.values())).model, context.replicas.device
        self.pipeline = TorchPipeline(job, model, layers, batches, device)

    def run(self) -> None:
        """Runs the schedule once on the whole batch."""
        self.pipeline.run_step()

    def tidy(self) -> None:
        """Does nothing: torch leaves nothing over."""


def main() -> None:
    """Runs one step as a rank of torchrun, with AdamW, and prints when it ended; the argument is the job as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    distributed.init_process_group("gloo")
    rank, data = distributed.get_rank(), open_data(job)
    model = build_model(job, data.facts)
    starts = partition(job.partition, job.stages, [layer.kind for layer in model.layers], ())
    ends = (*starts[1:], len(model.layers))
    layers = nn.ModuleList(build_layer(job, model, index) for index in range(starts[rank], ends[rank]))
    batches = [data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=job.lr)
    TorchPipeline(job, model, {rank: layers}, batches).run_step()
    optimizer.step()
    os.write(1, f"ended_ns={time.monotonic_ns()}\n".encode())  # one write: the lines of the ranks share a pipe
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
