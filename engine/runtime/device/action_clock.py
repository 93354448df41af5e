"""The times of actions, by the clock of the host or by the events of a GPU, which runs behind the host.

    host    launch F0 | launch F1 | ...               events     begin and end of each computing action, on its stream
    GPU            F0 F0 F0 F0 | F1 F1 F1 F1          reported   once the end has passed, in the order of the actions

Rules: nothing waits for an event: a later action that ends checks it. So the death of a worker loses the records of the
actions that its GPU had not finished, and of those after them. Durations, and gaps between actions, are the GPU's. The
place on the host's clock follows: an action begins after its launch, and ends before it is seen to be over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.core.action import Action

_NS = 1e6  # in a millisecond, the GPU's unit

_Method = Callable[[Action, int], None]  # takes an action and the open step


# Takes an action, its text, its step and its epoch, with begin and end in nanoseconds of the host's clock.
TellTimes = Callable[[Action, str, int, int, int, int], None]


class ActionClock:
    """The times on the host: an action is over when its method returns."""

    def __init__(self, tell: TellTimes):
        self.ended = tell  # takes an action with its begin and its end on the host

    def timed(self, method: _Method) -> _Method:
        """Returns a computing method wrapped for the clock."""
        return method

    def look(self) -> None:
        """Reports the actions that are over."""

    def finish(self) -> None:
        """Waits until all actions are over, and reports them."""


class _PendingAction(NamedTuple):
    done: tuple[Action, str, int, int]
    start_ns: int
    end_ns: int
    begin: torch.cuda.Event | None  # none of an action that computes nothing
    end: torch.cuda.Event | None


class GpuClock(ActionClock):
    """The times on a GPU."""

    def __init__(self, tell: TellTimes):
        super().__init__(self._ended)
        self._tell = tell
        self._begin: torch.cuda.Event | None = None
        self._coming: deque[_PendingAction] = deque()
        self._last: tuple[torch.cuda.Event, int] | None = None  # the end of the last one that computed

    def timed(self, method: _Method) -> _Method:
        """Returns a computing method wrapped for the clock."""

        def run(action: Action, step: int) -> None:
            self._begin = _event_now()
            try:
                method(action, step)
            except BaseException:
                self._begin = None
                raise

        return run

    def _ended(self, action: Action, text: str, step: int, epoch: int, start_ns: int, end_ns: int) -> None:
        begin, self._begin = self._begin, None
        end = None if begin is None else _event_now()
        self._coming.append(_PendingAction((action, text, step, epoch), start_ns, end_ns, begin, end))
        self.look()

    def look(self) -> None:
        """Reports the actions that are over."""
        while self._coming and ((end := self._coming[0].end) is None or end.query()):
            coming = self._coming.popleft()
            self._tell(*coming.done, *self._times_of(coming))

    def _times_of(self, coming: _PendingAction) -> tuple[int, int]:
        begin, end = coming.begin, coming.end
        if begin is None or end is None:
            return coming.start_ns, coming.end_ns
        last, last_ns = self._last or (begin, coming.start_ns)
        gap_ns, length_ns = int(last.elapsed_time(begin) * _NS), int(begin.elapsed_time(end) * _NS)
        times = placed(coming.start_ns, last_ns, gap_ns, length_ns, monotonic_ns())
        self._last = end, times[1]
        return times

    def finish(self) -> None:
        """Waits until all actions are over, and reports them."""
        if ends := [coming.end for coming in self._coming if coming.end is not None]:
            ends[-1].synchronize()
        self.look()


def placed(launch_ns: int, last_ns: int, gap_ns: int, length_ns: int, seen_ns: int) -> tuple[int, int]:
    """Returns begin and end of an action on the host's clock.

    It was launched at `launch_ns`, began `gap_ns` after the end of the previous one, at `last_ns`, took `length_ns`,
    and was seen to be over at `seen_ns`.
    """
    begin_ns = max(min(max(launch_ns, last_ns + gap_ns), seen_ns - length_ns), last_ns)
    return begin_ns, begin_ns + length_ns


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class OperationMode(TorchDispatchMode):
    """A mode that sees each operation, without importing torch's compiler at the first one, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# The bytes of tensors that operations allocate, and their peak, counted on any device.
#
# Rules: memory counts once, however many tensors share it, from the operation that allocates it until it is unused. It
# counts in whole blocks, as an allocator of a GPU provides it. Memory inside a kernel is not seen.

BLOCK = 512  # bytes, of torch's allocator


class LiveBytes(OperationMode):
    """Sees the operations of this thread in its block, and those of its backwards in the thread of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.most = 0

    def begin(self) -> int:
        """Resets the peak; returns the bytes that are live now."""
        self._forget_dead()
        self.most = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata in storages:
                continue
            self._forget_dead()
            if storage._cdata not in self._alive:
                size = in_blocks(storage.nbytes())
                self._alive[storage._cdata] = StorageWeakRef(storage), size
                self.now += size
                self.most = max(self.most, self.now)
        return out

    def _forget_dead(self) -> None:
        for address in [address for address, (memory, _) in self._alive.items() if memory.expired()]:
            self.now -= self._alive.pop(address)[1]


def in_blocks(num_bytes: int) -> int:
    """Returns the bytes that an allocator reserves for so many."""
    return -(-num_bytes // BLOCK) * BLOCK


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
