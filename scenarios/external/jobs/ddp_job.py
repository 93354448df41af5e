"""The job of `bamboo bench referee` as a plain DDP script, for torchrun and for ft_launcher of NVRx."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import job_model
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bamboo


def train(path: Path) -> None:
    """Trains from the checkpoint, if there is one, and ends the process group."""
    rank, first = distributed.get_rank(), 0
    model = DistributedDataParallel(job_model.model())
    optimizer = job_model.optimizer(model)
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, job_model.STEPS):
        samples = job_model.samples_of(step, rank)
        inputs, targets = job_model.batch(samples)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bamboo.progress(step, loss=loss.item(), samples=samples)
        bamboo.fingerprint(model.module, optimizer, step=step, every=10, sample=None)
        if rank == 0 and step % job_model.EVERY == job_model.EVERY - 1:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            job_model.save(state, path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    distributed.init_process_group("gloo", timeout=timedelta(seconds=job_model.TIMEOUT_S))
    train(Path(sys.argv[1]) / "checkpoints/state.pt")
