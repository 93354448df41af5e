"""The job of `bamboo bench referee` in Ray Train, which starts all ranks anew after a failure."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import job_model
import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import bamboo


def loop() -> None:
    """Trains one rank from the checkpoint that Ray hands over, if there is one."""
    rank, first = train.get_context().get_world_rank(), 0
    plain = job_model.model()
    optimizer, model = job_model.optimizer(plain), train.torch.prepare_model(plain)
    if saved := train.get_checkpoint():
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        plain.load_state_dict(state["model"])
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
        bamboo.fingerprint(plain, optimizer, step=step, every=10, sample=None)
        if step % job_model.EVERY == job_model.EVERY - 1:
            folder = tempfile.mkdtemp() if rank == 0 else None
            if folder:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                job_model.save(state, Path(folder) / "state.pt")
            train.report({"step": step}, checkpoint=train.Checkpoint(folder) if folder else None)
            shutil.rmtree(folder or "", ignore_errors=True)


def main(folder: Path) -> None:
    """Runs the trainer on the processors of this host."""
    ray.init(num_cpus=job_model.RANKS + 1, include_dashboard=False)
    trainer = TorchTrainer(
        loop,
        scaling_config=train.ScalingConfig(num_workers=job_model.RANKS, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo", timeout_s=int(job_model.TIMEOUT_S)),
        run_config=train.RunConfig(
            name="checkpoints", storage_path=str(folder), failure_config=train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
