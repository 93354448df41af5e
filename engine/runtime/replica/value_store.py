"""The value store of a worker: activations and gradients of the open step by name, kept across epochs.

Rules: a value that goes to another owner stays until the commit if another worker can take over a slot. Any other value
stays until its use: a worker keeps its slots for the rest of the step, so a value between two of them is not needed
again, and a worker that dies leaves neither. Values are never changed in place.

With `on_host` a value that stays lies in pinned memory of the host once it was sent. A message over the host is sent
from there too, so that nothing is copied for it; a message between GPUs goes from the device, beside the copy. A use of
such a value brings it back.
"""

from __future__ import annotations

from engine.core.ownership import Ownership
from engine.core.program.routes import crosses
from engine.core.value import Value
from engine.models.layers import Tensors
from engine.runtime.device.copies import Leaving, ToHost
from engine.runtime.device.device import HOST, Device
from engine.runtime.stage.segment import cut_off


class ValueStore:
    """Activations and gradients of the open step; `keeps` those that go to other owners."""

    def __init__(self, keeps: bool, device: Device = HOST, *, on_host: bool = False):
        self._keeps, self._device, self._on_host = keeps, device, on_host
        self._tensors: dict[Value, Leaving] = {}
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
        found = self._tensors[value] if value in self._lasting else self._tensors.pop(value)
        return self._device.put_all(found) if isinstance(found, ToHost) else found

    def to_send(self, value: Value) -> Leaving:
        """Returns a value for a SEND."""
        return self._tensors[value] if self._keeps else self._tensors.pop(value)

    def sent(self, value: Value, leaving: Leaving) -> None:
        """Takes a value as it was sent, from the host or from the device."""
        if self._on_host and value in self._lasting:
            self._tensors[value] = self._device.copies.fetched(leaving)

    def values(self) -> tuple[Value, ...]:
        """Returns the names of the stored values, in order."""
        return tuple(sorted(self._tensors))

    def clear(self) -> None:
        """Drops all values, after the commit of the step."""
        self._tensors.clear()
        self._lasting.clear()
