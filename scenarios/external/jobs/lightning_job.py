"""The job of `bamboo bench referee` in Lightning, which torchrun starts: Lightning itself starts no rank anew."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import job_model
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import bamboo


class Numbers(Dataset):
    """The samples by their numbers."""

    def __len__(self) -> int:
        return job_model.STEPS * job_model.RANKS * job_model.BATCH

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        inputs, targets = job_model.batch([number])
        return number, inputs[0], targets[0]


class Batches:
    """The numbers of the samples of a rank, batch by batch, from a step on.

    Its length is that of all steps: Lightning counts those that were done before a restart.
    """

    def __init__(self, rank: int, first: int) -> None:
        self.rank, self.first = rank, first

    def __iter__(self):
        return (job_model.samples_of(step, self.rank) for step in range(self.first, job_model.STEPS))

    def __len__(self) -> int:
        return job_model.STEPS


class Module(lightning.LightningModule):
    """The model and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = job_model.model()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Returns the loss."""
        _, inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return job_model.optimizer(self.model)


class Reports(lightning.Callback):
    """The reports of steps; as a callback they come before the checkpoint of the step."""

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Module, outputs: dict[str, Tensor], batch: list[Tensor], index: int
    ) -> None:
        """Reports the step."""
        step = trainer.global_step - 1
        bamboo.progress(step, loss=outputs["loss"], samples=batch[0])
        bamboo.fingerprint(module.model, trainer.optimizers[0], step=step, every=10, sample=None)


def main(folder: Path) -> None:
    """Trains from the newest checkpoint, if there is one."""
    saved = sorted(folder.glob("step-*.ckpt"))
    first = int(saved[-1].stem.split("-")[1]) if saved else 0
    loader = DataLoader(Numbers(), batch_sampler=Batches(int(os.environ["RANK"]), first))
    name = {"filename": "step-{step:04}", "auto_insert_metric_name": False}
    keep = ModelCheckpoint(folder, **name, every_n_train_steps=job_model.EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job_model.RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=job_model.TIMEOUT_S)),
        max_steps=job_model.STEPS,
        max_epochs=-1,
        callbacks=[Reports(), keep],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader, ckpt_path=saved[-1] if saved else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "checkpoints")
