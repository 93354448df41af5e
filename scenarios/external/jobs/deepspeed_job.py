"""The job of `bamboo bench referee` in DeepSpeed on CPUs, with its own checkpoints."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import job_model
from torch import nn

import bamboo


def main(folder: Path) -> None:
    """Trains from the newest checkpoint, if there is one."""
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=job_model.TIMEOUT_S))
    plain = job_model.model()
    settings = {"train_micro_batch_size_per_gpu": job_model.BATCH}
    engine, *_ = deepspeed.initialize(model=plain, optimizer=job_model.optimizer(plain), config=settings)
    first = 0
    if (folder / "latest").exists():
        _, told = engine.load_checkpoint(str(folder))
        first = told["step"] + 1
    rank = int(os.environ["RANK"])
    for step in range(first, job_model.STEPS):
        samples = job_model.samples_of(step, rank)
        inputs, targets = job_model.batch(samples)
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        bamboo.progress(step, loss=loss.item(), samples=samples)
        bamboo.fingerprint(plain, engine.optimizer, step=step, every=10, sample=None)
        if step % job_model.EVERY == job_model.EVERY - 1:
            engine.save_checkpoint(str(folder), client_state={"step": step})


if __name__ == "__main__":
    main(Path(next(word for word in sys.argv[1:] if not word.startswith("--"))) / "checkpoints")
