"""Copies between the host and the device of a worker: on a GPU they have streams of their own, ordered by events.

    to the host     compute --event--> sending: copy into pinned memory --event--> a thread gives the copy on
    to the device   receiving: copy from pinned memory --event--> compute

Rules: no copy holds up the host or another stream. A stream that reads a tensor of another one waits for the event
behind its writing; the host reads a copy behind its event only. A tensor that a second stream uses is recorded there,
so that its memory is not given to another tensor too early. On the host nothing is copied, and nothing waits: `Copies`
itself is that rule.
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
_ROOMS = 6  # of each size: those of the receives that are posted ahead, and of two copies that are not over


class ToDevice(NamedTuple):
    """Tensors on their way to the device, and the event behind which they are there."""

    tensors: _Tensors
    ready: torch.cuda.Event


class ToHost(NamedTuple):
    """Tensors on their way to pinned memory of the host, and the event behind which they are there."""

    tensors: _Tensors
    ready: torch.cuda.Event


Arriving = _Tensors | ToDevice
Leaving = _Tensors | ToHost


def tensors_of(leaving: Leaving) -> _Tensors:
    """Returns the tensors, which may not be complete."""
    return leaving.tensors if isinstance(leaving, ToHost) else leaving


class Watch(Protocol):
    """The part of a worker that is told when it waits for its own device, and for no other worker."""

    def busy(self) -> AbstractContextManager[None]:
        """Returns the block around a wait of the main thread."""

    def wake(self) -> None:
        """Tells the main thread, which waits, that a copy to the host is over; any thread may call it."""


class _NoWatch:
    """A part that is told and does nothing."""

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wake(self) -> None:
        pass


NO_WATCH: Final = _NoWatch()


class Copies:
    """The copies of a worker that computes on the host: there are none."""

    def landed(self, tensors: Leaving) -> Arriving:
        """Begins to bring tensors to the device; any thread may call it."""
        return tensors  # type: ignore[return-value]  # no tensor leaves the host

    def admitted(self, arriving: Arriving) -> _Tensors:
        """Returns tensors that the next work on the device may read, without waiting."""
        return arriving  # type: ignore[return-value]

    def fetched(self, tensors: Leaving) -> Leaving:
        """Begins to bring tensors to the host, contiguous; those that have begun are returned themselves."""
        return tensors

    def when_fetched(
        self, leaving: Leaving, give_on: Callable[[_Tensors], None], failed: Callable[[Exception], None]
    ) -> None:
        """Gives on the copies on the host as soon as they are complete, in the order of these calls.

        On a GPU a thread does, and `failed` gets its exception.
        """
        give_on(leaving)  # type: ignore[arg-type]

    def when_computed(
        self, computed: torch.cuda.Event | None, begin: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """Begins to send a message from the device itself, which leaves behind an event of the computing."""
        self.when_fetched((), lambda nothing: begin(), failed)

    @property
    def is_leaving(self) -> bool:
        """Whether a message has not left the device: then this worker keeps others waiting."""
        return False

    def settle(self) -> None:
        """Lets later work on the device wait for the copies that have begun, so that it may change their tensors."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialised host memory for a message."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def make_rooms(self, sizes: Callable[[], Iterable[int]]) -> None:
        """Makes the memory of receives, of sizes in bytes, before the first of them is posted."""


HOST_COPIES: Final = Copies()


class StreamCopies(Copies):
    """The copies of a worker that computes on a GPU; its main thread computes on the stream that is its present one."""

    def __init__(self, place: torch.device, left: Callable[[], None] = lambda: None):
        """`left` is called behind each copy to the host."""
        self._place = place
        self._sending, self._receiving = torch.cuda.Stream(place), torch.cuda.Stream(place)
        self._leaving, self._open = _Queue(), _Open()
        given = (place, self._leaving, self._open, left)
        thread = threading.Thread(target=_give_on, args=given, name="copies to the host", daemon=True)
        thread.start()
        weakref.finalize(self, self._leaving.put, None)

    def landed(self, tensors: Leaving) -> Arriving:
        """Begins to bring tensors to the device; any thread may call it."""
        # Of this thread: a stream's block, at its end, would begin a context on GPU 0.
        torch.cuda.set_device(self._place)
        if isinstance(tensors, ToHost):
            self._receiving.wait_event(tensors.ready)
            tensors = tensors.tensors
        if all(each.device.type != "cpu" for each in tensors):
            return tensors
        with torch.cuda.stream(self._receiving):
            moved = tuple(self._moved(each) for each in tensors)
            return ToDevice(moved, self._receiving.record_event())

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
        for each in arriving.tensors:
            each.record_stream(compute)
        return arriving.tensors

    def fetched(self, tensors: Leaving) -> Leaving:
        """Begins to bring tensors to the host, contiguous; those that have begun are returned themselves."""
        if isinstance(tensors, ToHost) or all(each.device.type == "cpu" for each in tensors):
            return tensors
        self._sending.wait_event(torch.cuda.current_stream(self._place).record_event())
        with torch.cuda.stream(self._sending):
            copies = tuple(self._copied(each) for each in tensors)
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
        """Gives on the copies on the host as soon as they are complete, in the order of these calls."""
        self._open.count(1)
        self._leaving.put(_Item(leaving, give_on, failed))

    def when_computed(
        self, computed: torch.cuda.Event | None, begin: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """Begins at once: streams wait for the event; and tells until it has come that a message is leaving."""
        begin()
        if computed is not None:
            self.when_fetched(ToHost((), computed), lambda nothing: None, failed)

    @property
    def is_leaving(self) -> bool:
        """Whether a message has not left."""
        return self._open.num > 0

    def settle(self) -> None:
        """Lets later work on the device wait for the copies that have begun, so that it may change their tensors."""
        torch.cuda.current_stream(self._place).wait_stream(self._sending)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialised pinned memory; torch keeps it for the next message once the copy from it is over."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def make_rooms(self, sizes: Callable[[], Iterable[int]]) -> None:
        """Makes the memory of receives, of sizes in bytes, before the first of them is posted."""
        rooms = [self.room((size,), torch.uint8) for size in set(sizes()) if size for _ in range(_ROOMS)]
        rooms.clear()  # torch keeps pinned memory that is free


class _Item(NamedTuple):
    leaving: Leaving
    give_on: Callable[[_Tensors], None]
    failed: Callable[[Exception], None]


_Queue = queue.SimpleQueue[_Item | None]


class _Open:
    """The number of copies that are not over."""

    def __init__(self) -> None:
        self.num, self._lock = 0, threading.Lock()

    def count(self, more: int) -> None:
        with self._lock:
            self.num += more


def _give_on(place: torch.device, leaving: _Queue, is_open: _Open, left: Callable[[], None]) -> None:
    """Gives on each copy when it is complete; the thread holds no copies of a worker that has ended."""
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
