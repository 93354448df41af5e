"""The device of a worker: it holds layers, their state and gradients, and generates random numbers.

Rules: every function is passed its device; there is no global default. Messages, files and batches of data are on the
host, and only `put` and `copies` move tensors. Layers are built on the host, so they start with the same bits on every
device. Only a worker opens a device: the fork server must never initialize CUDA, whose context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import deterministic
from torch.utils.flop_counter import flop_registry

from engine.core.checks.determinism import DEMANDED, Setting, changed_setting
from engine.core.errors import GPU_ERROR, GPU_MEMORY, EnvironmentLacksError, Problem
from engine.core.texts import counted, printable
from engine.runtime.device.action_clock import ActionClock, GpuClock, OperationMode, TellTimes
from engine.runtime.device.copies import HOST_COPIES, NO_WATCH, Copies, Leaving, StreamCopies, Watch
from engine.runtime.device.device_faults import DeviceFaults, DoubledCopies

_PLAYED = "a played GPU"  # for faults of a worker on the host


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker; `is_host` is true for the host itself.

    `watch` is notified of each wait of the main thread for the device, and `faults` are injected into it. The main
    thread computes on the stream `computing`, None on the host. `name` is for messages.
    """

    place: torch.device
    is_host: bool
    copies: Copies = field(default=HOST_COPIES, compare=False)
    watch: Watch = field(default=NO_WATCH, compare=False)
    faults: DeviceFaults = field(default_factory=DeviceFaults, compare=False)
    computing: torch.cuda.Stream | None = field(default=None, compare=False)
    name: str = field(default=_PLAYED, compare=False)

    def put(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the device, detached; without a copy if it is there already."""
        return self.put_all((tensor,))[0]

    def put_all(self, tensors: Leaving) -> tuple[Tensor, ...]:
        """Returns tensors on the device, detached; they may be on their way to the host."""
        return self.copies.admitted(self.copies.landed(tensors))

    def clock(self, tell: TellTimes) -> ActionClock:
        """Returns the clock of a worker's actions, which reports each one once the device has finished it."""
        return ActionClock(tell) if self.is_host else GpuClock(tell)

    def seed(self, key: int) -> None:
        """Sets the default generators of the host and of the device to the position of a key."""
        for generator in self.generators():
            generator.manual_seed(key)

    def generators(self) -> Iterable[torch.Generator]:
        """Returns the default generators that a layer can draw from: the host's, then the device's."""
        if self.is_host:
            return (torch.default_generator,)
        return (torch.default_generator, torch.cuda.default_generators[self.place.index or 0])

    def autocast(self, dtype: torch.dtype, *, enabled: bool = True) -> contextlib.AbstractContextManager[object]:
        """Returns the block in which layers run in a narrower dtype."""
        return torch.autocast(self.place.type, dtype=dtype, enabled=enabled)

    def enter(self) -> None:
        """Makes the device this thread's: threads start with GPU 0, and some calls would create a context there."""
        if not self.is_host:
            torch.cuda.set_device(self.place)

    def wait(self) -> None:
        """Waits until the device has finished all enqueued work, to measure a time."""
        with self.waiting():
            if not self.is_host:
                torch.cuda.current_stream(self.place).synchronize()

    def memory_peak(self) -> tuple[int, int] | None:
        """Returns the peak bytes allocated and reserved since the last call; None on the host."""
        if self.is_host:
            return None
        peak = torch.cuda.max_memory_allocated(self.place), torch.cuda.max_memory_reserved(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        return peak

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a wait of the main thread for the device: a worker that does not leave it hangs, as in an action."""
        if self.is_host and not self.faults.name:
            yield
            return
        with self.watch.busy():
            self.faults.wait()
            yield

    def unfinished(self) -> str:
        """Returns the name of a GPU that is busy with the main thread's work, else ""; any thread may call it."""
        if self.computing is None:
            return self.name if self.faults.hangs else ""
        try:
            self.enter()
            return "" if self.computing.query() else self.name
        except RuntimeError:  # the main thread will meet it too
            return ""


HOST: Final = Device(torch.device("cpu"), is_host=True)


def ordinal(local_rank: int, num_gpus: int, *, shares: bool) -> int:
    """Returns a worker's GPU: its own by local rank, or a shared one; raises EnvironmentLacksError without any."""
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
    """Returns the device of a worker, of the kind ``cpu`` or ``cuda``; the latter initializes CUDA in this process."""
    faults = faults or DeviceFaults()
    if kind != "cuda":  # an unresolved job in memory has `auto`
        return Device(HOST.place, True, DoubledCopies(faults), watch, faults)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the numbering of `engine/files/accelerators.py`
    place = torch.device("cuda", ordinal(local_rank, torch.cuda.device_count(), shares=shares))
    torch.cuda.set_device(place)
    name = f"GPU {place.index} ({torch.cuda.get_device_name(place)})"
    copies, computing = StreamCopies(place, watch.wake), torch.cuda.current_stream(place)
    return Device(place, False, copies, watch, faults, computing, name)


# Errors of a device: the exceptions which mean that the worker's own GPU has failed.
#
# Rule: after such an exception nothing on the device can be trusted, because an error may belong to an earlier call,
# and a sticky one fails every later call. So the worker ends, whatever code met the exception.

_OF_LIBRARIES = re.compile(
    r"(?:CUDA|CUDA driver|CUDA runtime|cuDNN|cuSOLVER|cuSPARSE|cuFFT) error: ?(.*)", re.IGNORECASE
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_MOST_LINKED = 20
_MOST_CHARACTERS = 300


def device_trouble(error: BaseException | None) -> str:
    """Returns the failure of this worker's GPU that an exception or one of its causes reports, or an empty string."""
    for _ in range(_MOST_LINKED):
        if error is None:
            break
        if trouble := _trouble(error):
            return trouble
        error = error.__cause__ or error.__context__
    return ""


def _trouble(error: BaseException) -> str:
    # Exact types: the text of a user's exception may raise.
    if type(error) is torch.OutOfMemoryError:
        match = _WANTED.search(str(error))
        return f"{GPU_MEMORY}: tried to allocate {match[1]}" if match else f"{GPU_MEMORY}: {_first_line(error)}"
    if type(error) not in (RuntimeError, torch.AcceleratorError, torch.cuda.CudaError):
        return ""
    line = _first_line(error)
    match = _OF_LIBRARIES.match(line)
    if match is None:
        return "" if type(error) is RuntimeError else f"{GPU_ERROR}: {line}"
    return f"{GPU_ERROR}: {match[1] or line}"


def _first_line(error: BaseException) -> str:
    return printable(str(error).partition("\n")[0].strip()[:_MOST_CHARACTERS])


# Applies the settings of `engine/core/checks/determinism.py`, and finds operations without a deterministic form.
#
# Rules: a worker calls `set_up` before it imports the user's code and before CUDA starts. The settings belong to the
# process: workers that are threads of one process share them.

_OF_TORCH = "torch."
_WITHOUT_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


def set_up(settings: Iterable[Setting]) -> None:
    """Applies the settings."""
    for setting in settings:
        if not setting.name.startswith(_OF_TORCH):
            os.environ[setting.name] = str(setting.value)
        elif setting.read:
            _attribute(setting.name)(setting.value)
        else:
            owner, _, name = setting.name.rpartition(".")
            setattr(_attribute(owner), name, setting.value)


def changed(settings: Iterable[Setting]) -> list[Problem]:
    """Returns a problem for each setting that has changed although it may not."""
    values = ((each, _value(each)) for each in settings if not each.may_change)
    return [changed_setting(each, value) for each, value in values if value != each.value]


def _value(setting: Setting) -> object:
    if not setting.name.startswith(_OF_TORCH):
        return os.environ.get(setting.name)
    return _attribute(setting.read)() if setting.read else _attribute(setting.name)


def _attribute(name: str) -> Any:
    parts = name.split(".")[1:]
    if parts[:1] == ["utils"]:  # `import torch` does not load it
        import_module("torch.utils.deterministic")
    return reduce(getattr, parts, torch)


class WithoutForm(OperationMode):
    """Lets operations without a deterministic form run in this thread, and collects their names in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            match = _WITHOUT_FORM.match(str(error))
            if match is None:
                raise
        if match[1] not in self.found:
            self.found.append(match[1])
        torch.set_deterministic_debug_mode(0)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_deterministic_debug_mode(DEMANDED)


class FlopCount(OperationMode):
    """Counts the `flops` of the operations of this thread: two for each multiplication with an addition, as torch."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


@contextlib.contextmanager
def unwritten_filled() -> Iterator[None]:
    """Fills new memory with NaN in the block: code that reads it uninitialized gets other bits."""
    holder: Any = deterministic  # a module whose class has the property
    before = holder.fill_uninitialized_memory
    holder.fill_uninitialized_memory = True
    try:
        yield
    finally:
        holder.fill_uninitialized_memory = before
