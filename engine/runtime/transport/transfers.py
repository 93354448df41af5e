"""The receives of a program or of a validation pass, posted ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from engine.core.action import RECEIVE_OPS, Action
from engine.core.program.dependencies import carried
from engine.core.program.routes import Routes
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transport import AnyKey, Channel

# Receives posted ahead: two for each direction hide a transfer behind one compute action. With less than one for each
# direction, an action would wait for a message that its sender has long had.
_POSTED_AHEAD = 4
_LEAST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Receive(Generic[AnyKey]):
    """One receive of a program: the value, its source worker, its key and the specs of its tensors."""

    value: Value
    source: int
    key: AnyKey
    border: Border


class Receiver(Generic[AnyKey]):
    """Posts the receives of a program ahead, in order, and returns each to its action.

    Posting takes time, so it happens when the worker is idle, before a wait. A worker that never waits has it done in
    `begin`, which it calls behind each send, before too few are posted.
    """

    def __init__(self, channel: Channel[AnyKey], receives: Sequence[Receive[AnyKey]]):
        self._channel = channel
        self._receives = receives
        self._num_posted = 0
        self._num_taken = 0

    def begin(self) -> None:
        """Posts receives if too few are posted."""
        if self._num_posted < self._num_taken + _LEAST_AHEAD:
            self._post()

    def must_wait(self) -> bool:
        """Returns whether `take` would wait."""
        receive = self._receives[self._num_taken]
        return not self._channel.has_arrived(receive.source, receive.key)

    def _post(self) -> None:
        while self._num_posted < min(len(self._receives), self._num_taken + _POSTED_AHEAD):
            receive = self._receives[self._num_posted]
            self._channel.post(receive.source, receive.key, receive.border)
            self._num_posted += 1

    def take(self) -> tuple[Value, Tensors]:
        """Waits for the next receive of the program; returns its value and its tensors, ready as input of a layer."""
        receive = self._receives[self._num_taken]
        if self.must_wait():  # also true if it is not posted yet
            self._post()
        tensors = self._channel.take(receive.source, receive.key)
        self._num_taken += 1
        ready = tuple(
            tensor.requires_grad_(spec.needs_grad) for tensor, spec in zip(tensors, receive.border, strict=True)
        )
        return receive.value, ready


def receives_of(
    actions: Sequence[Action], routes: Routes, borders: Sequence[Border], key_of: Callable[[Action], AnyKey]
) -> list[Receive[AnyKey]]:
    """Returns the receives among a worker's actions, in order."""
    return [
        Receive(carried(action), routes.sources[carried(action)], key_of(action), border_of_carried(action, borders))
        for action in actions
        if action.op in RECEIVE_OPS
    ]


def border_of_carried(transfer: Action, borders: Sequence[Border]) -> Border:
    """Returns the specs of a SEND or RECV: the outputs of a stage, or the gradients of inputs that require one."""
    return border_of_value(carried(transfer), borders)


def border_of_value(value: Value, borders: Sequence[Border]) -> Border:
    """Returns the specs of an activation or a gradient."""
    kind, _, stage, _ = value
    if kind is Kind.ACTIVATION:
        return borders[stage]
    return tuple(spec.as_gradient() for spec in borders[stage - 1] if spec.needs_grad)
