"""Optimizers: torch's own arithmetic bit for bit, one instance per layer, frozen parameters left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.units import Args
from engine.runtime.stage.optimizer import LayerOptimizer, trainable
from tests.looped import looped

CLASSES: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class Layer(nn.Module):
    """Parameters of different shapes, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.narrow = nn.Parameter(torch.randn(6).bfloat16())
        self.register_buffer("counted", torch.zeros(1))


def give_gradients(layer: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def step(optimizer: LayerOptimizer, rate: float) -> None:
    """Takes a step from the gradients that the layer has."""
    found = {name: parameter.grad for name, parameter in optimizer.trained().items()}
    optimizer.step(rate, {name: gradient for name, gradient in found.items() if gradient is not None})


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.detach().reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}


@looped(
    ("name", "args", "theirs"),
    [
        ("adamw", {}, {}),
        ("adamw", {"weight_decay": 0.3, "eps": 1e-4}, {"weight_decay": 0.3, "eps": 1e-4}),
        ("adamw", {"beta1": 0.5, "beta2": 0.9}, {"betas": (0.5, 0.9)}),
        ("sgd", {}, {}),
        ("sgd", {"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ("sgd", {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "dampening": 0.2}),
        ("sgd", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_the_bits_are_those_of_torchs_own_class(name: str, args: Args, theirs: dict[str, Any]) -> None:
    ours, plain = Layer(), Layer()
    optimizer = LayerOptimizer(Job(optimizer=name, optimizer_args=args), ours)
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    reference = CLASSES[name](parameters, lr=1.0, foreach=False, **({"fused": False} | theirs))  # type: ignore[call-arg]
    for number in range(6):
        rate = 0.1 / (number + 1)
        for layer in (ours, plain):
            give_gradients(layer, number)
        step(optimizer, rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert bits(dict(ours.named_parameters())) == bits(dict(plain.named_parameters()))
    for parameter_name, parameter in plain.named_parameters():
        kept = {key: value for key, value in reference.state[parameter].items() if isinstance(value, Tensor)}
        assert bits(optimizer.state.get(parameter_name, {})) == bits(kept), parameter_name


@pytest.mark.parametrize("name", CLASSES)
def test_frozen_parameters_and_buffers_are_left_alone(name: str) -> None:
    layer = Layer()
    before = layer.frozen.clone()
    args: Args = {"weight_decay": 0.5}
    optimizer = LayerOptimizer(Job(optimizer=name, optimizer_args=args), layer)
    give_gradients(layer, 0)
    step(optimizer, 0.1)
    assert [each for each, _ in trainable(layer)] == ["scale", "narrow", "linear.weight", "linear.bias"]
    assert list(optimizer.state) == [each for each, _ in trainable(layer)]
    assert torch.equal(layer.frozen, before)
    assert layer.frozen.grad is None
    assert layer.get_buffer("counted").item() == 0


def test_a_factor_scales_the_gradients_and_leaves_them_as_they_are() -> None:
    one, other = Layer(), Layer()
    optimizers = [LayerOptimizer(Job(), layer) for layer in (one, other)]
    for number in range(3):
        give_gradients(one, number)
        gradients = {name: parameter.grad.clone() for name, parameter in trainable(one) if parameter.grad is not None}
        before = bits(gradients)
        optimizers[0].step(0.1, gradients, 0.3)
        assert bits(gradients) == before
        optimizers[1].step(0.1, {name: gradient.mul_(0.3) for name, gradient in gradients.items()})
    assert bits(dict(one.named_parameters())) == bits(dict(other.named_parameters()))


def test_a_missing_gradient_is_a_bug() -> None:
    layer = Layer()
    optimizer = LayerOptimizer(Job(), layer)
    give_gradients(layer, 0)
    layer.scale.grad = None
    with pytest.raises(KeyError, match="scale"):
        step(optimizer, 0.1)


def test_a_layer_without_parameters_has_nothing_to_step() -> None:
    optimizer = LayerOptimizer(Job(), nn.ReLU())
    optimizer.step(0.1, {})
    assert list(optimizer.state_tensors()) == []


def test_state_comes_in_the_order_of_parameters_weights_first() -> None:
    layer = Layer()
    optimizer = LayerOptimizer(Job(), layer)
    weights = ["frozen", "scale", "narrow", "linear.weight", "linear.bias"]
    assert [name for name, _ in optimizer.state_tensors()] == weights
    give_gradients(layer, 0)
    step(optimizer, 0.1)
    state = [f"{name}.{key}" for name in weights[1:] for key in ("exp_avg", "exp_avg_sq", "step")]
    assert [name for name, _ in optimizer.state_tensors()] == weights + state


def test_momentum_is_state_and_its_absence_is_none() -> None:
    layer = nn.Linear(2, 2)
    for momentum, keys in ((0.0, []), (0.9, ["weight.momentum_buffer", "bias.momentum_buffer"])):
        trained = copy.deepcopy(layer)
        optimizer = LayerOptimizer(Job(optimizer="sgd", optimizer_args={"momentum": momentum}), trained)
        give_gradients(trained, 0)
        step(optimizer, 0.1)
        assert [name for name, _ in optimizer.state_tensors()] == ["weight", "bias", *keys]


def test_two_layers_share_nothing() -> None:
    first, second = Layer(), Layer()
    optimizers = [LayerOptimizer(Job(), layer) for layer in (first, second)]
    for number in range(3):
        give_gradients(first, number)
        step(optimizers[0], 0.1)
    give_gradients(second, 0)
    step(optimizers[1], 0.1)
    assert optimizers[0].state["scale"]["step"].item() == 3
    assert optimizers[1].state["scale"]["step"].item() == 1


@looped(
    ("name", "args", "message"),
    [
        (
            "sgd",
            {"momentun": 0.9},
            "optimizer_args.momentun: expected one of dampening, momentum, nesterov, weight_decay, "
            "found 'momentun' (did you mean 'momentum'?)",
        ),
        (
            "adamw",
            {"lr": 0.1},
            "optimizer_args.lr: expected one of beta1, beta2, eps, weight_decay, found 'lr'",
        ),
        ("adamw", {"eps": "small"}, "optimizer_args.eps: expected a finite float32 number >= 0, found 'small'"),
        ("adamw", {"eps": 1e40}, "optimizer_args.eps: expected a finite float32 number >= 0, found 1e+40"),
        ("adamw", {"beta1": 1.0}, "optimizer_args.beta1: expected a number >= 0 and < 1, found 1.0"),
        ("adamw", {"beta2": 1.5}, "optimizer_args.beta2: expected a number >= 0 and < 1, found 1.5"),
        ("sgd", {"nesterov": 1}, "optimizer_args.nesterov: expected true or false, found 1"),
    ],
)
def test_arguments_that_it_does_not_take(name: str, args: Args, message: str) -> None:
    with pytest.raises(UserError) as refused:
        LayerOptimizer(Job(optimizer=name, optimizer_args=args), nn.Linear(1, 1))
    assert str(refused.value) == message


@pytest.mark.parametrize("args", [{}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_without_dampening(args: Args) -> None:
    with pytest.raises(UserError) as refused:
        LayerOptimizer(Job(optimizer="sgd", optimizer_args={"nesterov": True, **args}), nn.Linear(1, 1))
    assert str(refused.value) == (
        "optimizer_args.nesterov: expected momentum above 0 and no dampening with it, found True"
    )
