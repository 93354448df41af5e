"""Optimizers by their class: torch's bits, state that any instance can go on with, and refusals with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import ReplicasDifferError, UserError
from engine.core.job.job import Job
from engine.core.job.torch_parts import OPTIMIZERS, given_arguments
from engine.core.units import Args
from engine.runtime.stage.class_optimizer import OptimizerClass
from engine.runtime.stage.optimizer import LayerOptimizer, trainable
from engine.runtime.stage.trials import OptimizerTrial
from tests.runtime import user_optimizers
from tests.runtime.test_optimizer import Layer, bits, give_gradients, step

USER = "tests.runtime.user_optimizers"
ARGS: dict[str, list[Args]] = {
    "adam": [{"betas": "0.8,0.9", "amsgrad": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "rmsprop": [{"momentum": 0.9, "centered": True}],
    "adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
    "rprop": [{"etas": "0.4,1.3"}],
    "asgd": [{"t0": 2.0, "lambd": 0.1}],
}
CASES = [(name, args) for name in OPTIMIZERS if name != "muon" for args in ({}, *ARGS.get(name, []))]


def optimizer_of(layer: nn.Module, optimizer: str, args: Args | None = None, **more: Any) -> LayerOptimizer:
    return LayerOptimizer(Job(optimizer=optimizer, optimizer_args=args or {}, **more), layer)


def matrices() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 5, bias=False))


@pytest.mark.parametrize(("name", "args"), [*CASES, ("muon", {}), ("muon", {"ns_steps": 2})])
def test_owner_shadow_and_torchs_own_loop_have_the_same_bits(name: str, args: Args) -> None:
    owner, shadow, plain = (matrices() if name == "muon" else Layer() for _ in range(3))
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    part = OPTIMIZERS[name]
    off: dict[str, Any] = {} if name == "muon" else {"foreach": False}
    kwargs = given_arguments(part.arguments, args)
    reference = getattr(torch.optim, part.cls)(parameters, lr=1.0, **off, **kwargs)
    of_owner, of_shadow = optimizer_of(owner, name, args), optimizer_of(shadow, name, args)
    for number in range(6):
        rate = 0.1 / (number + 1)
        for layer in (owner, shadow, plain):
            give_gradients(layer, number)
        step(of_owner, rate)
        before, of_shadow = of_shadow, optimizer_of(shadow, name, args)  # as after a heal, or a resumed run
        of_shadow.state = {
            key: {part: each.clone() for part, each in named.items()} for key, named in before.state.items()
        }
        step(of_shadow, rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert bits(dict(owner.named_parameters())) == bits(dict(plain.named_parameters()))
        assert bits(dict(of_shadow.state_tensors())) == bits(dict(of_owner.state_tensors()))
    for parameter_name, parameter in trainable(plain):
        kept = {key: value for key, value in reference.state[parameter].items() if isinstance(value, Tensor)}
        assert bits(of_owner.state[parameter_name]) == bits(kept), parameter_name


def test_the_accumulators_and_the_gradients_are_left_alone() -> None:
    layer = Layer()
    give_gradients(layer, 0)
    before = {name: parameter.grad for name, parameter in trainable(layer)}
    copies = bits({name: grad for name, grad in before.items() if grad is not None})
    step(optimizer_of(layer, f"{USER}:Lion"), 0.1)
    assert all(parameter.grad is before[name] for name, parameter in trainable(layer))
    assert bits({name: grad for name, grad in before.items() if grad is not None}) == copies


def test_numbers_in_a_state_and_in_a_group_are_tensors_with_their_type() -> None:
    layer = nn.Linear(2, 2, bias=False)
    optimizer = optimizer_of(layer, f"{USER}:Counting")
    for number in range(3):
        give_gradients(layer, number)
        step(optimizer, 0.1)
    state = optimizer.state["weight"]
    assert {key: each.item() for key, each in state.items()} == {
        "steps:int": 3,
        "size:float": pytest.approx(0.9**3),
        "odd:bool": True,
        "group.t:int": 3,
    }
    assert [each.dtype for each in state.values()] == [torch.int64, torch.float64, torch.bool, torch.int64]


def trial(name: str, layer: nn.Module | None = None, **fields: Any) -> str:
    layer = layer or Layer()
    job = Job(optimizer=f"{USER}:{name}", **fields)
    return OptimizerTrial(job).run(0, layer, LayerOptimizer(job, layer))


@pytest.mark.parametrize("name", ["Lion", "Counting"])
def test_an_optimizer_whose_state_is_in_its_state_passes_with_one_mark(name: str) -> None:
    assert trial(name) == trial(name)
    assert trial(name, fsdp=1, pipelines=2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("InAttribute", "after step 0 the weight "),
        ("InAttribute", "; a step changes its attribute 'calls'"),
        ("SeldomInAttribute", "a step changes its attribute 'calls'"),
        ("InOwnMapping", "after step 1 the weight "),
        ("InModule", "differs between an owner and a shadow"),
        ("Drawing", "differs between an owner and a shadow"),
        ("DrawingElsewhere", "differs between an owner and a shadow"),
        ("LooksAcross", "after step 0 the weight "),
        ("KeepsList", "its state 'past' is a list; tensors and numbers are kept"),
    ],
)
def test_one_of_each_kind_is_refused_with_the_reason(name: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        trial(name)
    (problem,) = refused.value.problems
    assert problem.field == "optimizer"
    assert f"{USER}:{name}" in str(problem)
    assert told in str(problem)


def test_a_bit_that_flips_once_is_not_told_as_a_mistake_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_optimizers, "_FLIPS", [])
    with pytest.raises(ReplicasDifferError) as differing:
        trial("Flipping")
    found = r"layer 0: after step \d the weight \S+ differs between an owner and a shadow: \w{16} and \w{16}"
    assert re.match(
        rf"optimizer '.*:Flipping': {found}; a second trial gives both the same bits. Either", str(differing.value)
    )


def test_with_shards_it_must_work_element_by_element() -> None:
    assert trial("OfWholeTensor")
    with pytest.raises(UserError, match=r"the weight .* differs if it is stepped in 2 shards"):
        trial("OfWholeTensor", fsdp=1, pipelines=2)


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        (f"{USER}:WithoutRate", {}, "a constructor that takes lr"),
        (f"{USER}:halving", {}, "a class that is a torch.optim.Optimizer"),
        (f"{USER}:Lino", {}, "did you mean 'Lion'"),
        (f"{USER}:Lion", {"beta": 1.0}, "optimizer_args.beta: expected one of"),
        (f"{USER}:Lion", {"lr": 1.0}, "lr is a field of the job"),
        ("torch.optim:LBFGS", {}, "it calls the model again"),
        ("torch.optim:SparseAdam", {}, "sparse gradients only"),
    ],
)
def test_what_is_no_optimizer_for_bamboo_is_refused(name: str, args: Args, told: str) -> None:
    with pytest.raises(UserError, match=told):
        OptimizerClass(Job(optimizer=name, optimizer_args=args))


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [("adam", {"betas": "0.9,1.5"}, "Invalid beta"), ("muon", {}, "only supports 2D parameters")],
)
def test_what_the_class_refuses_is_a_users_mistake(name: str, args: Args, told: str) -> None:
    with pytest.raises(UserError, match=told):
        optimizer_of(Layer(), name, args).prepare()
