"""The job of `bamboo bench referee` in accelerate, with its own checkpoints."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import job_model
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

import bamboo


def main(folder: Path) -> None:
    """Trains from the newest checkpoint, if there is one."""
    patience = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=job_model.TIMEOUT_S))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[patience])
    rank, first = accelerator.process_index, 0
    plain = job_model.model()
    model, optimizer = accelerator.prepare(plain, job_model.optimizer(plain))
    if saved := sorted(folder.glob("step-*")):
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name.split("-")[1]) + 1
    for step in range(first, job_model.STEPS):
        samples = job_model.samples_of(step, rank)
        inputs, targets = job_model.batch(samples)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        bamboo.progress(step, loss=loss.item(), samples=samples)
        bamboo.fingerprint(plain, optimizer.optimizer, step=step, every=10, sample=None)
        if step % job_model.EVERY == job_model.EVERY - 1:
            accelerator.save_state(str(folder / f"step-{step:04}"))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "checkpoints")
