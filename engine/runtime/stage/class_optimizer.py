"""Optimizers by class: a `torch.optim.Optimizer` per layer, which is lent its state for each step.

Rules: each parameter is a group of its own, so no step depends on the other parameters of the layer. The state of a
parameter is a plain mapping from name to tensor, for hashes, heals and checkpoints. Numbers in a state, and numbers
that a step changes in a group, become tensors whose name ends in their type (``step:int``). Anything else in a state is
refused. The class is instantiated at the first step: it imports torch's compiler, and shards come late.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError, nearest
from engine.core.job.job import FACTORY, Job
from engine.core.job.torch_parts import OPTIMIZERS, given_arguments, plain_argument
from engine.core.job.update_rules import ParamGroup, group_of, idle_groups, param_groups
from engine.core.manifest import prefixes
from engine.core.units import Args
from engine.models.arguments import check_user_args
from engine.models.layers import Model
from engine.models.user_code import running
from engine.models.user_factory import import_factory


def groups_by_layer(job: Job, model: Model, layers: Mapping[int, nn.Module]) -> dict[int, dict[str, ParamGroup]]:
    """Returns the parameter groups by layer and name; a tied parameter has the group of its first use."""
    by_layer: dict[int, dict[str, ParamGroup]] = {index: {} for index in layers}
    if not job.param_groups:
        return by_layer
    groups = param_groups(job.param_groups)
    for index, name, plain in _plain_names(model, layers):
        if (group := group_of(groups, plain)) is not None:
            by_layer[index][name] = group
    return by_layer


def check_groups(job: Job, model: Model, layers: Mapping[int, nn.Module]) -> None:
    """Raises UserError if a group of the job matches no parameter of the model; `layers` are all of them."""
    names = [plain for _, _, plain in _plain_names(model, layers)]
    if problems := idle_groups(param_groups(job.param_groups), names):
        raise UserError(problems)


def _plain_names(model: Model, layers: Mapping[int, nn.Module]) -> Iterable[tuple[int, str, str]]:
    """Yields layer, local name and plain name of each trained parameter; tied ones have that of the first use."""
    beginnings = prefixes([layer.name for layer in model.layers])
    first = {use: min(tie.uses) for tie in model.ties for use in tie.uses}
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                at, there = first.get((index, name), (index, name))
                yield index, name, f"{beginnings[at]}{there}"


Named = dict[str, Tensor]
_OFF = ("foreach", "fused", "capturable", "differentiable")  # they take other code paths, with other bits
_NO_STATE = ("params", "lr", "initial_lr")  # the entries of a group that are not state
_OF_GROUP = "group."
_TYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}


class OptimizerClass:
    """The class of a job's optimizer with its arguments; raises UserError for a class that cannot be used."""

    def __init__(self, job: Job):
        self.name = job.optimizer
        self.is_own = FACTORY.fullmatch(self.name) is not None
        part = OPTIMIZERS.get(self.name)
        self._forms = None if part is None else part.arguments
        self.kind: Callable[..., torch.optim.Optimizer] = (
            _own_class(self.name) if part is None else getattr(torch.optim, part.cls)
        )
        parameters = inspect.signature(self.kind).parameters
        if "lr" not in parameters:
            raise _wrong(
                self.name, "a constructor that takes lr", "the rate of each step comes from the job's schedule"
            )
        if self.is_own:
            if mine := sorted({"params", "lr", *_OFF} & job.optimizer_args.keys()):
                hint = "lr is a field of the job" if mine == ["lr"] else "bamboo sets it"
                raise UserError([Problem(f"optimizer_args.{mine[0]}", "another argument", repr(mine[0]), hint)])
            check_user_args("optimizer_args", partial(self.kind, []), job.optimizer_args)
        self._options = [name for name in parameters if name not in ("params", "lr", *_OFF)]
        self._rate = job.lr
        self._args = self.arguments(job.optimizer_args)
        self._off = {name: False for name in _OFF if name in parameters}

    def arguments(self, args: Args) -> dict[str, Any]:
        """Returns a job's arguments in the form that the class takes."""
        if self._forms is not None:
            return given_arguments(self._forms, args)
        return {name: plain_argument(value) for name, value in args.items()}

    def instance(self, named: Sequence[tuple[str, Tensor]], of_groups: Mapping[str, Args]) -> ClassOptimizer:
        """Returns an optimizer of some parameters, of which some have arguments of their own."""
        options = self._options
        if problems := [
            Problem(f"param_groups.{name}", f"one of lr, {', '.join(options)}", repr(name), nearest(name, options))
            for args in of_groups.values()
            for name in args
            if name not in options
        ]:
            raise UserError(problems)
        groups = [{"params": [tensor], **self.arguments(of_groups.get(name, {}))} for name, tensor in named]
        with running(f"the optimizer {self.name}", self.kind):
            try:
                optimizer = self.kind(groups, lr=self._rate, **self._args, **self._off)
            except (ValueError, TypeError) as error:
                raise _wrong(self.name, "arguments that the optimizer takes", str(error), "optimizer_args") from error
        return ClassOptimizer(self.name, optimizer, dict(named))


