"""Residuals that travel: a backward with the tensors that another worker's forward saved, to the bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from engine.models.data_sources import open_data
from engine.models.layers import LayerSpec, Model, Tensors
from engine.models.losses import default_loss
from engine.models.model_loader import build_model
from engine.runtime.stage.replicas import free_weights
from engine.runtime.stage.residuals import CannotTravelError, Parcel, keep_parcel, parcel_of
from engine.runtime.stage.stage import Stage
from tests.runtime.small_jobs import NORMED, TIED_GPT, WIDTH, Turned, small_job

GPT = {"model": "gpt", "model_args": {"width": 16, "depth": 2, "heads": 2}, "microbatch_size": 2}
JOBS: dict[str, dict[str, Any]] = {
    "normed, dropout": NORMED,
    "attention of torch": NORMED | {"model": "tests.runtime.small_jobs:attending"},
    "gpt": GPT,
    "tied gpt": TIED_GPT,
    "gpt, bfloat16": GPT | {"dtype": "bfloat16"},
    "normed, float16": NORMED | {"dtype": "float16"},
    "tied gpt, checkpointed": TIED_GPT | {"activation_checkpoint": 2},
    "normed, checkpointed": NORMED | {"activation_checkpoint": 2},
}


def travelled(parcel: Parcel) -> Parcel:
    """Returns what arrives at another worker."""
    return Parcel(json.loads(json.dumps(parcel.header)), tuple(piece.clone() for piece in parcel.pieces))


def gradients(stage: Stage, made: list[Tensors]) -> list[Tensor]:
    return [*(each for group in made for each in group), *(p.grad for p in stage.trained() if p.grad is not None)]


def _with_one_node_more(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.view_as(output)


OTHER = [("normed, float16", "graphs"), ("tied gpt", "graphs")]
FREED = [("normed, dropout", "shards"), ("attention of torch", "shards"), ("tied gpt", "shards")]


@pytest.mark.parametrize(("name", "other"), [*((name, "") for name in JOBS), *OTHER, *FREED])
def test_a_backward_with_residuals_of_another_worker_makes_the_same_bits(name: str, other: str) -> None:
    """Also with sharded weights, and of a worker whose layers make other graphs: it runs them again, and says so."""
    told, is_other = list[str](), other == "graphs"
    job = small_job(**JOBS[name], stages=1)
    data = open_data(job)
    model = build_model(job, data.facts, data)
    plain, leaver, heir = (Stage(job, model, 0, 0, len(model.layers)) for _ in range(3))
    batches = [data.microbatch(0, 0, each, job.microbatch_size) for each in range(3)]
    for stage in (plain, leaver):
        for number, batch in enumerate(batches):
            stage.forward(0, number, batch.inputs, batch.targets)
    if other == "shards":
        free_weights(leaver)
    for number in range(2):
        keep_parcel(heir, 0, number, travelled(parcel_of(leaver, number)), told.append)
    assert told == []
    if is_other:
        for layer in heir.layers.values():
            layer.register_forward_hook(_with_one_node_more)
    heir.forward(0, 2, batches[2].inputs, batches[2].targets)
    expected, made = ([stage.backward(0, number, ()) for number in range(3)] for stage in (plain, heir))
    ours, theirs = gradients(heir, made), gradients(plain, expected)
    assert len(ours) == len(theirs) > 0
    assert all(map(torch.equal, ours, theirs))
    assert [each.stride() for each in ours] == [each.stride() for each in theirs]
    assert (heir.losses, heir.counted) == (plain.losses, plain.counted)
    assert all(map(torch.equal, heir.buffers(), plain.buffers()))
    assert [("layer 0" in why, "worker that left" in why) for why in told] == [(True, True)] * 2 * is_other


class Doubled(torch.autograd.Function):
    """A backward of a user, which may keep what it likes."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x))


class Again(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Turned, "aten::_local_scalar_dense looks at the content"),
        (Doubling, "is a backward of the user"),
        (Again, "hooks on saved tensors"),
    ],
)
def test_what_cannot_travel_says_why(layer: Any, why: str) -> None:
    make = layer if layer is Turned else lambda: layer(WIDTH, WIDTH)
    model = Model((LayerSpec("0", layer.__name__, make),), default_loss)
    stage = Stage(small_job(), model, 0, 0, 1)
    inputs = (torch.ones(4, WIDTH).cumsum(0),)
    before = dict(stage.layers[0].__dict__)
    stage.forward(0, 0, inputs, None)
    with pytest.raises(CannotTravelError, match=why):
        parcel_of(stage, 0)
    assert stage.layers[0].__dict__.keys() == before.keys()
