"""A second queue of work on a device, and moments in queues: streams and events of CUDA.

Rules: `room` allocates memory of a queue, which the computing queue may use after `hand_over`. A queue (`behind`) or a
thread (`wait`) waits for a moment; nothing here waits for the whole device. On the host, work is done at once.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from engine.runtime.device.device import Device

_LEAST_FREE = 1 << 29  # bytes


class QueueMoment:
    """A moment in the work enqueued on a device; `of` is its event, None on the host."""

    def __init__(self, of: torch.cuda.Event | None):
        self.of = of

    def wait(self) -> None:
        """Waits until all work before the moment is done; any thread may call."""
        if self.of is not None:
            self.of.synchronize()

    def before(self, device: Device) -> None:
        """Makes later work of the computing queue wait; this thread does not."""
        if self.of is not None:
            torch.cuda.current_stream(device.place).wait_event(self.of)

    def ns_until(self, end: QueueMoment) -> int:
        """Returns the nanoseconds to a later moment of the same side queue that has come; 0 on the host."""
        return 0 if self.of is None or end.of is None else int(self.of.elapsed_time(end.of) * 1e6)

    def has_come(self) -> bool:
        """Returns whether all work before the moment is done; never waits."""
        return self.of is None or self.of.query()


def moment_now(device: Device) -> QueueMoment:
    """Returns the current moment of this thread's computing queue."""
    if device.is_host:
        return QueueMoment(None)
    return QueueMoment(torch.cuda.current_stream(device.place).record_event(torch.cuda.Event(blocking=True)))


class SideQueue:
    """One queue of a device."""

    def __init__(self, device: Device):
        self.device = device
        self._stream = None if device.is_host else torch.cuda.Stream(device.place)
        self._reading = None if device.is_host else torch.cuda.Stream(device.place)
        self._computing = None if device.is_host else torch.cuda.current_stream(device.place)

    @property
    def handle(self) -> int:
        """The stream as a C library takes it."""
        return 0 if self._stream is None else int(self._stream.cuda_stream)

    def enter(self) -> None:
        """Makes the device this thread's."""
        self.device.enter()

    def leave_room(self) -> None:
        """Releases device memory that torch caches, if little is left for other libraries."""
        if not self.device.is_host and torch.cuda.mem_get_info(self.device.place)[0] < _LEAST_FREE:
            torch.cuda.empty_cache()

    def behind(self, moment: QueueMoment) -> None:
        """Makes later work of this queue wait for a moment of another."""
        if self._stream is not None and moment.of is not None:
            self._stream.wait_event(moment.of)

    def given(self) -> contextlib.AbstractContextManager[object]:
        """Returns a block in which this thread enqueues its work here."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def lend(self, tensors: tuple[Tensor, ...]) -> None:
        """Lets this queue use memory of the computing queue, which is not freed before."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def moment(self) -> QueueMoment:
        """Returns the current moment of this queue."""
        if self._stream is None:
            return QueueMoment(None)
        return QueueMoment(self._stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True)))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory of this queue."""
        if self._stream is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self.given():
            return torch.empty(shape, dtype=dtype, device=self.device.place)

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Returns a block for reading tensors whose work is done, without waiting for other work."""
        return contextlib.nullcontext() if self._reading is None else torch.cuda.stream(self._reading)

    def read(self, tensor: Tensor) -> list[int]:
        """Returns the numbers of a tensor whose work is done, without waiting for other work."""
        with self.reading():
            return list(tensor.tolist())

    def hand_over(self, tensor: Tensor) -> Tensor:
        """Lets the computing queue use memory of this queue, whose work on it is done."""
        if self._computing is not None:
            tensor.record_stream(self._computing)
        return tensor