def _own_class(name: str) -> type[torch.optim.Optimizer]:
    cls = import_factory("optimizer", name)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise _wrong(name, "a class that is a torch.optim.Optimizer", f"it is {cls!r:.200}")
    if issubclass(cls, torch.optim.LBFGS):
        raise _wrong(name, "an optimizer that steps from gradients", "it calls the model again inside of a step")
    if issubclass(cls, torch.optim.SparseAdam):
        raise _wrong(name, "an optimizer that takes dense gradients", "it takes sparse gradients only")
    return cls


def _wrong(name: str, expected: str, hint: str, field: str = "optimizer") -> UserError:
    return UserError([Problem(field, expected, repr(name), hint)])


class ClassOptimizer:
    """An optimizer over named parameters, each in a group of its own."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]):
        self._name = name
        self.optimizer = optimizer
        self._named = named
        self._groups = dict(zip(named, optimizer.param_groups, strict=True))
        self._numbers = {parameter: _numbers_of(group) for parameter, group in self._groups.items()}
        # A constructor may initialize the state for the first step.
        self._first = {name: cloned(self._state_of(name)) for name in named}

    def fill(self, state: dict[str, Named]) -> None:
        """Fills the empty entries of `state` with the initial state."""
        for name in self._named:
            state[name] = state[name] or cloned(self._first[name])

    def step(self, gradients: Mapping[str, Tensor], rates: Mapping[str, float], state: dict[str, Named]) -> None:
        """Takes a step from `gradients`, which the optimizer may overwrite, and replaces the entries of `state`.

        A parameter without a gradient gets None, as torch's optimizers expect.
        """
        accumulators = {name: parameter.grad for name, parameter in self._named.items()}
        self.optimizer.state.clear()
        self.fill(state)
        for name, parameter in self._named.items():
            self._lend(name, state[name])
            self._groups[name]["lr"] = rates[name]
            parameter.grad = gradients.get(name)
        try:
            with running(f"the optimizer {self._name}", type(self.optimizer).step):
                self.optimizer.step()
                state.update({name: self._state_of(name) for name in self._named})
        finally:
            for name, parameter in self._named.items():
                parameter.grad = accumulators[name]

    def _lend(self, name: str, state: Named) -> None:
        own: dict[str, Any] = {}
        numbers = dict(self._numbers[name])
        for key, tensor in state.items():
            plain, _, kind = key.partition(":")
            value = _TYPES[kind][0](tensor.item()) if kind else tensor
            if plain.startswith(_OF_GROUP):
                numbers[plain.removeprefix(_OF_GROUP)] = value
            else:
                own[plain] = value
        self._groups[name].update(numbers)
        if own:
            self.optimizer.state[self._named[name]] = own

    def _state_of(self, name: str) -> Named:
        """Returns the state of a parameter, with the numbers of its group that have changed since the beginning."""
        state: Named = {}
        for key, value in self.optimizer.state.get(self._named[name], {}).items():
            state |= self._entry(name, key, value)
        for key, value in _numbers_of(self._groups[name]).items():
            before = self._numbers[name].get(key)
            if type(value) is not type(before) or value != before:
                state |= self._entry(name, f"{_OF_GROUP}{key}", value)
        return state

    def _entry(self, name: str, key: object, value: object) -> Named:
        if not isinstance(key, str) or not key or "/" in key or ":" in key:
            raise self._refused(name, f"its state has the key {key!r:.100}; a key is a text without / and :")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_nested:
                raise self._refused(name, f"its state {key!r} is not a dense tensor")
            return {key: value.detach() if value.requires_grad else value}
        kind = type(value).__name__
        if kind not in _TYPES or type(value) is not _TYPES[kind][0]:
            raise self._refused(name, f"its state {key!r} is a {kind}; tensors and numbers are kept")
        return {f"{key}:{kind}": torch.tensor(value, dtype=_TYPES[kind][1], device="cpu")}

    def _refused(self, parameter: str, why: str) -> UserError:
        return _wrong(self._name, "an optimizer whose state can be kept", f"{why} (parameter {parameter})")


def cloned(state: Named) -> Named:
    """Returns a copy of a parameter's state."""
    return {key: tensor.clone() for key, tensor in state.items()}


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_STATE and type(value) in (bool, int, float)}
