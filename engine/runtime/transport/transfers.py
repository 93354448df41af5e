"""Transfers over the channels of a transport: receives posted ahead, bulk transfers, the reduction over pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op, Program
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import Routes, carried, routes_of
from engine.core.program.issue_order import issued_by
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.runtime.transport.transport import (
    AnyKey,
    Border,
    Channel,
    Issued,
    ProgramKey,
    ProgramPurpose,
    TensorSpec,
    bytes_of,
    carrier_key,
    program_key,
    value_key,
)

# Receives posted ahead: two per direction hide a transfer behind one compute action. With less than one per direction,
# an action would wait for a message that has long been ready at its sender.
_POSTED_AHEAD = 4
_LEAST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Receive(Generic[AnyKey]):
    """One receive of a program: the value, its source worker, its key, and the specs of its tensors."""

    value: Value
    source: int
    key: AnyKey
    border: Border


class Receiver(Generic[AnyKey]):
    """Posts the receives of a program ahead, in order, and hands each message to its action.

    Posting takes time, so it happens while the worker is idle, before a wait. For a worker that never waits, `begin`,
    which it calls after each send, does it before too few are posted.
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
        """Waits for the next receive of the program; returns its value, and its tensors ready as input of a layer."""
        receive = self._receives[self._num_taken]
        tensors = self._channel.take_arrived(receive.source, receive.key)
        if tensors is None:
            if self.must_wait():  # also if it is not posted yet
                self._post()
            tensors = self._channel.take(receive.source, receive.key)
        self._num_taken += 1
        for tensor, spec in zip(tensors, receive.border, strict=True):
            if spec.needs_grad:  # a call into torch is slow in a process that has just woken up
                tensor.requires_grad_()
        return receive.value, tensors


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
    """Returns the specs of a SEND or RECV: the outputs of a stage, or the gradients of inputs that need one."""
    return border_of_value(carried(transfer), borders)


def border_of_value(value: Value, borders: Sequence[Border]) -> Border:
    """Returns the specs of an activation or a gradient."""
    kind, _, stage, _ = value
    if kind is Kind.ACTIVATION:
        return borders[stage]
    return tuple(spec.as_gradient() for spec in borders[stage - 1] if spec.needs_grad)


# Bulk transfers: many tensors under one key, sent as bytes in chunks of bounded size; the receiver knows the specs.
#
# Small tensors are packed into shared chunks. A large tensor is sent in slices of its own memory, without a copy.

_LARGE = 1 << 20  # bytes from which a tensor gets chunks of its own
_CHUNK = 16 << 20  # maximum bytes of a chunk

ByteRange = tuple[int, int, int]  # (tensor, first byte, end byte)


def chunks_of(sizes: Sequence[int]) -> list[list[ByteRange]]:
    """Returns the parts of each chunk for tensors of these sizes in bytes; sender and receiver agree on them."""
    chunks: list[list[ByteRange]] = []
    together: list[ByteRange] = []
    for index, size in enumerate(sizes):
        if size >= _LARGE:
            chunks += [[(index, start, min(start + _CHUNK, size))] for start in range(0, size, _CHUNK)]
        elif size:
            if together and sum(end for _, _, end in together) + size > _CHUNK:
                chunks.append(together)
                together = []
            together.append((index, 0, size))
    return [*chunks, together] if together else chunks


def send_bulk(channel: Channel[AnyKey], targets: Iterable[int], key: AnyKey, tensors: Sequence[Tensor]) -> None:
    """Starts a bulk transfer of tensors of one device to each target; they must not change before the commit."""
    payload = [bytes_of(tensor.detach().contiguous()) for tensor in tensors]
    payloads = [
        channel.device.copies.fetched((_joined([payload[index][start:end] for index, start, end in chunk]),))
        for chunk in chunks_of([len(part) for part in payload])
    ]
    for target in targets:
        for chunk in payloads:
            channel.send(target, key, chunk)


def post_bulk(channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec]) -> bool:
    """Posts the first receive of a bulk transfer ahead of `receive_bulk`; returns whether it is the only one."""
    chunks = chunks_of([spec.num_bytes for spec in specs])
    if chunks:
        channel.post(source, key, _border_of(chunks[0]))
    return len(chunks) < 2


def receive_bulk(
    channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec], is_posted: bool = False
) -> list[Tensor]:
    """Waits for a bulk transfer from `source`, which `post_bulk` may have posted; returns its tensors, contiguous."""
    tensors = dict(arriving(channel, source, key, specs, is_posted))
    return [tensors[index] for index in range(len(specs))]


