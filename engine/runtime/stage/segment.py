"""A segment: the autograd graph of one layer, detached from the neighbouring layers.

A missing gradient is a tensor of minus zeros, so sums and transfers keep what is missing; no backward begins from one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from engine.models.layers import Tensors
from engine.models.user_code import RAISED, blame
from engine.runtime.device.missing_gradients import is_missing, made, marked_as, none_like


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors as leaves of a new graph."""
    return tuple(marked_as(tensor.detach().requires_grad_(tensor.requires_grad), tensor) for tensor in tensors)


def gradient_of(leaf: Tensor) -> Tensor:
    """Returns the gradient of a leaf; minus zeros if it has none, and plain zeros for a gradient of minus zeros."""
    return none_like(leaf) if leaf.grad is None else made(leaf.grad)


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
