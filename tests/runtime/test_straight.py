"""Layers that are lists of torch's own operations: which ones are, and that a shorter trial of them finds the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.checks.trajectory import DigestByName, PurityBook
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.worker.pure_check import PureCheck
from tests.runtime.test_ordinary_modules import Base, InPlace, LossByMode, OwnGradient, Remembering, Weighted

pytestmark = pytest.mark.usefixtures("one_thread")
_calls = [0]


@torch.library.custom_op("bamboo_tests::counting", mutates_args=())
def counting(x: Tensor) -> Tensor:
    """An own kernel that counts its calls."""
    _calls[0] += 1
    return x * _calls[0]


counting.register_autograd(lambda ctx, gradient: gradient)


class Plain(Base):
    """Uses what most models do: a constant, a product, a dropout, arithmetic with the number on the left."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = 1 - nn.functional.dropout(self.a(x), 0.3, self.training) @ self.a.weight.T
        return self.b(torch.cat([hidden[:, :16].softmax(-1), hidden[:, 16:]], 1))


class OwnKernel(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(counting(self.a(x)))


class Unwritten(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.where(x > 9, torch.empty_like(x), self.a(x)))


class OfProcess(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * os.getpid())


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.bias.register_hook(lambda gradient: gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def check_of(made: type[nn.Module], **fields: Any) -> PureCheck:
    job = Job(model=f"{made.__module__}:{made.__name__}", data="synthetic", stages=1, microbatches=2, **fields)
    data = open_data(job)
    return PureCheck(job, build_model(job, data.facts, data), data, (0,), ())


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's."""
    return (outputs - targets).square().mean()


STRAIGHT: dict[type[nn.Module], set[int]] = {
    **{Plain: {0, 1, 2}, Weighted: {0, 1}, LossByMode: {0, 1}, Hooked: {0}, Remembering: {0, 3}, InPlace: {3}},
    **{made: {1} for made in (OwnGradient, OwnKernel, Unwritten)},
}


@pytest.mark.parametrize(("made", "straight"), STRAIGHT.items())
def test_only_torchs_own_pure_operations_are_straight(made: type[nn.Module], straight: set[int]) -> None:
    assert check_of(made).model.straight == straight


def test_a_loss_of_the_users_is_not_straight() -> None:
    assert check_of(Plain, loss=f"{__name__}:loss").model.straight == {0, 1}


def test_hooks_of_all_modules_leave_no_layer_straight() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, made: None)
    try:
        assert check_of(Plain).model.straight == frozenset()
    finally:
        handle.remove()


def run(made: type[nn.Module]) -> dict[str, DigestByName]:
    return dict(check_of(made).run({0: True}))


def test_a_straight_layer_is_tried_with_one_microbatch() -> None:
    check = check_of(Plain)
    marks = dict(check.run({0: True}))
    assert [len(trial.inputs) for trial in check.trials] == [1, 1, 1]
    assert all(trial.residual[0] for trial in check.trials)
    assert {"output of microbatch 0", "input gradient of microbatch 0", "weight gradient"} <= marks[
        "layer 2 (from b)"
    ].keys()
    assert marks == run(Plain)


def test_an_own_kernel_that_counts_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        run(OwnKernel)
    assert caught.value.problems[0].found.startswith("layer 0 (from a): its output of microbatch 0 differs when its")


def test_what_depends_on_its_process_shows_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    book = PurityBook()
    book.add(0, run(OfProcess).items())
    monkeypatch.setattr(os, "getpid", lambda: 3)
    with pytest.raises(UserError, match="its output of microbatch 0 differs between worker 0 and worker 2"):
        book.add(2, run(OfProcess).items())


def test_kernels_that_differ_in_a_second_copy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(Plain)
    linear: Callable[..., Tensor] = torch._C._nn.linear
    calls = iter(range(100))
    program = check.model.layers[0].build.module._programs[0]  # type: ignore[attr-defined]
    name = next(each for each in program.run.__globals__ if each.startswith("linear"))
    monkeypatch.setitem(program.run.__globals__, name, lambda *args: linear(*args) + next(calls))
    with pytest.raises(UserError, match=r"layer 0 \(from a\): its output of microbatch 0 differs in a second copy"):
        check.run({0: True})
