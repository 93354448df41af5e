"""The value store of a worker: activations and gradients of the open step by name, kept across epochs.

Rules: a value made here stays until the commit if another worker can take over a slot, else until its one use. A
received value stays until its use. Values are never changed in place.
"""

from __future__ import annotations

from engine.core.value import Value
from engine.models.layers import Tensors
from engine.runtime.stage.segment import cut_off


class ValueStore:
    """Activations and gradients of the open step."""

    def __init__(self, keeps: bool):
        self._keeps = keeps
        self._tensors: dict[Value, Tensors] = {}
        self._made: set[Value] = set()

    def make(self, value: Value, tensors: Tensors) -> None:
        """Stores a value that was made here, detached from its autograd graph."""
        self._tensors[value] = cut_off(tensors)
        if self._keeps:
            self._made.add(value)

    def receive(self, value: Value, tensors: Tensors) -> None:
        """Stores a value that was received."""
        self._tensors[value] = tensors

    def consume(self, value: Value) -> Tensors:
        """Returns a value to the one action of this worker that consumes it."""
        return self._tensors[value] if value in self._made else self._tensors.pop(value)

    def to_send(self, value: Value) -> Tensors:
        """Returns a value for a SEND."""
        return self._tensors[value] if self._keeps else self._tensors.pop(value)

    def values(self) -> tuple[Value, ...]:
        """Returns the names of the stored values, in order."""
        return tuple(sorted(self._tensors))

    def clear(self) -> None:
        """Drops all values, after the commit of the step."""
        self._tensors.clear()
        self._made.clear()
