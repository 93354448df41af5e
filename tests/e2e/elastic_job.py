"""A job for `torchrun` that starts quickly: gloo, steps by hand, and a checkpoint each ten steps.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 elastic_job.py FOLDER STEPS

The job of the documentation, `docs/examples/any_job.py`, does the same with DistributedDataParallel and AdamW, whose
imports take seconds in each process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import bamboo

_EVERY, _BATCH, _RATE = 10, 8, 0.01


def main(folder: Path, steps: int) -> None:
    """Trains from the checkpoint in the folder, if there is one."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    path, first = folder / "state.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"] + 1
    for step in range(first, steps):
        time.sleep(0.02)  # a strike at a step finds a job that is still in it, or soon after it
        samples = [(step * ranks + rank) * _BATCH + each for each in range(_BATCH)]
        inputs = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(each)) for each in samples])
        loss = (model(inputs).squeeze() - inputs.sum(1)).square().mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                distributed.all_reduce(gradient)
                parameter.sub_(_RATE * gradient / ranks)
        bamboo.progress(step, loss=loss.item(), samples=samples)
        bamboo.fingerprint(model, step=step)
        if rank == 0 and step % _EVERY == _EVERY - 1:
            torch.save({"model": model.state_dict(), "step": step}, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
