"""Faults of a worker's device that are made on purpose: real ones on a GPU; on the host a double of them.

    trouble   on a GPU                                            the double, on the host
    error     a call of CUDA that fails; the next ones work       that exception, once
    sticky    a kernel whose assertion fails: CUDA is lost        that exception, at each later operation and wait
    hang      a kernel that spins for years                       operations go on; no wait ends, no message leaves
    memory    a request of more memory than any GPU has           that exception, once

Rules: a fault strikes at the n-th operation of torch in the worker's main thread, or in a backward that it runs. A
struck operation behaves as CUDA does: a kernel is only started by it, and a later call or wait meets the trouble. The
double has the classes and the texts of torch's own exceptions, so the same detection and the same verdict follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.errors import INJECTED
from engine.runtime.device.copies import Copies, Leaving

DeviceTrouble = Literal["error", "sticky", "hang", "memory"]

_Tensors = tuple[Tensor, ...]
_SPIN_CYCLES = 1 << 60  # years
_ASKED_BYTES = 1 << 50
_ERROR = "CUDA error: invalid argument"
_STICKY = "CUDA error: device-side assert triggered"
_MEMORY = f"CUDA out of memory. Tried to allocate {_ASKED_BYTES >> 30}.00 GiB."
_WAITS = (torch.ops.aten._local_scalar_dense.default,)  # operations after which the host knows a number


class DeviceFaults:
    """The faults of one worker's device; `name` is that of the last one that was aimed at it, empty for none."""

    def __init__(self) -> None:
        self.name = ""
        self._lasting: Callable[[], None] | None = None  # meets each later operation, of the double
        self._endless: Callable[[], None] | None = None  # meets each later wait for the device, of the double

    def strike(
        self,
        name: str,
        trouble: DeviceTrouble,
        place: torch.device,
        call: int,
        tell: Callable[[str], None],
        stand_still: Callable[[], None],
    ) -> None:
        """Lets the operation number `call` from now on meet the trouble; `tell` confirms a hang.

        `stand_still` does not return before the worker ends.
        """
        self.name = name

        def meet() -> None:
            if trouble == "hang":
                tell("a kernel that does not end was started")
            if place.type == "cpu":
                self._play(trouble, stand_still)
            else:
                _provoke(trouble, place)

        _Counting(self, call, meet).__enter__()  # for as long as the worker lives

    def _play(self, trouble: DeviceTrouble, stand_still: Callable[[], None]) -> None:
        match trouble:
            case "error":
                raise torch.AcceleratorError(_ERROR)
            case "memory":
                raise torch.OutOfMemoryError(_MEMORY)
            case "sticky":
                self._lasting = self._endless = _raise_sticky
            case "hang":
                self._endless = stand_still

    def named(self, trouble: str) -> str:
        """Returns the trouble that an exception tells, with the name of the fault if one was aimed at the device."""
        kind, _, what = trouble.partition(":")
        return f"{kind}{INJECTED}{self.name!r}:{what}" if trouble and self.name else trouble

    @property
    def hangs(self) -> bool:
        """Whether the double does not come to the end of a kernel."""
        return self._endless is not None and self._lasting is None

    def operation(self, func: Any) -> None:
        """Meets the faults of an operation that begins."""
        if self._lasting is not None:
            self._lasting()
        if self._endless is not None and func in _WAITS:
            self._endless()

    def wait(self) -> None:
        """Meets the faults of a wait for the device; on a GPU the wait itself does."""
        if self._endless is not None:
            self._endless()


class DoubledCopies(Copies):
    """The copies of a worker on the host: there are none, unless the double of a GPU does not do its work."""

    def __init__(self, faults: DeviceFaults):
        self._faults = faults
        self._held: list[object] = []

    def when_fetched(
        self, leaving: Leaving, give_on: Callable[[_Tensors], None], failed: Callable[[Exception], None]
    ) -> None:
        """Gives on a message at once; keeps it for ever behind a kernel that does not end."""
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


class _Counting(TorchDispatchMode):
    """Sees each operation of torch; a worker that no fault of its device was aimed at has none."""

    def __init__(self, faults: DeviceFaults, call: int, meet: Callable[[], None]):
        super().__init__()
        self._faults, self._left, self._meet = faults, call, meet

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch imports its compiler at the first operation, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._faults.operation(func)
        self._left -= 1
        if self._left == -1:
            self._meet()
        return func(*args, **(kwargs or {}))


def _raise_sticky() -> NoReturn:
    raise torch.AcceleratorError(_STICKY)


def _provoke(trouble: DeviceTrouble, place: torch.device) -> None:
    """Makes real trouble on a GPU, of which other processes on it notice nothing but the time that it takes."""
    match trouble:
        case "error":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(0)))
        case "memory":
            torch.empty(_ASKED_BYTES, dtype=torch.uint8, device=place)
        case "sticky":
            torch.zeros(1, device=place)[torch.ones(1, dtype=torch.int64, device=place)]
        case "hang":
            torch.cuda._sleep(_SPIN_CYCLES)
