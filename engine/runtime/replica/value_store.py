"""What a worker holds of the open step: activations and gradients by name, whoever made them, in whichever epoch.

Rules: what was made here stays until the step is committed if anybody could take over a slot, and else leaves with its
one use; what was received leaves when it is used up. Nothing that is held is ever changed in place.
"""

from __future__ import annotations

from engine.core.program.dependencies import Value
from engine.models.layers import Tensors
from engine.runtime.stage.segment import cut_off


class Holdings:
    """Activations and gradients of the open step."""

    def __init__(self, keeps: bool):
        self._keeps = keeps
        self._tensors: dict[Value, Tensors] = {}
        self._made: set[Value] = set()

    def make(self, value: Value, tensors: Tensors) -> None:
        """Takes in what was made here, without the graph that it was made with."""
        self._tensors[value] = cut_off(tensors)
        if self._keeps:
            self._made.add(value)

    def receive(self, value: Value, tensors: Tensors) -> None:
        """Takes in what another worker sent."""
        self._tensors[value] = tensors

    def use_up(self, value: Value) -> Tensors:
        """Returns a value to the one action here that is made for it."""
        return self._tensors[value] if value in self._made else self._tensors.pop(value)

    def to_send(self, value: Value) -> Tensors:
        """Returns a value that others need."""
        return self._tensors[value] if self._keeps else self._tensors.pop(value)

    def values(self) -> tuple[Value, ...]:
        """Returns the names of what is held, in order."""
        return tuple(sorted(self._tensors))

    def clear(self) -> None:
        """Drops everything: the step is committed."""
        self._tensors.clear()
        self._made.clear()
