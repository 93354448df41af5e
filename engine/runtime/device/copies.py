"""Copies between the host and the device of a worker; on a GPU they run on their own streams, ordered by events.

    to the host     compute --event--> sending: copy into pinned memory --event--> a thread passes the copy on
    to the device   receiving: copy from pinned memory --event--> compute

Rules: no copy blocks the host or another stream. A stream that reads another one's tensor waits for the event after its
writing; the host reads a copy only after its event. A tensor used by a second stream is recorded there, so that its
memory is not reused too early. For a worker on the host, nothing is copied and nothing waits: this is `Copies` itself.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

_Tensors = tuple[Tensor, ...]
_ROOMS = 6  # of each size: for the receives posted ahead, and for two copies in progress


class ToDevice(NamedTuple):
    """Tensors on their way to the device, and the event after which they are there."""

    tensors: _Tensors
    ready: torch.cuda.Event


class ToHost(NamedTuple):
    """Tensors on their way to pinned memory of the host, and the event after which they are there."""

    tensors: _Tensors
    ready: torch.cuda.Event


Arriving = _Tensors | ToDevice
Leaving = _Tensors | ToHost


def tensors_of(leaving: Leaving) -> _Tensors:
    """Returns the tensors, which may still be incomplete."""
    return leaving.tensors if isinstance(leaving, ToHost) else leaving


class Watch(Protocol):
    """The part of a worker that is notified of waits for its own device; by itself it does nothing."""

    def busy(self) -> AbstractContextManager[None]:
        """Returns the block around a wait of the main thread."""
        return nullcontext()

    def wake(self) -> None:
        """Wakes the main thread after a copy to the host; any thread may call it."""
        return


class _NoWatch(Watch):
    pass


NO_WATCH: Final = _NoWatch()


class Copies:
    """The copies of a worker that computes on the host: there are none."""

    def landed(self, tensors: Leaving) -> Arriving:
        """Starts copying tensors to the device; any thread may call it."""
        return tensors  # type: ignore[return-value]  # no tensor leaves the host

    def admitted(self, arriving: Arriving) -> _Tensors:
        """Returns tensors that the next work on the device may read, without waiting."""
        return arriving  # type: ignore[return-value]

    def fetched(self, tensors: Leaving) -> Leaving:
        """Starts copying tensors to the host, contiguous, unless that has been started already."""
        return tensors

    def when_fetched(
        self, leaving: Leaving, give_on: Callable[[_Tensors], None], failed: Callable[[Exception], None]
    ) -> None:
        """Passes on the copies on the host once they are complete, in order; on a GPU `failed` gets the exception."""
        give_on(leaving)  # type: ignore[arg-type]

    def when_computed(
        self, computed: torch.cuda.Event | None, begin: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """Starts sending a message from the device itself, after an event of the computation."""
        self.when_fetched((), lambda nothing: begin(), failed)

    @property
    def is_leaving(self) -> bool:
        """Whether a message has not left the device yet, so that this worker keeps others waiting."""
        return False

    def settle(self) -> None:
        """Makes later work on the device wait for the copies in progress, so that it may change their tensors."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized host memory for a message."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def make_rooms(self, sizes: Callable[[], Iterable[int]]) -> None:
        """Allocates memory for receives of these sizes in bytes, before the first of them is posted."""


HOST_COPIES: Final = Copies()


