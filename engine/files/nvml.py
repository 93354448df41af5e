"""The load of the GPUs of a host, from NVIDIA's management library; a host without it tells none.

Rules: the library starts no CUDA. A call may stand still behind a driver that does, so a thread of its own calls, and
whoever asks gets what it has found so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
_SAMPLES = 10  # of a second each, in one figure


class GpuLoad(NamedTuple):
    """The load of a GPU by its number: the mean share of time in which it computed, and the most bytes in use."""

    gpu: int
    samples: int
    busy: float
    used: int


class _Rates(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The library; raises OSError where there is none, or if it cannot reach a driver."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL):
        self._c = load(LIBRARY)
        self._done(self._c.nvmlInit_v2())

    def _done(self, code: int) -> None:
        if code:
            raise OSError(f"NVML: error {code}")

    def sample(self) -> list[GpuLoad]:
        """Returns the present load of each GPU that tells it."""
        count, found = ctypes.c_uint(), []
        self._done(self._c.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for number in range(count.value):
            handle, rates, memory = ctypes.c_void_p(), _Rates(), _Memory()
            self._done(self._c.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)))
            if self._c.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
                continue  # a part of a GPU has no figure
            self._c.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            found.append(GpuLoad(number, 1, rates.gpu / 100, memory.used))
        return found


class GpuLook:
    """Looks at the GPUs once a second; `found` has the loads since the last call, none on a host without NVML."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL, every_s: float = 1.0):
        self._found: queue.SimpleQueue[GpuLoad] = queue.SimpleQueue()
        is_over = threading.Event()
        given = (self._found, is_over, load, every_s)
        threading.Thread(target=_look, args=given, name="gpu look", daemon=True).start()
        self.end = weakref.finalize(self, is_over.set)

    def found(self) -> list[GpuLoad]:
        """Returns the loads that were found since the last call; never waits."""
        loads = []
        while not self._found.empty():
            loads.append(self._found.get())
        return loads


def _look(
    found: queue.SimpleQueue[GpuLoad], is_over: threading.Event, load: Callable[[str], Any], every_s: float
) -> None:
    samples: dict[int, list[GpuLoad]] = {}
    with contextlib.suppress(OSError, AttributeError):  # no library, or a driver that has gone: no figure
        library = Nvml(load)
        while not is_over.wait(every_s):
            for each in library.sample():
                of = samples.setdefault(each.gpu, [])
                of.append(each)
                if len(of) == _SAMPLES:
                    found.put(together(of))
                    of.clear()


def together(loads: list[GpuLoad]) -> GpuLoad:
    """Returns several loads of a GPU as one."""
    num = sum(each.samples for each in loads)
    busy = sum(each.busy * each.samples for each in loads) / num
    return GpuLoad(loads[0].gpu, num, busy, max(each.used for each in loads))


def lacks_nvml() -> str:
    """Returns why this host tells no load of GPUs; empty if it does."""
    try:
        Nvml()
    except (OSError, AttributeError) as error:
        return str(error)
    return ""
