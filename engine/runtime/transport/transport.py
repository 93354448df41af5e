"""The transport of a worker: the protocol that every backend implements and other rooms use.

    backend     one per worker: joins the group of an epoch
    transport   the messages of one group, in two channels
    in_order    messages in program order: the transfers of a program
    aside       messages that may be late: streams, heals, validation passes, shards

Rules: a key identifies a message within the epoch that both ends are in; its type determines the channel. The main
thread of a worker calls everything here but `Joining`. It waits only in the `Waiter`, which a newer epoch interrupts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.core.action import Action
from engine.core.errors import ensure
from engine.core.links import Disturbance
from engine.core.ownership import Grid
from engine.core.program.dependencies import carried
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.device.copies import Leaving
from engine.runtime.device.device import Device
from engine.runtime.transport.link_wire import Met


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether its gradient is sent back.

    Specs are learned once at the start, so transfers carry nothing but data. The sizes of an open spec are an example,
    those of the first microbatch: the sizes of each tensor travel with it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    is_open: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """The size of such a tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has this spec."""
        shape = self.shape if not self.is_open or tensor.dim() != len(self.shape) else tensor.shape
        return (tensor.shape, tensor.dtype, tensor.requires_grad) == (shape, self.dtype, self.needs_grad)

    def in_words(self, other: TensorSpec) -> str:
        """Returns the spec in words; mentions the gradient only if nothing else differs from `other`."""
        words = f"{list(self.shape)} {self.dtype}"
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return words
        return f"{words} {'with' if self.needs_grad else 'without'} a gradient"

    def as_gradient(self) -> TensorSpec:
        """Returns the spec of the gradient of such a tensor."""
        return replace(self, needs_grad=False)

    def empty(self, device: Device) -> Tensor:
        """Returns an uninitialized tensor on a device."""
        return torch.empty(self.shape, dtype=self.dtype, device=device.place)

    def zeros(self, device: Device) -> Tensor:
        """Returns a tensor of zeros on a device, as a trial input of a layer."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device.place).requires_grad_(self.needs_grad)

    def to_json(self) -> tuple[tuple[int, ...], str, bool]:
        """Returns the spec as plain values."""
        return self.shape, str(self.dtype).removeprefix("torch."), self.needs_grad

    @classmethod
    def from_json(cls, value: tuple[tuple[int, ...], str, bool], *, is_open: bool = False) -> TensorSpec:
        """Returns the spec for a value of `to_json`."""
        shape, dtype, needs_grad = value
        return cls(tuple(shape), getattr(torch, dtype), needs_grad, is_open)


Border = tuple[TensorSpec, ...]  # the tensors that one stage hands to the next


def border_of(tensors: Tensors, *, is_open: bool = False) -> Border:
    """Returns the border of these tensors."""
    return tuple(replace(TensorSpec.of(tensor), is_open=is_open) for tensor in tensors)


def whole_border(border: Border, slices: int) -> Border:
    """Returns the border of whole microbatches, by that of one of their slices along dimension 1."""
    if slices == 1:
        return border
    return tuple(replace(spec, shape=(spec.shape[0], spec.shape[1] * slices, *spec.shape[2:])) for spec in border)


def difference(expected: Border, tensors: Tensors) -> str:
    """Returns in words how tensors differ from the specs learned at the start; an empty string if they fit."""
    if len(tensors) == len(expected) and all(map(TensorSpec.fits, expected, tensors)):
        return ""
    border = border_of(tensors)
    wrong = " and ".join(
        f"{one.in_words(other)} instead of {other.in_words(one)}"
        for one, other in zip(border, expected, strict=False)
        if (one.shape, one.dtype, one.needs_grad) != (other.shape, other.dtype, other.needs_grad)
    )
    return wrong or f"{len(border)} tensors instead of {len(expected)}"


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient with the strides of its parameter; a copy only if they differ."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


# Keys of messages between workers, equal at sender and receiver; the type of a key determines the channel.
#
# In program order: for each pair of workers, the receiver posts messages in the order in which the sender sends them,
# which both know from the program. Aside: messages may be late, or never come, and no other message waits for them.

_MAX_TIES = 64


class ProgramPurpose(IntEnum):
    """The content of a message in program order."""

    ACTIVATION = 0
    GRADIENT = 1
    SCATTER = 3
    GATHER = 4
    TIE = 5
    ENDING = 6  # buffers and losses of a pipeline
    LOG = 7


class AsidePurpose(IntEnum):
    """The content of a message aside."""

    VALIDATION = 2
    HEAL = 8
    STREAM = 9
    SHARD = 10
    RESIDUAL = 11


class ProgramKey(NamedTuple):
    """A message in program order; `item` is a microbatch, a tie, a part, or 0, and `number` encodes all fields."""

    purpose: ProgramPurpose
    pipeline: int
    stage: int
    item: int
    number: int


class AsideKey(NamedTuple):
    """A message aside, with the fields of a ProgramKey."""

    purpose: AsidePurpose
    pipeline: int
    stage: int
    item: int
    number: int


class Issued(NamedTuple):
    """One end of a transfer of a program; on a backend without tags, a worker issues them in a fixed order."""

    is_send: bool
    peer: int
    key: ProgramKey
    border: Border


