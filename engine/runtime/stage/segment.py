"""A segment: the autograd graph of one layer, detached from the neighbouring layers.

A missing gradient is a tensor of minus zeros: -0.0 + x is x to the bit, so sums and transfers keep what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from engine.models.layers import Tensors
from engine.models.user_code import RAISED, blame


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors as leaves of a new graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def gradient_of(leaf: Tensor) -> Tensor:
    """Returns the gradient of a leaf; minus zeros if it has none, and plain zeros for a gradient of minus zeros."""
    if leaf.grad is None:
        return torch.full_like(leaf, -0.0, requires_grad=False)
    return torch.zeros_like(leaf.grad) if is_missing(leaf.grad) else leaf.grad


def is_missing(gradient: Tensor) -> bool:
    """Returns whether a gradient is minus zero everywhere; so is one without elements."""
    if gradient.is_sparse or not gradient.is_floating_point():
        return False
    if not gradient.numel():
        return True
    first = gradient.as_strided((), ()).item()  # nearly always another number, which costs no look at the rest
    if first != 0 or math.copysign(1, first) > 0:
        return False
    return bool(torch.signbit(gradient).all()) and not gradient.any()


@dataclass(slots=True)
class Segment:
    """The detached inputs and the outputs of one layer, between which its backward runs; `place` names the layer."""

    inputs: Tensors
    outputs: Tensors
    place: str

    def backward(self, gradients: Tensors, only_inputs: bool = False, keep_graph: bool = False) -> Tensors:
        """Runs the backward: adds to the gradients of the parameters, returns those of the inputs that require one.

        With `only_inputs` the parameters are left out. An input that was not used gets minus zeros, so that the
        transfers of a step do not depend on the data. With `keep_graph` a backward for the weights may follow.
        """
        needed = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
        # An empty tuple would mean all leaves to the engine.
        if needed or not only_inputs:
            self._run(gradients, needed if only_inputs else (), keep_graph)
        return tuple(gradient_of(tensor) for tensor in needed)

    def backward_weights(self, gradients: Tensors, parameters: Tensors) -> None:
        """Adds the same to the gradients of the parameters as the whole backward would; leaves the inputs out."""
        if parameters:
            self._run(gradients, parameters, keep_graph=False)

    def _run(self, gradients: Tensors, leaves: Tensors, keep_graph: bool) -> None:
        outputs = [output for output in self.outputs if output.requires_grad]
        roots = [pair for pair in zip(outputs, gradients, strict=bool(outputs)) if not is_missing(pair[1])]
        if not roots:
            return
        try:
            # torch.autograd.backward, the wrapper of this function, would import sympy: 0.3 s per worker.
            _engine_run_backward(
                *zip(*roots, strict=True), keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
            )
        except RAISED as error:
            blame(error, f"the backward of {self.place}")
            raise