class StreamCopies(Copies):
    """The copies of a worker that computes on a GPU, on the current stream of its main thread."""

    def __init__(self, place: torch.device, left: Callable[[], None] = lambda: None):
        """`left` is called after each copy to the host."""
        self._place = place
        self._sending, self._receiving = torch.cuda.Stream(place), torch.cuda.Stream(place)
        self._leaving, self._open = _Queue(), _CopyCount()
        args = (place, self._leaving, self._open, left)
        threading.Thread(target=_give_on, args=args, name="copies to the host", daemon=True).start()
        weakref.finalize(self, self._leaving.put, None)

    def landed(self, tensors: Leaving) -> Arriving:
        """Starts copying tensors to the device; any thread may call it."""
        # For this thread: else the end of the stream's block would create a context on GPU 0.
        torch.cuda.set_device(self._place)
        if isinstance(tensors, ToHost):
            self._receiving.wait_event(tensors.ready)
            tensors = tensors.tensors
        if all(tensor.device.type != "cpu" for tensor in tensors):
            return tensors
        with torch.cuda.stream(self._receiving):
            return ToDevice(tuple(map(self._moved, tensors)), self._receiving.record_event())

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.layout is torch.strided and not tensor.is_pinned():
            tensor = tensor.detach().pin_memory().requires_grad_(tensor.requires_grad)
        moved = tensor.detach().to(self._place, non_blocking=True)
        return moved.requires_grad_(tensor.requires_grad)

    def admitted(self, arriving: Arriving) -> _Tensors:
        """Returns tensors that the next work on the device may read, without waiting."""
        if not isinstance(arriving, ToDevice):
            return arriving
        compute = torch.cuda.current_stream(self._place)
        compute.wait_event(arriving.ready)
        for tensor in arriving.tensors:
            tensor.record_stream(compute)
        return arriving.tensors

    def fetched(self, tensors: Leaving) -> Leaving:
        """Starts copying tensors to the host, contiguous, unless that has been started already."""
        if isinstance(tensors, ToHost) or all(tensor.device.type == "cpu" for tensor in tensors):
            return tensors
        self._sending.wait_event(torch.cuda.current_stream(self._place).record_event())
        with torch.cuda.stream(self._sending):
            copies = tuple(map(self._copied, tensors))
            return ToHost(copies, self._sending.record_event(torch.cuda.Event(blocking=True)))

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        copy = self.room(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._sending)
        return copy.requires_grad_(tensor.requires_grad)

    def when_fetched(
        self, leaving: Leaving, give_on: Callable[[_Tensors], None], failed: Callable[[Exception], None]
    ) -> None:
        """Passes on the copies on the host once they are complete, in the order of these calls."""
        self._open.count(1)
        self._leaving.put(_Item(leaving, give_on, failed))

    def when_computed(
        self, computed: torch.cuda.Event | None, begin: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """Starts at once, because streams wait for the event; until it has passed, a message is leaving."""
        begin()
        if computed is not None:
            self.when_fetched(ToHost((), computed), lambda nothing: None, failed)

    @property
    def is_leaving(self) -> bool:
        """Whether a message has not left yet."""
        return self._open.num > 0

    def settle(self) -> None:
        """Makes later work on the device wait for the copies in progress, so that it may change their tensors."""
        torch.cuda.current_stream(self._place).wait_stream(self._sending)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized pinned memory; torch reuses it for the next message once the copy from it is over."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def make_rooms(self, sizes: Callable[[], Iterable[int]]) -> None:
        """Allocates memory for receives of these sizes in bytes, before the first of them is posted."""
        rooms = [self.room((size,), torch.uint8) for size in set(sizes()) if size for _ in range(_ROOMS)]
        rooms.clear()  # torch caches free pinned memory


class _Item(NamedTuple):
    leaving: Leaving
    give_on: Callable[[_Tensors], None]
    failed: Callable[[Exception], None]


_Queue = queue.SimpleQueue[_Item | None]


class _CopyCount:
    """The number of copies in progress."""

    def __init__(self) -> None:
        self.num, self._lock = 0, threading.Lock()

    def count(self, more: int) -> None:
        with self._lock:
            self.num += more


def _give_on(place: torch.device, leaving: _Queue, is_open: _CopyCount, left: Callable[[], None]) -> None:
    """Passes on each copy once it is complete; the thread keeps no copies of a worker that has ended alive."""
    torch.cuda.set_device(place)
    while (item := leaving.get()) is not None:
        tensors, give_on, failed = item
        try:
            if isinstance(tensors, ToHost):
                tensors.ready.synchronize()
                tensors = tensors.tensors
            give_on(tensors)
        except Exception as error:
            failed(error)
        is_open.count(-1)
        left()
        del item, tensors, give_on, failed
