"""Ordinary modules are cut into layers that give their bits; what cannot be recorded is refused with its line."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.random_key import random_key
from engine.models.data_sources import open_data
from engine.models.layers import Batch, Model, Tensors, as_tensors
from engine.models.model_loader import build_model
from engine.models.traced.ordinary import OutputLoss
from engine.models.user_code import exception_of
from engine.runtime.stage.stage import build_layer
from tests.looped import looped

MODULES = "tests.e2e.ordinary_modules"
TABLE = np.arange(32, dtype=np.float32)

pytestmark = pytest.mark.usefixtures("one_thread")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 1)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class OwnGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Triple.apply(self.a(x)))


class Modes(Base):
    """Runs a part without gradients and a part under autocast, and branches on the mode of the module."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.a(x)
        return self.b(mean + hidden.float() if self.training else hidden.float())


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)


class Routed(Base):
    """Branches on values in a submodule only."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.router(self.a(x)))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, sign: int) -> Tensor:
        return x if sign * x.sum() > 0 else self.linear(x)


class Skipping(Base):
    """Has two submodules of which one returns its input, in each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Skip(), Skip()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(self.one(x, 1) * self.two(x, -1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(8, 16, batch_first=True, num_layers=2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x.view(-1, 4, 8))[0][:, -1])


class InPlace(nn.Module):
    """Overwrites an activation behind a block, which is a border; and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        mask = torch.zeros(32)
        mask[::2] = 1  # a constant that is made in two steps
        for block in self.blocks:
            x = block(x)
            x.relu_()
        return self.out(x * mask)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        for row in self.a(x):
            assert row.shape == (32,)
        return self.b(self.a(x))


class Weighted(nn.Module):
    """Returns a loss that reads a buffer, with an auxiliary part; it is called with labels."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 1)
        self.register_buffer("weight", torch.full((1,), 0.5))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.a(x)
        scale = torch.ones(1) * 2
        return (self.weight * scale * (self.b(hidden) - labels).square()).mean() + 0.1 * hidden.square().mean()


class Counting(nn.Module):
    """Counts its calls in an attribute, which changes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Remembering(Base):
    """Keeps what each forward makes anew, tells once, and has a submodule that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.norm = Counting(), nn.BatchNorm1d(32)
        self.mask: Tensor | None = None
        self.hidden: list[Tensor] = []
        self.has_told = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_told:
            self.has_told = True
        if self.mask is None:
            self.mask = torch.ones(32)
            self.mask[::2] = 0
        self.hidden = [self.norm(self.counting(self.a(x)))]
        return self.b(self.hidden[0] * self.mask)


class LossByMode(Base):
    """Returns another loss in evaluation than in training."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = (self.b(self.a(x)) - labels).square().mean()
        return loss * 3 if self.training else loss


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class PartOverwritten(Base):
    """Overwrites a part of an activation through a view, behind submodules at which a border would part the two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Shift(), Shift()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        part = hidden[:, :16]
        shifted = self.two(self.one(hidden))
        part += 1
        return self.b(hidden + shifted)


RUNS = [
    *(OwnGradient, Modes, Routed, Recurrent, InPlace, Parametrized, Weighted, Remembering, LossByMode),
    PartOverwritten,
]


def built(factory: str, data: str = "synthetic", **fields: Any) -> tuple[Job, Model, Batch]:
    job = Job(model=factory, data=data, **fields)
    source = open_data(job)
    return job, build_model(job, source.facts, source), source.microbatch(0, 0, 0, job.microbatch_size)


def whole(job: Job, factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(random_key(job.seed, "model"))
    return factory()


def through(layers: list[nn.Module], inputs: Tensors) -> Tensors:
    for layer in layers:
        inputs = as_tensors(layer(*inputs), "a layer")
    return inputs


@looped("made", RUNS)
def test_pieces_give_the_bits_of_the_module(made: type[nn.Module]) -> None:
    job, model, batch = built(f"{__name__}:{made.__name__}")
    layers, module = [build_layer(job, model, index) for index in range(len(model.layers))], whole(job, made)
    targets = batch.targets if "labels" in inspect.signature(made.forward).parameters else ()
    assert len(layers) > 1
    for is_training in (True, False):
        module.train(is_training)
        with torch.set_grad_enabled(is_training):
            expected = module(*(each.clone() for each in batch.inputs), *targets)
            outputs = through([each.train(is_training) for each in layers], batch.inputs)
            found = model.loss(outputs, batch.targets) if targets else outputs[0]
        assert torch.equal(found, expected)
        if is_training:
            expected.sum().backward()
            found.sum().backward()
    gradients = {name: each.grad for layer in layers for name, each in layer.named_parameters()}
    for name, each in module.named_parameters():
        other = gradients[name]
        assert (each.grad is None) == (other is None)
        assert each.grad is None or other is None or torch.equal(each.grad, other)
    buffers = {name: each for layer in layers for name, each in layer.named_buffers()}
    assert all(torch.equal(each, buffers[name]) for name, each in module.named_buffers())
    assert {name for layer in layers for name in layer.state_dict()} == set(module.state_dict())


class Branch(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:  # here
            x = -x
        return self.b(x)


class ToNumpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.from_numpy(self.a(x).detach().numpy()))  # here


class Hooked(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.register_hook(lambda gradient: gradient * 2)  # here
        return self.b(hidden)


class DrawsFromPython(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * random.random())  # noqa: S311


class DrawsFromNumpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * float(np.random.rand()))


class HiddenParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(1))]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.hidden[0])  # here