def arriving(
    channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec], is_posted: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Yields each tensor of a bulk transfer with its index, large ones first: a receiver needs memory for one more."""
    sizes = [spec.num_bytes for spec in specs]
    yield from ((index, specs[index].empty(channel.device)) for index, size in enumerate(sizes) if size == 0)
    tensor: Tensor | None = None
    for number, chunk in enumerate(chunks_of(sizes)):
        if number or not is_posted:
            channel.post(source, key, _border_of(chunk))
        (arrived,) = channel.take(source, key)
        at = 0
        for index, start, end in chunk:
            tensor = specs[index].empty(channel.device) if tensor is None else tensor
            bytes_of(tensor)[start:end] = arrived[at : at + end - start]
            at += end - start
            if end == sizes[index]:
                yield index, tensor
                tensor = None
        del arrived  # before the next chunk comes


def _border_of(chunk: Sequence[ByteRange]) -> Border:
    return (TensorSpec((sum(end - start for _, start, end in chunk),), torch.uint8, False),)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# The reduction over pipelines: a deterministic all-reduce of gradients, and an all-gather of buffers and losses.
#
# Each owner of a stage sums one chunk of all D gradients in pipeline order, and sends the sum to the other owners:
#
#     owner 0  sends chunk 1 of its gradient  ->  adds up chunk 0  ->  sends the mean of chunk 0
#     owner 1  sends chunk 0 of its gradient  ->  adds up chunk 1  ->  sends the mean of chunk 1
#
# It sends as many bytes as a ring all-reduce, but the result does not depend on ranks or ownership. A worker that owns
# the stage in several pipelines contributes several parts. The accumulators do not change.


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """The owners of one stage, as seen by `worker`, one of them."""

    channel: Channel[ProgramKey]
    ownership: Ownership
    worker: int
    stage: int

    @property
    def others(self) -> tuple[int, ...]:
        """The other owners."""
        return tuple(owner for owner in self.ownership.owners_of(self.stage) if owner != self.worker)

    def pipelines(self, worker: int) -> tuple[int, ...]:
        """Returns the pipelines in which a worker owns the stage."""
        return self.ownership.pipelines_of(worker, self.stage)

    def key(self, purpose: ProgramPurpose, pipeline: int, index: int = 0) -> ProgramKey:
        """Returns the key of a transfer from the owner of the stage in `pipeline`."""
        return program_key(self.ownership.grid, purpose, pipeline, self.stage, index)


def mean_over_pipelines(group: ReduceGroup, parts: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Returns the mean over all pipelines of a stage's gradients; `parts` has those of the pipelines owned here.

    A collective: every owner of the stage must call it. With one pipeline the mean is the part itself, not a copy.
    """
    gradients = list(next(iter(parts.values())))
    if group.ownership.grid.pipelines == 1:
        return gradients
    dtypes = list(dict.fromkeys(gradient.dtype for gradient in gradients if gradient.numel()))
    for index, dtype in enumerate(dtypes):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        of_dtype = {pipeline: [part[place] for place in places] for pipeline, part in parts.items()}
        for place, mean in zip(places, _mean_of_one_dtype(group, of_dtype, index), strict=True):
            gradients[place] = mean
    return gradients


