"""Keys of transfers, equal at sender and receiver, and the receives of a program, posted ahead of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.core.action import RECEIVE_OPS, Action
from engine.core.errors import ensure
from engine.core.ownership import Grid
from engine.core.program.dependencies import carried
from engine.core.program.routes import Routes
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.tensor_spec import Border

# Receives posted ahead: two for each direction hide a transfer behind one compute action.
_POSTED_AHEAD = 4
_MAX_TIES = 64


class Purpose(IntEnum):
    """The content of a transfer."""

    ACTIVATION = 0
    GRADIENT = 1
    VALIDATION = 2
    SCATTER = 3
    GATHER = 4
    TIE = 5
    ENDING = 6  # buffers and losses of a pipeline
    LOG = 7
    HEAL = 8
    STREAM = 9
    MEETING = 10  # an empty token of a barrier


def transfer_key(grid: Grid, purpose: Purpose, pipeline: int, stage: int, index: int = 0) -> int:
    """Returns the number of a transfer for a slot; `index` is a microbatch, a tie, or 0 if neither applies."""
    num_indexes = grid.microbatches + _MAX_TIES
    ensure(index < num_indexes, f"index {index} of a transfer, where {num_indexes} are numbered")
    return ((purpose * grid.pipelines + pipeline) * grid.stages + stage) * num_indexes + index


@dataclass(frozen=True, slots=True)
class Receive:
    """One receive of a program: the value, its source worker, its key and the specs of its tensors."""

    value: Value
    source: int
    key: int
    border: Border


class Receiver:
    """Posts the receives of a program ahead, in order, and returns each to its action.

    Posting takes time, so it happens when the worker is idle: in `begin` or before a wait.
    """

    def __init__(self, plane: DataPlane, receives: Sequence[Receive]):
        self._plane = plane
        self._receives = receives
        self._num_posted = 0
        self._num_taken = 0

    def begin(self) -> None:
        """Posts the first receives, unless they are posted."""
        if not self._num_posted:
            self._post()

    def must_wait(self) -> bool:
        """Returns whether `take` would wait."""
        receive = self._receives[self._num_taken]
        return not self._plane.has_arrived(receive.source, receive.key)

    def _post(self) -> None:
        while self._num_posted < min(len(self._receives), self._num_taken + _POSTED_AHEAD):
            receive = self._receives[self._num_posted]
            self._plane.post(receive.source, receive.key, receive.border)
            self._num_posted += 1

    def take(self) -> tuple[Value, Tensors]:
        """Waits for the next receive of the program; returns its value and its tensors, ready as input of a layer."""
        receive = self._receives[self._num_taken]
        if self.must_wait():  # also true if it is not posted yet
            self._post()
        tensors = self._plane.take(receive.source, receive.key)
        self._num_taken += 1
        ready = tuple(
            tensor.requires_grad_(spec.needs_grad) for tensor, spec in zip(tensors, receive.border, strict=True)
        )
        return receive.value, ready


def receives_of(
    actions: Sequence[Action], routes: Routes, grid: Grid, borders: Sequence[Border], validation: bool = False
) -> list[Receive]:
    """Returns the receives among a worker's actions, in order."""
    return [
        Receive(
            carried(action),
            routes.sources[carried(action)],
            carrier_key(grid, action, validation),
            border_of_carried(action, borders),
        )
        for action in actions
        if action.op in RECEIVE_OPS
    ]


def carrier_key(grid: Grid, transfer: Action, validation: bool = False) -> int:
    """Returns the key of a SEND or RECV."""
    kind, pipeline, stage, microbatch = carried(transfer)
    purpose = Purpose.GRADIENT if kind is Kind.GRADIENT else Purpose.VALIDATION if validation else Purpose.ACTIVATION
    return transfer_key(grid, purpose, pipeline, stage, microbatch)


def border_of_carried(transfer: Action, borders: Sequence[Border]) -> Border:
    """Returns the specs of a SEND or RECV: the outputs of a stage, or the gradients of inputs that require one."""
    kind, _, stage, _ = carried(transfer)
    if kind is Kind.ACTIVATION:
        return borders[stage]
    return tuple(spec.as_gradient() for spec in borders[stage - 1] if spec.needs_grad)
