"""A segment: the autograd graph of one layer, detached from the neighbouring layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import _engine_run_backward

from engine.models.layers import Tensors
from engine.models.user_code import RAISED, blame


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors as leaves of a new graph."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


@dataclass(slots=True)
class Segment:
    """The detached inputs and the outputs of one layer, between which its backward runs; `place` names the layer."""

    inputs: Tensors
    outputs: Tensors
    place: str

    def backward(self, gradients: Tensors, only_inputs: bool = False, keep_graph: bool = False) -> Tensors:
        """Runs the backward: adds to the gradients of the parameters, returns those of the inputs that require one.

        With `only_inputs` the parameters are left out. An input that was not used gets zeros, so that the transfers of
        a step do not depend on the data. With `keep_graph` a backward for the weights may follow.
        """
        needed = tuple(tensor for tensor in self.inputs if tensor.requires_grad)
        # An empty tuple would mean all leaves to the engine.
        if needed or not only_inputs:
            self._run(gradients, needed if only_inputs else (), keep_graph)
        return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in needed)

    def backward_weights(self, gradients: Tensors, parameters: Tensors) -> None:
        """Adds the same to the gradients of the parameters as the whole backward would; leaves the inputs out."""
        if parameters:
            self._run(gradients, parameters, keep_graph=False)

    def _run(self, gradients: Tensors, leaves: Tensors, keep_graph: bool) -> None:
        outputs = tuple(output for output in self.outputs if output.requires_grad)
        if not outputs:
            return
        try:
            # torch.autograd.backward, the wrapper of this function, would import sympy: 0.3 s per worker.
            _engine_run_backward(
                outputs, gradients, keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
            )
        except RAISED as error:
            blame(error, f"the backward of {self.place}")
            raise