def program_key(grid: Grid, purpose: ProgramPurpose, pipeline: int, stage: int, item: int = 0) -> ProgramKey:
    """Returns the key of a message in program order for a slot."""
    return ProgramKey(purpose, pipeline, stage, item, _number(grid, purpose, pipeline, stage, item))


def aside_key(grid: Grid, purpose: AsidePurpose, pipeline: int, stage: int, item: int = 0) -> AsideKey:
    """Returns the key of a message aside for a slot."""
    return AsideKey(purpose, pipeline, stage, item, _number(grid, purpose, pipeline, stage, item))


def _number(grid: Grid, purpose: int, pipeline: int, stage: int, index: int) -> int:
    num_indexes = grid.microbatches + _MAX_TIES
    ensure(index < num_indexes, f"index {index} of a transfer, where {num_indexes} are numbered")
    return ((purpose * grid.pipelines + pipeline) * grid.stages + stage) * num_indexes + index


def carrier_key(grid: Grid, transfer: Action) -> ProgramKey:
    """Returns the key of a SEND or RECV of a step."""
    return value_key(grid, carried(transfer))


def value_key(grid: Grid, value: Value) -> ProgramKey:
    """Returns the key of an activation or a gradient."""
    kind, pipeline, stage, microbatch = value
    purpose = ProgramPurpose.GRADIENT if kind is Kind.GRADIENT else ProgramPurpose.ACTIVATION
    return program_key(grid, purpose, pipeline, stage, microbatch)


def validation_key(grid: Grid, transfer: Action) -> AsideKey:
    """Returns the key of a SEND or RECV of a validation pass."""
    _, pipeline, stage, microbatch = carried(transfer)
    return aside_key(grid, AsidePurpose.VALIDATION, pipeline, stage, microbatch)


Found = TypeVar("Found")
AnyKey = TypeVar("AnyKey", bound=ProgramKey | AsideKey)
_Key_contra = TypeVar("_Key_contra", contravariant=True)


class LinkFaults(NamedTuple):
    """The faults of a worker's connections, `LinkCuts.cut` and `Links.disturb`; by default there is no connection."""

    cut: Callable[[int, str, int | None, Callable[[str], None]], bool] = lambda *given: False
    disturb: Callable[[int, Disturbance, Met], bool] = lambda *given: False


class Waiter(Protocol):
    """The place where the main thread of a worker waits; the control thread provides it."""

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called again after every `wake`, returns a value; may raise to end the wait."""

    def wake(self) -> None:
        """Makes the main thread look again."""


class Channel(Protocol[_Key_contra]):
    """The messages between this worker and others under one kind of key; received tensors are on its device."""

    @property
    def device(self) -> Device:
        """The device on which received tensors are."""

    def post(self, source: int, key: _Key_contra, border: Border) -> None:
        """Posts the receive of one message, without waiting; in program order, in the order of the source's sends."""

    def has_arrived(self, source: int, key: _Key_contra) -> bool:
        """Returns whether `take` would return at once."""

    def take(self, source: int, key: _Key_contra) -> Tensors:
        """Waits for a posted message and returns its tensors; raises TransferFailedError and the waiter's errors."""

    def take_arrived(self, source: int, key: _Key_contra) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived; never waits, never raises."""

    def leaving(self, key: _Key_contra, tensors: Leaving) -> Leaving:
        """Starts copying the tensors of a message to where it is sent from, once for all of its targets."""

    def send(self, target: int, key: _Key_contra, tensors: Leaving) -> None:
        """Starts one message to a worker; never waits. Raises TransferFailedError if the connection broke.

        The tensors must not change before the commit of the step, or aside until they are sent and released.
        """


class Traffic(NamedTuple):
    """The message counts to and from one other member, since the group was formed."""

    sent: int = 0  # started, at this end
    posted: int = 0
    received: int = 0


class Transport(Protocol):
    """The messages of one worker in one group; the training loop sets `epoch` for the next ones."""

    epoch: int

    @property
    def bytes_sent(self) -> int:
        """The size of all messages sent from here."""

    @property
    def in_order(self) -> Channel[ProgramKey]:
        """The messages in program order."""

    @property
    def aside(self) -> Channel[AsideKey]:
        """The messages aside."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the message counts of both channels by other member; any thread may ask."""

    def rates(self) -> Mapping[int, int]:
        """Returns the bytes a second of links to workers of other hosts, as far as they are known."""

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Accepts the transfers of a program that is about to run, in issue order; none for a backend with tags."""

    def begin(self) -> None:
        """Replaces the previous group, after a `join` in advance; its connections can be cut from now on."""

    def release_sent(self) -> None:
        """Releases the tensors sent in program order, after the commit of their step; all have been received."""

    def abandon(self) -> None:
        """Cancels all messages and leaves the group within milliseconds; ends every wait for it."""

    def close(self) -> None:
        """Leaves the group when no message is in flight at any member."""


class Joining(Protocol):
    """One attempt to join the group of an epoch."""

    @property
    def may_wait(self) -> bool:
        """Whether `join` may wait for other members, and needs a thread."""

    def join(self) -> Transport:
        """Waits until all members have joined; raises TransferFailedError if the group could not be formed."""

    def abandon(self) -> None:
        """Ends a `join` in another thread, which then raises TransferFailedError."""


class TransportBackend(Protocol):
    """How one worker joins its groups."""

    link_faults: LinkFaults

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> Joining:
        """Returns an attempt to join the group of `epoch`; a numbered one waits for `Transport.begin`."""
