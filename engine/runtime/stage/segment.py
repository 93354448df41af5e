"""A segment: one layer's share of the graph of autograd, cut off from the layers beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import _engine_run_backward

from engine.models.layers import Tensors


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors as leaves of a new graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


@dataclass(slots=True)
class Segment:
    """What one layer keeps for its backward: the inputs it was cut off at, and its outputs."""

    inputs: Tensors
    outputs: Tensors

    def backward(self, gradients: Tensors, only_inputs: bool = False, keep_graph: bool = False) -> Tensors:
        """Runs the backward; returns the gradients of the inputs that need one, and adds to those of the parameters.

        With `only_inputs` no parameter is touched. A missing gradient counts as zeros, so that what is sent does not
        depend on use. With `keep_graph` a backward for the weights may follow.
        """
        needed = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
        # To the engine, no inputs at all means: every leaf there is.
        if needed or not only_inputs:
            self._run(gradients, needed if only_inputs else (), keep_graph)
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in needed)

    def backward_weights(self, gradients: Tensors, parameters: Tensors) -> None:
        """Adds to the gradients of the parameters what the whole backward would add; touches no input."""
        if parameters:
            self._run(gradients, parameters, keep_graph=False)

    def _run(self, gradients: Tensors, leaves: Tensors, keep_graph: bool) -> None:
        outputs = tuple(output for output in self.outputs if output.requires_grad)
        if outputs:
            # What torch.autograd.backward calls; the wrapper would import sympy to compare shapes: 0.3 s per worker.
            _engine_run_backward(
                outputs, gradients, keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
            )