class OverwritesConstant(Base):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # here
        return self.b(self.a(x))


class EarlyLabels(Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.b(self.a(x) * labels.mean()).mean()  # here


class DrawsInLoss(Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.dropout(self.b(self.a(x)) - labels).square().mean()  # here


class LabelsWithoutLoss(Base):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.b(self.a(x))}


class OtherBorder(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden) + x[:, :1] if self.training else self.b(hidden)


class ExtraState(Base):
    def get_extra_state(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class CountsCalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self._factor()

    def _factor(self) -> float:
        self.calls += 1  # here
        return 1.0 / self.calls


class GrowsList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[torch.Size]] = {"shapes": []}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["shapes"].append(x.shape)  # here
        return self.b(self.a(x))


class FirstIsOther(Base):
    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if self.is_first else x
        self.is_first = False  # here
        return self.b(x)


class Recalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(32)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.last * 0.9 + self.a(x).mean(0).detach()  # here
        return self.b(self.a(x) + self.last)


class CountsElsewhere(Base):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.count += 1  # here
        return self.b(x * self.count) / self.count


class ArrayInForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.from_numpy(TABLE))  # here


class ArrayAsTensor(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.tensor(TABLE))  # here


class Logs(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        print(x.mean().item())  # here
        return self.b(x)


class Asserts(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        assert x.isfinite().all()  # here
        return self.b(x)


class DropsLayers(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self._dropped(x) if self.training else self.a(x)
        return self.b(x)

    def _dropped(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:  # noqa: S311  # here
            return x
        return self.a(x)


REFUSED: dict[type[nn.Module], str] = {
    Branch: r"`if x.sum\(\) > 0:  # here`: __bool__ gives Python a value .*torch.where.*submodule.*list of layers",
    ToNumpy: r"`return .*  # here`: numpy gives Python a value",
    Hooked: r"`hidden.register_hook\(.*  # here`: register_hook is called with a function",
    DrawsFromPython: "in forward: `return .*`: the forward draws from Python's random .*torch's default generator",
    DrawsFromNumpy: "in forward: `return .*`: the forward draws from numpy's generator",
    DropsLayers: r"in _dropped: `if random.random\(\) < 0.5:  .*# here`: .*a dropped layer is `y = layer.x.`",
    CountsElsewhere: r"the buffer 'count', which the forward changes, .*`self.count \+= 1  # here`: in layer 0 and .*"
    r"`return .*`: in layer 1 \(read it where it is changed, as in `count = self.count.clone\(\)`",
    ArrayInForward: "`return .*  # here`: it makes a tensor of an array .*register it as a buffer",
    ArrayAsTensor: "`return .*  # here`: it makes a tensor of a ndarray .*register it as a buffer",
    Logs: r"`print.*  # here`: item gives Python a value \(leave it out if it is for a log",
    Asserts: r"`assert .*  # here`: __bool__ gives Python a value \(leave the assertion out",
    HiddenParameter: r"`return .*  # here`: a tensor with gradients that is not a parameter",
    OverwritesConstant: r"`self.count \+= 1  # here`: it overwrites a tensor that is not a buffer",
    EarlyLabels: r"`return .*  # here`: 'b.weight' meets a value that depends on the targets .*give the targets as an",
    DrawsInLoss: r"`return .*  # here`: the loss draws random numbers .*draw them before the loss",
    LabelsWithoutLoss: "expected a forward that takes targets and returns the loss, found NoneType as the loss of dict",
    OtherBorder: r"float32 \[4, 32\], float32 \[4, 32\] in training, float32 \[4, 32\] in evaluation, at the begin",
    CountsCalls: r"in _factor: `self.calls \+= 1  # here`: the forward changes 'calls'.*register it as a buffer",
    GrowsList: r"`self.seen\[\"shapes\"\].append\(x.shape\)  # here`: the forward changes 'seen'",
    FirstIsOther: r"`self.is_first = False  # here`: the forward changes 'is_first'",
    Recalls: r"`self.last = .*  # here`: the forward changes 'last'",
    ExtraState: "the extra state of 'ExtraState'",
}


APPLY = torch.autograd.Function.__dict__["apply"]  # which is another one while a module is recorded


@looped("made", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_its_line(made: type[nn.Module]) -> None:
    with pytest.raises(UserError) as caught:
        built(f"{__name__}:{made.__name__}")
    assert re.search(REFUSED[made], str(caught.value))
    if "# here" in REFUSED[made]:
        assert re.search(r"test_ordinary_modules.py:\d+, in \w+: ", str(caught.value))
    assert torch.autograd.Function.__dict__["apply"] is APPLY


def test_a_submodule_may_return_its_input_in_some_microbatches() -> None:
    job, model, batch = built(f"{__name__}:Skipping")
    layers, module = [build_layer(job, model, index) for index in range(len(model.layers))], whole(job, Skipping)
    inputs = [batch.inputs[0], -batch.inputs[0], -2 * batch.inputs[0]]
    hidden = module.get_submodule("a")
    assert len({bool(hidden(each).sum() > 0) for each in inputs}) == 2
    for each in inputs:
        assert torch.equal(through(layers, (each,))[0], module(each))


def test_an_exception_in_a_piece_shows_the_line_of_the_module() -> None:
    job, model, _ = built(f"{MODULES}:language_model", "text")
    with pytest.raises(IndexError) as caught:
        build_layer(job, model, 0)(torch.full((4, 32), 999))
    told = exception_of(caught.value)
    assert told.file == "tests/e2e/ordinary_modules.py"
    assert "x = self.drop(self.wte(input_ids) + self.wpe(positions))" in told.frames


def test_a_language_model_is_cut_at_its_blocks() -> None:
    _, model, batch = built(f"{MODULES}:language_model", "text")
    names = [layer.name.removeprefix("from transformer.") for layer in model.layers]
    assert names == ["wte", "wpe", "h.0", "h.1", "h.2", "h.3", "ln_f", "from lm_head"]
    assert [layer.kind for layer in model.layers][2:4] == ["Block", "Block"]
    assert [tie.uses for tie in model.ties] == [((0, "transformer.wte.weight"), (7, "lm_head.weight"))]
    assert len(model.shared_buffers) == 1
    assert isinstance(model.loss, OutputLoss)
    assert batch.inputs[0].shape == (4, 32)
    with pytest.raises(UserError, match="loss: expected no value with a model that has its own, found 'mse'"):
        built(f"{MODULES}:language_model", "text", loss="mse")


@pytest.mark.parametrize(
    ("split", "number"), [("*.h.*", 6), ("transformer.h.1, transformer.h.3", 5), ("lm_head", 2), ("3", 3), ("1", 1)]
)
def test_splits(split: str, number: int) -> None:
    _, model, _ = built(f"{MODULES}:language_model", "text", split=split)
    assert len(model.layers) == number


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (
            "transformer.k.*",
            r"split: expected names of submodules that the forward calls, such as transformer\.h\.\*, .*lm_head.*, "
            r"found 'transformer\.k",
        ),
        ("ml_head", r"such as lm_head, .*transformer\.h\.\*.*, found 'ml_head'"),
        ("99", "split: expected at most .*, the places where this module can be cut, found 99"),
    ],
)
def test_splits_that_cannot_be(split: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        built(f"{MODULES}:language_model", "text", split=split)


def test_a_list_of_layers_is_not_split() -> None:
    with pytest.raises(UserError, match=r"split: expected no value, found '2' for .*a list of layers already"):
        built("tests.runtime.weights_models:sequential", split="2")


def test_a_built_in_model_is_not_split() -> None:
    assert [each.field for each in check_job(Job(split="0"))] == ["split"]
    with pytest.raises(UserError, match="split: expected no value with the model gpt, found '2'"):
        built("gpt", "text", split="2")


def test_the_cut_does_not_depend_on_the_number_of_stages() -> None:
    job = Job(model=f"{MODULES}:resnet18", data="digits", split="4")
    source = open_data(job)
    one, other = (build_model(replace(job, stages=stages), source.facts, source).layers for stages in (1, 4))
    assert [layer.name for layer in one] == [layer.name for layer in other]
    assert len(one) == 4


def test_masks_are_made_again_and_do_not_travel() -> None:
    job, model, batch = built(f"{MODULES}:language_model", "text")
    values: Tensors = batch.inputs
    numbers = []
    for index in range(len(model.layers)):
        values = as_tensors(build_layer(job, model, index)(*values), "a layer")
        numbers.append(len(values))
    assert numbers == [1] * 8
