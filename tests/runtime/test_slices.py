"""Slices of a sequence in a stage: the numbers of the whole sequence, up to rounding, and bits that stay in a redo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.layers import Batch, Model
from engine.models.model_loader import build_model
from engine.models.slices import slice_of
from engine.runtime.stage.stage import Stage

_ARGS = {"width": 16, "heads": 2, "depth": 2, "dropout": 0.0}


def _job(slices: int, **fields: Any) -> tuple[Job, Model, Data]:
    small: dict[str, Any] = {"model_args": _ARGS, "microbatches": 1, "microbatch_size": 2, "slices": slices}
    job = Job(**small | fields)
    data = open_data(job)
    return job, build_model(job, data.facts), data


def _step(slices: int, redo: bool = False, parts: bool = False, **fields: Any) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the gradients of one microbatch of a whole model; a redo runs each forward twice."""
    job, model, data = _job(slices, **fields)
    stage = Stage(job, model, 0, 0, len(model.layers))
    batch = data.microbatch(0, 0, 0, job.microbatch_size)
    cut = [slice_of(batch, number, slices) for number in range(slices)]
    for number, each in enumerate(cut):
        stage.forward(0, number, each.inputs, each.targets)
    for number, each in enumerate(cut if redo else ()):
        stage.redo_forward(0, number, each.inputs, each.targets)
    for number in range(slices):
        if parts:
            stage.backward_input(0, number, ())
            stage.backward_weights(number)
        else:
            stage.backward(0, number, ())
    assert not stage.residuals and not stage.carries
    named = {
        f"{index}.{name}": each for index, of_layer in stage.gradients().items() for name, each in of_layer.items()
    }
    return sum(stage.losses.values()) / slices, named


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("slices", [2, 4])
def test_slices_compute_what_the_whole_sequence_does(slices: int, fused: bool) -> None:
    args: dict[str, Any] = {"model_args": _ARGS | {"fused": fused}}
    (loss, gradients), (whole_loss, whole) = _step(slices, **args), _step(1, **args)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_redo_and_backwards_in_parts_have_the_same_bits() -> None:
    args: dict[str, Any] = {"model_args": _ARGS | {"dropout": 0.2}}
    loss, gradients = _step(4, **args)
    for again in (_step(4, redo=True, **args), _step(4, parts=True, **args)):
        assert again[0] == loss
        assert all(torch.equal(again[1][name], each) for name, each in gradients.items())
    assert _step(2, **args)[0] != loss, "dropout differs from slice to slice"


def test_a_layer_without_slices_is_refused() -> None:
    job, model, _ = _job(2, model="bert")
    with pytest.raises(UserError, match=r"slices: .*forward_slice.*layer 1 \(block0\) has none"):
        Stage(job, model, 0, 0, 2)


def test_what_cannot_be_cut_is_refused() -> None:
    tokens = torch.zeros(2, 10, dtype=torch.long)
    assert [each.shape for each in slice_of(Batch((tokens,), (tokens,)), 1, 5).inputs] == [(2, 2)]
    for batch, slices in ((Batch((tokens,), (tokens,)), 3), (Batch((tokens,), (tokens[:, 0],)), 2)):
        with pytest.raises(UserError, match="slices: expected a number that divides the length"):
            slice_of(batch, 0, slices)
