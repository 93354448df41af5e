"""The load of GPUs, from a double of NVIDIA's library; a host without it tells none, and nobody waits for it."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest

from engine.core.history.run_history import history_of
from engine.core.history.run_records import LoadRecord
from engine.files import accelerators
from engine.files.accelerators import GpuLoad, GpuLook, Nvml, models_in_time, together
from engine.report.tables import loads_in_words


class FakeNvml:
    """Two GPUs, of which the second one tells no load."""

    def __init__(self) -> None:
        self.stands = threading.Event()
        self.stands.set()
        self.code = 0

    def nvmlInit_v2(self) -> int:
        self.stands.wait(30)
        return self.code

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        handle._obj.value = number + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = {b"GPU-first": 1}[name]
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = f"NVIDIA H{handle.value}00".encode()
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.65.06"
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 75
        return 3 if handle.value == 2 else 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = 5 << 20
        return 0


def found_by(look: GpuLook) -> list[GpuLoad]:
    until_s = time.monotonic() + 20
    while not (loads := look.found()) and time.monotonic() < until_s:
        time.sleep(0.005)
    look.end()
    return loads


@pytest.fixture(autouse=True)
def _sees_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # `make test` hides those that are there


def test_the_load_of_each_gpu_that_tells_it_is_a_mean_of_samples() -> None:
    library = FakeNvml()
    assert Nvml(lambda name: library).sample() == [GpuLoad(0, 1, 0.75, 5 << 20)]
    (load, *_) = found_by(GpuLook(lambda name: library, every_s=0.001))
    assert load == GpuLoad(0, 10, 0.75, 5 << 20)
    assert together([load, GpuLoad(0, 30, 0.25, 9)]) == GpuLoad(0, 40, 0.375, 5 << 20)


def test_without_the_library_or_a_driver_nothing_is_told() -> None:
    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    library = FakeNvml()
    library.code = 9  # no driver
    for load in (none, lambda name: library):
        with pytest.raises(OSError, match=r"NVML: error 9|cannot open"):
            Nvml(load)
        look = GpuLook(load, every_s=0.001)
        time.sleep(0.05)
        assert look.found() == []


@pytest.mark.parametrize(("visible", "handles"), [("1,0", [2, 1]), ("GPU-first", [1]), ("1", [2]), ("-1", [])])
def test_a_gpu_has_the_number_that_it_has_for_workers(
    monkeypatch: pytest.MonkeyPatch, visible: str, handles: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = FakeNvml()
    assert [load.gpu for load in Nvml(lambda name: library).sample()] == [
        at for at, handle in enumerate(handles) if handle == 1
    ]
    assert models_in_time(lambda name: library) == (tuple(f"NVIDIA H{each}00" for each in handles), "580.65.06")


def test_nobody_waits_for_a_driver_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    library.stands.clear()
    monkeypatch.setattr(accelerators, "_PATIENCE_S", 0.01)
    assert models_in_time(lambda name: library) == ((), "")
    look = GpuLook(lambda name: library, every_s=0.001)
    assert look.found() == []
    look.end()
    library.stands.set()


def test_the_report_tells_the_load_of_the_run() -> None:
    loads = [LoadRecord(gpu=0, samples=num, busy=busy, used=num << 20) for num, busy in ((10, 0.5), (30, 0.9))]
    told = "GPU 0 computed for 80% of 40 s, with at most 30 MiB in use."
    assert list(loads_in_words(history_of(loads))) == [told]
    assert list(loads_in_words(history_of([]))) == []
