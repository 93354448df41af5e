"""The peer of the launch benchmark, for torchrun: trains one step of a job and says on stdout when it was finished.

It takes our layers, data and cut, and for all else what a user of torch would: its pipelining and its AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import distributed, nn

from engine.bench.peers.torch_side import LOOPBACK_INTERFACE, TorchPipeline
from engine.core.config.job import Job
from engine.core.config.partition import partition
from engine.models.catalogue import build_model, open_data
from engine.runtime.stage.build_layer import build_layer


def main() -> None:
    """Runs one rank; the job is the only argument, as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    distributed.init_process_group("gloo")
    stage = distributed.get_rank()
    data = open_data(job)
    model = build_model(job, data.facts)
    starts = partition(job.partition, job.stages, [layer.kind for layer in model.layers], ())
    ends = (*starts[1:], len(model.layers))
    layers = nn.ModuleList(build_layer(job, model, index) for index in range(starts[stage], ends[stage]))
    batches = [data.microbatch(0, 0, each, job.microbatch_size) for each in range(job.microbatches)]
    pipeline = TorchPipeline(job, model, {stage: layers}, batches)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=job.lr)
    pipeline.run_step()
    optimizer.step()
    # One write: the lines of the ranks share a pipe.
    os.write(1, f"finished_ns={time.monotonic_ns()}\n".encode())
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
