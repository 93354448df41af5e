"""The hashes of a replica, as a worker tells them: of each layer its state and buffers, with the marks of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.core.message_codec import CUT, cut
from engine.runtime.device.device import Device
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import MarkedHash, marked_hash

_MARKS_PER_ROW, _MOST_OF_NAME = 100, 300  # bytes of the name of a tensor; a row must fit into a message


def hash_rows(replica: Stage, device: Device) -> Iterator[Any]:
    """Yields the row of each layer of a replica at a step boundary."""
    for layer, module in replica.layers.items():
        with device.waiting():
            yield row_of(layer, module.named_buffers(), marked_hash(replica.optimizers[layer].state_tensors()))


def row_of(layer: int, buffers: Iterable[tuple[str, Tensor]], state: MarkedHash) -> Any:
    """Returns the row of a layer whose weights and optimizer state have this hash."""
    (of_state, marks), (of_buffers, marks_of_buffers) = state, marked_hash(buffers)
    return layer, of_state, of_buffers, _short(marks), _short(marks_of_buffers)


def _short(marks: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns the first marks of a layer, as a message takes them: they only explain a difference."""
    return tuple((cut(name, _MOST_OF_NAME, CUT), mark) for name, mark in marks[:_MARKS_PER_ROW])
