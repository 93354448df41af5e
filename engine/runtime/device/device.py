"""The device of a worker: its layers, their state and their gradients lie on it, and its random numbers come from it.

Rules: each function gets the device that it works on; there is no global default. A message, a file and a batch of data
lie on the host: a tensor gets from one to the other by `put` and `copies` only. Layers are built on the host, so that
they begin with the same bits on every device. Only a worker opens a device: the fork server must never start CUDA,
because a context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from engine.core.errors import EnvironmentLacksError
from engine.core.texts import counted
from engine.runtime.device.action_clock import ActionClock, GpuClock, TellTimes
from engine.runtime.device.copies import HOST_COPIES, NO_WATCH, Copies, Leaving, StreamCopies, Watch
from engine.runtime.device.device_faults import DeviceFaults, DoubledCopies

_PLAYED = "a played GPU"  # of a worker on the host, for a fault


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker; `is_host` is true for the memory of the host itself.

    `watch` is told of each wait of the main thread for the device. `faults` were aimed at it. The main thread computes
    on the stream `computing`, None on the host. `name` is for texts.
    """

    place: torch.device
    is_host: bool
    copies: Copies = field(default=HOST_COPIES, compare=False)
    watch: Watch = field(default=NO_WATCH, compare=False)
    faults: DeviceFaults = field(default_factory=DeviceFaults, compare=False)
    computing: torch.cuda.Stream | None = field(default=None, compare=False)
    name: str = field(default=_PLAYED, compare=False)

    def put(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the device, detached; itself if it is there."""
        return self.put_all((tensor,))[0]

    def put_all(self, tensors: Leaving) -> tuple[Tensor, ...]:
        """Returns tensors on the device, each detached; they may be on their way to the host."""
        return self.copies.admitted(self.copies.landed(tensors))

    def clock(self, tell: TellTimes) -> ActionClock:
        """Returns the clock of a worker's actions; it tells each one when the device has done it."""
        return ActionClock(tell) if self.is_host else GpuClock(tell)

    def seed(self, key: int) -> None:
        """Sets the default generators of the host and of the device to the position of a key."""
        for generator in self.generators():
            generator.manual_seed(key)

    def generators(self) -> Iterable[torch.Generator]:
        """Returns the default generators that a layer can draw from: that of the host, then that of the device."""
        if self.is_host:
            return (torch.default_generator,)
        return (torch.default_generator, torch.cuda.default_generators[self.place.index or 0])

    def autocast(self, dtype: torch.dtype, *, enabled: bool = True) -> contextlib.AbstractContextManager[object]:
        """Returns the block in which the layers run in a narrower dtype."""
        return torch.autocast(self.place.type, dtype=dtype, enabled=enabled)

    def enter(self) -> None:
        """Makes the device that of this thread: each begins with GPU 0, and some calls would begin a context there."""
        if not self.is_host:
            torch.cuda.set_device(self.place)

    def wait(self) -> None:
        """Waits until all computing that was given to the device is done, so that a time can be read."""
        with self.waiting():
            if not self.is_host:
                torch.cuda.current_stream(self.place).synchronize()

    def memory_peak(self) -> tuple[int, int] | None:
        """Returns the most bytes that tensors took since the last call, and with free ones kept; None on the host."""
        if self.is_host:
            return None
        found = torch.cuda.max_memory_allocated(self.place), torch.cuda.max_memory_reserved(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        return found

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a wait of the main thread for the device: a worker that stays in it hangs, as in an action.

        No worker waits for the host itself.
        """
        if self.is_host and not self.faults.name:
            yield
            return
        with self.watch.busy():
            self.faults.wait()
            yield

    def unfinished(self) -> str:
        """Returns the name of a GPU that has not come to the end of the main thread's work; never waits.

        It is empty for the host, and for a GPU that is lost. Any thread may call it.
        """
        if self.computing is None:
            return self.name if self.faults.hangs else ""
        try:
            self.enter()
            return "" if self.computing.query() else self.name
        except RuntimeError:  # the main thread meets it, too
            return ""


HOST: Final = Device(torch.device("cpu"), is_host=True)


def ordinal(local_rank: int, num_gpus: int, *, shares: bool) -> int:
    """Returns the number of the GPU of a worker: its own by its local rank, or one that it shares.

    Raises EnvironmentLacksError if there is none.
    """
    if num_gpus and (shares or local_rank < num_gpus):
        return local_rank % num_gpus
    raise EnvironmentLacksError(
        f"device cuda: {counted(num_gpus, 'GPU')} that torch can use, and each worker needs one: this is number "
        f"{local_rank + 1} on its host; use --device cpu"
        + (", fewer workers, or --share-gpu for a test" if num_gpus else "")
    )


def open_device(
    kind: str, local_rank: int, *, shares: bool = False, watch: Watch = NO_WATCH, faults: DeviceFaults | None = None
) -> Device:
    """Returns the device of a worker, of a kind ``cpu`` or ``cuda``; the latter starts CUDA in this process."""
    faults = faults or DeviceFaults()
    if kind != "cuda":  # a job in memory that no file resolved has `auto`
        return Device(HOST.place, True, DoubledCopies(faults), watch, faults)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the numbers that `engine/files/nvml.py` tells
    place = torch.device("cuda", ordinal(local_rank, torch.cuda.device_count(), shares=shares))
    torch.cuda.set_device(place)
    name = f"GPU {place.index} ({torch.cuda.get_device_name(place)})"
    copies, computing = StreamCopies(place, watch.wake), torch.cuda.current_stream(place)
    return Device(place, False, copies, watch, faults, computing, name)
