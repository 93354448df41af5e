"""The microbatches of a Trainer in files: their order, rows and lengths that are filled, and its learning rates."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import UserError
from engine.models.trainer_batches import PER_FILE, WrittenBatches, rate_factor

pytest.importorskip("accelerate", reason="pip install 'bamboo-train[hf]'")


def batch(*rows: list[int]) -> dict[str, Any]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "text": "no tensor"}


def test_microbatches_come_back_in_order_and_filled(tmp_path: Path) -> None:
    from engine.api.trainer_files import BatchWriter

    writer = BatchWriter(2, 2, lambda first: True)
    full = ([batch([1, 2], [3, 4]), batch([5, 6, 7], [8, 9, 2**40])], torch.tensor(6))
    last = ([batch([1, 2])], torch.tensor(2))
    writer.write([full] * PER_FILE + [last], tmp_path)
    assert writer.lengths() == "attention_mask=3,input_ids=3,labels=3"
    data = WrittenBatches(str(tmp_path), 2, per_step=2, microbatches=1, lengths=writer.lengths())
    form: Any = data.facts.form

    def read(step: int, pipeline: int) -> dict[str, Any]:
        inputs = data.microbatch(step, pipeline, 0, 2).inputs
        return {name: tensor.tolist() for name, tensor in zip(form.names, inputs, strict=True)}

    assert form.target == "labels"
    first = {"attention_mask": [[1, 1, 0]] * 2, "input_ids": [[1, 2, 0], [3, 4, 0]], "num_items_in_batch": 3.0}
    assert read(0, 0) == {**first, "labels": [[1, 2, -100], [3, 4, -100]]}
    assert read(PER_FILE - 1, 1)["input_ids"] == [[5, 6, 7], [8, 9, 2**40]]
    short = {"attention_mask": [[1, 1, 0]] * 2, "input_ids": [[1, 2, 0]] * 2, "num_items_in_batch": 1.0}
    assert read(PER_FILE, 0) == {**short, "labels": [[1, 2, -100], [-100] * 3]}
    assert read(PER_FILE, 1) == {**short, "labels": [[-100] * 3] * 2}
    assert data.microbatch(0, 0, 0, 2).targets[0].dtype == torch.int64


def test_a_mean_over_rows_needs_full_steps(tmp_path: Path) -> None:
    from engine.api.trainer_files import BatchWriter

    for short in ([batch([1, 2], [3, 4])], [batch([1, 2], [3, 4]), batch([5, 6])]):
        with pytest.raises(
            UserError, match=r"train_dataset: expected 2 batches of 2 in each step .*dataloader_drop_last"
        ):
            BatchWriter(2, 2, lambda first: False).write([(short, None)], tmp_path)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "inverse_sqrt"])
def test_rates_are_those_of_transformers(kind: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule: Any = get_scheduler(kind, optimizer, 2, 6)
    for step in range(6):
        assert rate_factor(step, kind=kind, warmup=2, steps=6) == schedule.get_last_lr()[0]
        with warnings.catch_warnings(action="ignore"):
            schedule.step()
    with pytest.raises(UserError, match=r"lr_scheduler_type: expected a schedule of the step alone"):
        rate_factor(0, kind="reduce_lr_on_plateau")
