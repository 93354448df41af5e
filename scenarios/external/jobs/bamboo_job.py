"""The job of `bamboo bench referee` in bamboo: two stages, and a worker that stands by."""

from __future__ import annotations

import sys
from pathlib import Path

import job_model
import torch
from torch import nn

import bamboo
from engine.models.data import DataFacts
from engine.models.layers import Batch


class Numbers:
    """The samples of all ranks, a rank's batch in each microbatch."""

    facts = DataFacts(task="regress", features=16, outputs=1)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the samples that the rank of this number has in other systems."""
        inputs, targets = job_model.batch(job_model.samples_of(step, microbatch))
        return Batch((inputs,), (targets,))

    def validation(self, index: int, size: int) -> Batch:
        """Returns a microbatch; the job has no validation."""
        return self.microbatch(index, 0, 0, size)


def model() -> nn.Sequential:
    """Returns the model; its first half is stage 0."""
    return job_model.model()


def main(folder: Path) -> None:
    """Trains, and reports each committed step, and the weights at the end."""
    run = bamboo.train(
        "bamboo_job:model",
        data="bamboo_job:Numbers",
        loss="mse",
        partition="3",
        stages=2,
        standby=1,
        microbatches=job_model.RANKS,
        microbatch_size=job_model.BATCH,
        steps=job_model.STEPS,
        lr=job_model.RATE,
        lr_schedule="constant",
        warmup_steps=0,
        clip_norm=0.0,
        validate_every=0,
        silent_after=f"{job_model.TIMEOUT_S:.0f}s",
        checkpoint_every=str(job_model.EVERY),
        checkpoints=str(folder / "checkpoints"),
        results=str(folder / "results"),
        trust_code=True,
        callbacks=[lambda done: bamboo.progress(done.step, loss=done.loss)],
    )
    run.wait()
    bamboo.fingerprint(run.weights(), step=job_model.STEPS - 1, every=1, sample=None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
