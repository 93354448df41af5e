"""Buffers in the memory of a parameter, or of another layer: found before anything has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.models.model_loader import build_model
from engine.runtime.stage.stage import build_layer

WIDTH = 32


class With(nn.Module):
    """Has a linear map and a buffer; without one given, a view of its weights."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("row", self.linear.weight.detach()[3] if buffer is None else buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.get_buffer("row")


def shares_a_table() -> list[nn.Module]:
    """Two layers have one buffer, which nobody changes."""
    table = torch.ones(WIDTH)
    return [With(table), nn.Linear(WIDTH, WIDTH), With(table), nn.Linear(WIDTH, 1)]


def row_of_weights() -> list[nn.Module]:
    """A buffer lies in a parameter of the same layer; another in one of another layer."""
    first = With()
    return [first, With(first.linear.bias.detach())]


class TwoViews(With):
    """Has a buffer, and a view of it as another one."""

    def __init__(self) -> None:
        super().__init__(torch.ones(WIDTH))
        self.register_buffer("head", self.get_buffer("row")[:4])


def two_views() -> list[nn.Module]:
    return [TwoViews(), nn.Linear(WIDTH, 1)]


def built(model: str) -> Model:
    job = Job(model=f"tests.runtime.test_memory_rules:{model}", data="synthetic")
    return build_model(job, open_data(job).facts)


def test_buffers_of_several_layers_are_known() -> None:
    assert built("shares_a_table").shared_buffers == (((0, "row"), (2, "row")),)
    assert built("two_views").shared_buffers == ()


def test_buffers_in_parameters_are_refused_by_name() -> None:
    with pytest.raises(UserError) as refused:
        built("row_of_weights")
    assert [each.found for each in refused.value.problems] == [
        "buffer 'row' of layer 0, which lies in that of parameter 'linear.weight' of layer 0",
        "buffer 'row' of layer 1, which lies in that of parameter 'linear.bias' of layer 0",
    ]


def test_a_layer_that_is_built_by_a_builder_is_checked_too() -> None:
    model = Model((LayerSpec("only", "With", With),), default_loss)
    with pytest.raises(UserError, match=r"'row' of layer 0, .* 'linear\.weight' of layer 0"):
        build_layer(Job(), model, 0)


class Scripted(nn.Module):
    """Has a module that was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (Scripted, "a scripted module in layer 1"),
        (lambda: nn.LazyLinear(WIDTH), "the lazy parameter or buffer 'weight' in layer 1"),
        (lambda: With(torch.eye(WIDTH).to_sparse()), "the sparse tensor 'row' in layer 1"),
        (lambda: nn.Embedding(WIDTH, WIDTH, sparse=True), "sparse gradients of 'Embedding' in layer 1"),
    ],
    ids=["scripted", "lazy", "sparse buffer", "sparse gradient"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_layer_of_other_than_plain_tensors_is_refused(layer: Any, found: str) -> None:
    specs = (LayerSpec("first", "Linear", lambda: nn.Linear(WIDTH, WIDTH)), LayerSpec("odd", "Odd", layer))
    with pytest.raises(UserError, match=found):
        build_layer(Job(), Model(specs, default_loss), 1)


class Remembers(nn.Linear):
    """Has state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def remembers() -> list[nn.Module]:
    return [nn.Sequential(nn.ReLU(), Remembers()), nn.Linear(WIDTH, 1)]


def test_state_that_is_neither_parameter_nor_buffer_is_refused() -> None:
    with pytest.raises(UserError, match=r"found the extra state of '1' in layer 0 .register it as a buffer."):
        built("remembers")
