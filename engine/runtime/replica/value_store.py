"""The value store of a worker: activations and gradients of the open step by name, kept across epochs.

Rules: a value that goes to another owner stays until the commit if another worker can take over a slot. Any other value
stays until its use: a worker keeps its slots for the rest of the step, so a value between two of them is not needed
again, and a worker that dies leaves neither. Values are never changed in place.
"""

from __future__ import annotations

from engine.core.ownership import Ownership
from engine.core.program.routes import crosses
from engine.core.value import Value
from engine.models.layers import Tensors
from engine.runtime.stage.segment import cut_off


class ValueStore:
    """Activations and gradients of the open step."""

    def __init__(self, keeps: bool):
        self._keeps = keeps
        self._tensors: dict[Value, Tensors] = {}
        self._lasting: set[Value] = set()

    def enter(self, ownership: Ownership) -> None:
        """Sets the ownership of the next program."""
        self._ownership = ownership

    def make(self, value: Value, tensors: Tensors) -> None:
        """Stores a value that was made here, detached from its autograd graph."""
        self._tensors[value] = cut_off(tensors)
        if self._keeps and crosses(value, self._ownership):
            self._lasting.add(value)

    def receive(self, value: Value, tensors: Tensors) -> None:
        """Stores a value that was received."""
        self._tensors[value] = tensors

    def consume(self, value: Value) -> Tensors:
        """Returns a value to the one action of this worker that consumes it."""
        return self._tensors[value] if value in self._lasting else self._tensors.pop(value)

    def to_send(self, value: Value) -> Tensors:
        """Returns a value for a SEND."""
        return self._tensors[value] if self._keeps else self._tensors.pop(value)

    def values(self) -> tuple[Value, ...]:
        """Returns the names of the stored values, in order."""
        return tuple(sorted(self._tensors))

    def clear(self) -> None:
        """Drops all values, after the commit of the step."""
        self._tensors.clear()
        self._lasting.clear()
