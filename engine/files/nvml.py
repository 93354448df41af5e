"""The load of the GPUs of a host, from NVIDIA's management library; a host without it tells none.

Rules: the library starts no CUDA. A call may stand still behind a driver that does, so a thread of its own calls, and
whoever asks gets what it has found so far. A GPU has the number that it has for workers: the library counts all of the
host by their bus, and so does CUDA in a worker (`CUDA_DEVICE_ORDER`), among those that are visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SAMPLES = 10  # of a second each, in one figure
_PATIENCE_S = 2.0
_TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


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

    def _handles(self) -> list[ctypes.c_void_p]:
        """Returns the handles of the GPUs that workers see, in their order."""
        count, found = ctypes.c_uint(), []
        self._done(self._c.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for name in visible_gpus(os.environ, count.value):
            found.append(handle := ctypes.c_void_p())
            if name.isdecimal():
                self._done(self._c.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)))
            else:
                self._done(self._c.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
        return found

    def models(self) -> tuple[tuple[str, ...], str]:
        """Returns the models of the GPUs, and the version of the driver."""
        text, names = ctypes.create_string_buffer(_TEXT_BYTES), []
        for handle in self._handles():
            self._done(self._c.nvmlDeviceGetName(handle, text, _TEXT_BYTES))
            names.append(text.value.decode(errors="replace"))
        self._done(self._c.nvmlSystemGetDriverVersion(text, _TEXT_BYTES))
        return tuple(names), text.value.decode(errors="replace")

    def sample(self) -> list[GpuLoad]:
        """Returns the present load of each GPU that tells it."""
        found = []
        for number, handle in enumerate(self._handles()):
            rates, memory = _Rates(), _Memory()
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


def visible_gpus(environment: Mapping[str, str], num_gpus: int) -> tuple[str, ...]:
    """Returns the GPUs of a host that processes may use, each by its number or its own name.

    As CUDA reads its variable: up to the first entry that is none of them, such as -1.
    """
    listed = environment.get(_VISIBLE)
    if listed is None:
        return tuple(map(str, range(num_gpus)))
    names = (each.strip() for each in listed.split(","))
    return tuple(takewhile(lambda name: _is_gpu(name, num_gpus), names))[:num_gpus]


def _is_gpu(name: str, num_gpus: int) -> bool:
    return int(name) < num_gpus if name.isdecimal() else name.startswith(("GPU-", "MIG-"))


def models_in_time(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[tuple[str, ...], str]:
    """Returns the models of the GPUs and the version of the driver; nothing if the library does not tell it soon."""
    found: queue.SimpleQueue[tuple[tuple[str, ...], str]] = queue.SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):
            found.put(Nvml(load).models())

    thread = threading.Thread(target=ask, name="gpu models", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return ((), "") if found.empty() else found.get()


def lacks_nvml() -> str:
    """Returns why this host tells no load of GPUs; empty if it does."""
    try:
        Nvml()
    except (OSError, AttributeError) as error:
        return str(error)
    return ""