def _mean_of_one_dtype(group: ReduceGroup, parts: Mapping[int, Sequence[Tensor]], index: int) -> list[Tensor]:
    owners = group.ownership.owners_of(group.stage)
    like = next(iter(parts.values()))
    size = sum(gradient.numel() for gradient in like)
    chunk_size = -(-size // len(owners))
    padding = like[0].new_zeros(chunk_size * len(owners) - size)
    chunks = {
        pipeline: torch.cat([*(gradient.reshape(-1) for gradient in part), padding]).split(chunk_size)
        for pipeline, part in parts.items()
    }
    border = (TensorSpec((chunk_size,), like[0].dtype, False),)
    for other in group.others:
        for pipeline in group.pipelines(other):
            group.channel.post(other, group.key(ProgramPurpose.SCATTER, pipeline, index), border)
        group.channel.post(other, group.key(ProgramPurpose.GATHER, group.pipelines(other)[0], index), border)
    for other in group.others:
        for pipeline, mine in chunks.items():
            group.channel.send(other, group.key(ProgramPurpose.SCATTER, pipeline, index), (mine[owners.index(other)],))
    own = owners.index(group.worker)
    total = _mean_of_chunk(group, {pipeline: mine[own] for pipeline, mine in chunks.items()}, index)
    for other in group.others:
        group.channel.send(other, group.key(ProgramPurpose.GATHER, group.pipelines(group.worker)[0], index), (total,))
    sums = {group.worker: total}
    for other in group.others:
        (sums[other],) = group.channel.take(other, group.key(ProgramPurpose.GATHER, group.pipelines(other)[0], index))
    whole = torch.cat([sums[owner] for owner in owners])[:size]
    return [
        part.view(gradient.shape)
        for part, gradient in zip(whole.split([gradient.numel() for gradient in like]), like, strict=True)
    ]


def _mean_of_chunk(group: ReduceGroup, mine: Mapping[int, Tensor], index: int) -> Tensor:
    """Returns the mean of one chunk over all pipelines, added in pipeline order."""
    parts = dict(mine)
    for other in group.others:
        for pipeline in group.pipelines(other):
            (parts[pipeline],) = group.channel.take(other, group.key(ProgramPurpose.SCATTER, pipeline, index))
    total = parts[0].clone()
    for pipeline in range(1, len(parts)):
        total += parts[pipeline]
    total /= len(parts)
    return total


def gather_over_pipelines(group: ReduceGroup, parts: Mapping[int, Tensors]) -> tuple[Tensors, ...]:
    """Returns small tensors of all pipelines, in order; a collective of the owners, which have `parts`."""
    gathered = dict(parts)
    for pipeline, part in parts.items():
        send_bulk(group.channel, group.others, group.key(ProgramPurpose.ENDING, pipeline), part)
    specs = [TensorSpec.of(tensor) for tensor in part]
    for other in group.others:
        for pipeline in group.pipelines(other):
            gathered[pipeline] = tuple(
                receive_bulk(group.channel, other, group.key(ProgramPurpose.ENDING, pipeline), specs)
            )
    return tuple(gathered[pipeline] for pipeline in range(len(gathered)))


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The actions of one worker with their transfers: a pure function, which a thread can compute in advance."""

    ownership: Ownership
    owned: frozenset[Slot]
    actions: tuple[tuple[Action, str], ...]  # (action, its text)
    routes: Routes
    receives: Sequence[Receive[ProgramKey]]
    targets: Mapping[Action, tuple[tuple[int, ...], ProgramKey]]  # send -> (target workers, key)
    next_forwards: Mapping[Action, Action]
    issued: tuple[Issued, ...]  # its transfers in issue order; empty for a backend with tags
    is_awaited: bool  # it starts with a forward of its own: other workers wait for its first SEND

    def received_bytes(self) -> set[int]:
        """Returns the sizes of the tensors that it receives."""
        return {spec.num_bytes for receive in self.receives for spec in receive.border}


def worker_program(
    worker: int, program: Program, ownership: Ownership, borders: Sequence[Border], *, has_tags: bool = True
) -> WorkerProgram:
    """Returns one worker's part of the program; a backend without tags also needs the issue order of all transfers."""
    actions = program.get(worker, ())
    routes = routes_of(worker, program, ownership)
    owned = frozenset(ownership.slots_of(worker))
    key_of = partial(carrier_key, ownership.grid)
    return WorkerProgram(
        ownership,
        owned,
        tuple((action, str(action)) for action in actions),
        routes,
        receives_of(actions, routes, borders, key_of),
        {
            action: (routes.targets.get(carried(action), ()), key_of(action))
            for action in actions
            if action.op in SEND_OPS
        },
        _next_forwards(actions),
        () if has_tags else _issued(worker, program, ownership, borders),
        bool(actions) and actions[0].op is Op.F and (actions[0].pipeline, actions[0].stage) in owned,
    )


def _issued(worker: int, program: Program, ownership: Ownership, borders: Sequence[Border]) -> tuple[Issued, ...]:
    return tuple(
        Issued(
            source == worker,
            target if source == worker else source,
            value_key(ownership.grid, value),
            border_of_value(value, borders),
        )
        for value, source, target in issued_by(worker, program, ownership)
    )


def _next_forwards(actions: Sequence[Action]) -> dict[Action, Action]:
    """Returns the next forward after each receive in the list; it may belong to another value."""
    forwards: dict[Action, Action] = {}
    forward = None
    for action in reversed(actions):
        if action.op is Op.F:
            forward = action
        elif action.op in RECEIVE_OPS and forward is not None:
            forwards[action] = forward
    return forwards
