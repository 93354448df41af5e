"""Layers that are lists of torch's own operations: which ones are, and that a shorter trial of them finds the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import deterministic

from engine.core.checks.trajectory import DigestByName, PurityBook
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.stage.trials import LayerTrial
from engine.runtime.worker.pure_check import PureCheck, TrialShare
from tests.looped import looped
from tests.runtime.test_ordinary_modules import Base, InPlace, LossByMode, OwnGradient, Remembering, Weighted

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE, OWNER, SHADOW = TrialShare(), TrialShare(is_shared=True), TrialShare(is_twice=False, is_shared=True, fills=True)
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


@looped(("made", "straight"), STRAIGHT.items())
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


def run(made: type[nn.Module], share: TrialShare = ALONE) -> dict[str, DigestByName]:
    return dict(check_of(made).run({0: share}))


def test_a_straight_layer_is_tried_with_one_microbatch() -> None:
    check = check_of(Plain)
    marks = dict(check.run({0: ALONE}))
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


class Repeated(nn.Module):
    """Blocks alike, but one with another constant and one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.more, self.end = nn.Linear(32, 32, bias=False), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) * (2 if number == 2 else 1)
        return self.end(self.more(x))


def test_of_layers_alike_the_first_is_tried_and_the_weights_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(Repeated)
    first, take, taken = LayerTrial.first, LayerTrial.take, {}
    tried = []

    def counted(trial: LayerTrial) -> Any:
        tried.append(trial.index)
        return first(trial)

    def told(trial: LayerTrial, other: LayerTrial) -> Any:
        taken[trial.index] = other.index
        return take(trial, other)

    monkeypatch.setattr(LayerTrial, "first", counted)
    monkeypatch.setattr(LayerTrial, "take", told)
    marks = dict(check.run({0: ALONE}))
    assert check.model.alike == {0: 0, 1: 0, 2: 2, 3: 0, 4: 4}
    assert (tried, taken) == ([0, 1, 2, 4, 5], {3: 1})  # the input of the model has no gradient
    assert check.trials[3].flops == check.trials[1].flops > (0, 0)
    assert marks["layer 3 (from blocks.3)"]["weight"] != marks["layer 0 (from blocks.0)"]["weight"]


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
        check.run({0: ALONE})


def test_a_straight_layer_that_two_workers_hold_is_tried_in_one_copy_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerTrial, "second", lambda self: pytest.fail("a second copy"))
    book = PurityBook()
    book.add(0, run(Plain, OWNER).items())
    book.add(1, run(Plain, SHADOW).items())


def test_an_own_kernel_is_tried_in_two_copies_whoever_holds_it_too() -> None:
    with pytest.raises(UserError, match=r"layer 0 \(from a\): its output of microbatch 0 differs when its"):
        run(OwnKernel, OWNER)


def plus_what_is_unwritten(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args) + getattr(deterministic, "fill_uninitialized_memory")  # noqa: B009 - of the module's class


def test_kernels_that_read_unwritten_memory_show_between_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    book = PurityBook()
    for worker, share in enumerate((OWNER, SHADOW)):
        check = check_of(Plain)
        program = check.model.layers[0].build.module._programs[0]  # type: ignore[attr-defined]
        name = next(each for each in program.run.__globals__ if each.startswith("linear"))
        reads = partial(plus_what_is_unwritten, torch._C._nn.linear)
        monkeypatch.setitem(program.run.__globals__, name, reads)
        marks = check.run({0: share})
        if worker:
            with pytest.raises(UserError, match="output of microbatch 0 differs between worker 0 and worker 1"):
                book.add(worker, marks)
        else:
            book.add(worker, marks)
