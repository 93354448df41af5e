"""Injected faults of a worker's device: real ones on a GPU, simulated ones on the host.

    trouble   on a GPU                                            simulated, on the host
    error     a CUDA call that fails; the next ones work          that exception, once
    sticky    a kernel whose assertion fails: CUDA is lost        that exception, at every later operation and wait
    hang      a kernel that spins for years                       operations continue; no wait ends, no message leaves
    memory    a request for more memory than any GPU has          that exception, once

Rules: a fault strikes at the n-th torch operation of the worker's main thread, or of a backward that it runs. The
operation behaves as in CUDA: it only launches a kernel, and a later call or wait meets the trouble. Simulated faults
have the classes and texts of torch's own exceptions, so detection and verdict are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from engine.core.errors import INJECTED
from engine.runtime.device.action_clock import OperationMode
from engine.runtime.device.copies import Copies, Leaving

DeviceTrouble = Literal["error", "sticky", "hang", "memory"]

_Tensors = tuple[Tensor, ...]
_SPIN_CYCLES = 1 << 60  # years
_ASKED_BYTES = 1 << 50
_ERROR = "CUDA error: invalid argument"
_STICKY = "CUDA error: device-side assert triggered"
_MEMORY = f"CUDA out of memory. Tried to allocate {_ASKED_BYTES >> 30}.00 GiB."
_WAITS = (torch.ops.aten._local_scalar_dense.default,)  # operations that give the host a number


class DeviceFaults:
    """The faults of one worker's device; `name` is that of the last injected one, or an empty string."""

    def __init__(self) -> None:
        self.name = ""
        self._lasting: Callable[[], None] | None = None  # simulated: called at every later operation
        self._endless: Callable[[], None] | None = None  # simulated: called at every later wait for the device

    def strike(
        self,
        name: str,
        trouble: DeviceTrouble,
        place: torch.device,
        call: int,
        tell: Callable[[str], None],
        stand_still: Callable[[], None],
    ) -> None:
        """Injects trouble into operation `call` from now on; `tell` confirms a hang, in which `stand_still` stays."""
        self.name = name

        def meet() -> None:
            if trouble == "hang":
                tell("a kernel that does not end was started")
            if place.type == "cpu":
                self._play(trouble, stand_still)
            else:
                _provoke(trouble, place)

        _Countdown(self, call, meet).__enter__()  # for as long as the worker lives

    def _play(self, trouble: DeviceTrouble, stand_still: Callable[[], None]) -> None:
        def raise_sticky() -> NoReturn:
            raise torch.AcceleratorError(_STICKY)

        match trouble:
            case "error":
                raise torch.AcceleratorError(_ERROR)
            case "memory":
                raise torch.OutOfMemoryError(_MEMORY)
            case "sticky":
                self._lasting = self._endless = raise_sticky
            case "hang":
                self._endless = stand_still

    def named(self, trouble: str) -> str:
        """Returns the trouble that an exception reports, with the name of the fault if one was injected."""
        kind, _, rest = trouble.partition(":")
        return f"{kind}{INJECTED}{self.name!r}:{rest}" if trouble and self.name else trouble

    @property
    def hangs(self) -> bool:
        """Whether a simulated kernel never ends."""
        return self._endless is not None and self._lasting is None

    def operation(self, func: Any) -> None:
        """Meets the faults of an operation at its start."""
        if self._lasting is not None:
            self._lasting()
        if self._endless is not None and func in _WAITS:
            self._endless()

    def wait(self) -> None:
        """Meets the faults of a wait for the device; on a GPU the wait itself does."""
        if self._endless is not None:
            self._endless()


class DoubledCopies(Copies):
    """The copies of a worker on the host; a simulated hang keeps messages."""

    def __init__(self, faults: DeviceFaults):
        self._faults = faults
        self._held: list[object] = []

    def when_fetched(
        self, leaving: Leaving, give_on: Callable[[_Tensors], None], failed: Callable[[Exception], None]
    ) -> None:
        """Passes on a message at once, but never during a hang."""
        if self._faults.hangs:
            self._held.append(leaving)
            return
        try:
            self._faults.wait()
        except torch.AcceleratorError as error:
            failed(error)
        else:
            super().when_fetched(leaving, give_on, failed)

    @property
    def is_leaving(self) -> bool:
        """Whether a message is kept."""
        return bool(self._held)


class _Countdown(OperationMode):
    """Counts the operations of torch; only a worker with a device fault has one."""

    def __init__(self, faults: DeviceFaults, call: int, meet: Callable[[], None]):
        super().__init__()
        self._faults, self._left, self._meet = faults, call, meet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._faults.operation(func)
        self._left -= 1
        if self._left == -1:
            self._meet()
        return func(*args, **(kwargs or {}))


def _provoke(trouble: DeviceTrouble, place: torch.device) -> None:
    """Causes real trouble on a GPU; other processes on it only lose time."""
    match trouble:
        case "error":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(0)))
        case "memory":
            torch.empty(_ASKED_BYTES, dtype=torch.uint8, device=place)
        case "sticky":
            torch.zeros(1, device=place)[torch.ones(1, dtype=torch.int64, device=place)]
        case "hang":
            torch.cuda._sleep(_SPIN_CYCLES)
