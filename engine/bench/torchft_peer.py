"""The peer of the recovery benchmark, for torchft: data parallel replicas of the whole model, of which one is killed.

A process without a replica's number is the lighthouse and starts the replicas; the victim kills itself. Each replica
prints the time of each commit. torchft discards the step of a failure and goes on with one replica less.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn

from engine.bench.torch_side import LOOPBACK_INTERFACE
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.layers import Tensors
from engine.models.model_loader import build_model
from engine.runtime.stage.stage import build_layer

REPLICAS = 3
_VICTIM = 1
_TIMEOUT = timedelta(seconds=30)
_LOOPBACK = "127.0.0.1"


def main() -> None:
    """Runs the lighthouse or a replica; arguments: job as JSON, step of the kill; for a replica its number, address."""
    job, fatal_step = Job(**json.loads(sys.argv[1])), int(sys.argv[2])
    if len(sys.argv) > 3:
        _train(job, fatal_step, int(sys.argv[3]), sys.argv[4])
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"{_LOOPBACK}:0", min_replicas=REPLICAS - 1, join_timeout_ms=1000)
    address = lighthouse.address().replace(lighthouse.address().split("//")[1].split(":")[0], _LOOPBACK)
    command = [sys.executable, "-m", "engine.bench.torchft_peer", *sys.argv[1:3]]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    replicas = [subprocess.Popen([*command, str(each), address]) for each in range(REPLICAS)]
    try:
        codes = [each.wait() for each in replicas]
    finally:
        for each in replicas:
            each.kill()
        lighthouse.shutdown()
    sys.exit(any(code != 0 for each, code in enumerate(codes) if each != _VICTIM))


class _Whole(nn.Module):
    """All layers of a model in sequence; the outputs of a layer are the inputs of the next."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, *tensors: Tensor) -> Tensors:
        for layer in self.layers:
            output = layer(*tensors)
            tensors = output if isinstance(output, tuple) else (output,)
        return tensors


def _train(job: Job, fatal_step: int, replica: int, lighthouse: str) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    torch.set_num_threads(job.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    data = open_data(job)
    model = build_model(job, data.facts)
    layers = nn.ModuleList(build_layer(job, model, index) for index in range(len(model.layers)))
    batches = [data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
    store = distributed.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=layers.load_state_dict,
        state_dict=layers.state_dict,
        min_replica_size=REPLICAS - 1,
        rank=0,
        world_size=1,
        store_addr=_LOOPBACK,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
        hostname=_LOOPBACK,
        timeout=_TIMEOUT,
    )
    whole = DistributedDataParallel(manager, _Whole(layers))
    optimizer = OptimizerWrapper(manager, torch.optim.AdamW(layers.parameters(), lr=job.lr))
    while manager.current_step() < job.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        if replica == _VICTIM and step == fatal_step:
            os.kill(os.getpid(), signal.SIGKILL)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if last:
                model.loss(whole(*batch.inputs), batch.targets).backward()
            else:
                with whole.no_sync():
                    model.loss(whole(*batch.inputs), batch.targets).backward()
        optimizer.step()
        if manager.current_step() > step:  # it was committed
            os.write(1, f"replica={replica} step={step} ended_ns={time.monotonic_ns()}\n".encode())
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads wait for a quorum that never forms


if __name__ == "__main__":
    main()
