"""A plain DDP script with checkpoints, for `torchrun`: what bamboo needs of it are the two lines that report.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 any_job.py out --steps 60
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bamboo


def samples_of(step: int, rank: int, ranks: int, batch: int) -> list[int]:
    """Returns the numbers of the samples of a rank in a step: they depend on nothing else."""
    first = (step * ranks + rank) * batch
    return list(range(first, first + batch))


def main() -> None:
    """Trains from the checkpoint in the folder, if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    path, first = given.folder / "state.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, given.steps):
        samples = samples_of(step, rank, ranks, given.batch)
        inputs = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(each)) for each in samples])
        loss = (model(inputs).squeeze() - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bamboo.progress(step, loss=loss.item(), samples=samples)
        bamboo.fingerprint(model.module, optimizer, step=step)
        if rank == 0 and step % given.every == given.every - 1:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
