"""Corruption: silent changes of tensors. The run must detect it and end; no mechanism hides it.

A NaN ends the run like a NaN of the model itself: the two cannot be told apart. A flipped bit in one of several
replicas is found by the next audit; in a lone replica, by the comparison with the fault-free twin.
"""

from __future__ import annotations

from typing import Any

from engine.core.faults.fault_kind import Parameter, at_once
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_INTO = Parameter("into", "choice", "the tensor with the NaN", "gradient", choices=("gradient", "activation"))
_BIT = Parameter("bit", "count", "which bit of the number, 0 the lowest", 0)


@fault_kind("nan", "A number in a gradient or an activation becomes NaN.", "worker", at_once, _INTO)
def nan(context: WorkerFaultContext) -> None:
    """Puts a NaN into the present gradient accumulator, or into the next output of the stage."""
    from engine.runtime.stage.segment import gradient_of

    stage = context.stage
    if stage is None:
        return
    if context.parameters["into"] == "gradient":
        layer, named = next((layer, named) for layer, named in stage.weights.items() if named)
        name, parameter = next(iter(named.items()))
        parameter.grad = gradient_of(parameter)
        parameter.grad[(0,) * parameter.dim()] = float("nan")
        context.tell(f"the gradient of {name} of {stage.where(layer)} has a NaN")
        return
    last = max(stage.layers)

    def poison(module: Any, inputs: Any, outputs: Any) -> Any:
        hook.remove()
        first, *others = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        context.tell(f"the output of {stage.where(last)} has become NaN")
        return (first * float("nan"), *others)

    hook = stage.layers[last].register_forward_hook(poison)


@fault_kind("flip-bit", "One bit of a parameter of a replica flips.", "worker", at_once, _BIT)
def flip_bit(context: WorkerFaultContext) -> None:
    """Flips a bit of the first number of the first parameter of the replica."""
    import torch

    stage = context.stage
    if stage is None:
        return
    layer, name, parameter = next(
        (layer, name, kept)
        for layer, optimizer in stage.optimizers.items()
        for name, kept in optimizer.kept.items()
        if kept.numel()
    )
    memory = parameter.data  # a write through `data` is invisible to autograd, as a flipped bit is
    first = (0,) * memory.dim()
    number = memory[first].clone().reshape(1)
    raw = number.view(torch.uint8)
    byte, bit = divmod(int(context.parameters["bit"]) % (8 * raw.numel()), 8)
    raw[byte] ^= 1 << bit
    memory[first] = number[0]
    context.tell(f"bit {context.parameters['bit']} of {name} of {stage.where(layer)} has flipped")
