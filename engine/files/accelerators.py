"""The GPUs of this host, their load, and the build of torch, read without starting CUDA; settings for NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.core.errors import EnvironmentLacksError
from engine.core.job.job import DeviceKind, Job
from engine.core.texts import counted

# The load of the GPUs of a host, from NVIDIA's management library, if there is one.
#
# Rules: the library does not start CUDA. A call may hang if the driver does, so it is made in a separate thread, and
# the caller gets the results so far. GPUs have the same numbers as in workers: the library counts those of the host by
# their bus, and so does CUDA in a worker (`CUDA_DEVICE_ORDER`), among the visible ones.


LIBRARY = "libnvidia-ml.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SAMPLES = 10  # of a second each, in one figure
_PATIENCE_S = 2.0
_TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class GpuLoad(NamedTuple):
    """The load of a GPU by its number: the mean share of time in which it computed, and the peak bytes in use."""

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
    """The library; raises OSError if there is none, or it cannot reach a driver."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL):
        self._c = load(LIBRARY)
        self._done(self._c.nvmlInit_v2())

    def _done(self, code: int) -> None:
        if code:
            raise OSError(f"NVML: error {code}")

    def _handles(self) -> list[ctypes.c_void_p]:
        """Returns the handles of the GPUs that workers see, in order."""
        count, handles = ctypes.c_uint(), []
        self._done(self._c.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for name in visible_gpus(os.environ, count.value):
            handles.append(handle := ctypes.c_void_p())
            if name.isdecimal():
                self._done(self._c.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)))
            else:
                self._done(self._c.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
        return handles

    def models(self) -> tuple[tuple[str, ...], str]:
        """Returns the models of the GPUs, and the version of the driver."""
        text, names = ctypes.create_string_buffer(_TEXT_BYTES), []
        for handle in self._handles():
            self._done(self._c.nvmlDeviceGetName(handle, text, _TEXT_BYTES))
            names.append(text.value.decode(errors="replace"))
        self._done(self._c.nvmlSystemGetDriverVersion(text, _TEXT_BYTES))
        return tuple(names), text.value.decode(errors="replace")

    def sample(self) -> list[GpuLoad]:
        """Returns the current load of each GPU that reports it."""
        loads = []
        for number, handle in enumerate(self._handles()):
            rates, memory = _Rates(), _Memory()
            if self._c.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
                continue  # a part of a GPU has no figure
            self._c.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            loads.append(GpuLoad(number, 1, rates.gpu / 100, memory.used))
        return loads


class GpuLook:
    """Samples the GPUs once a second; on a host without NVML there are no loads."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL, every_s: float = 1.0):
        self._loads: queue.SimpleQueue[GpuLoad] = queue.SimpleQueue()
        is_over = threading.Event()
        args = (self._loads, is_over, load, every_s)
        threading.Thread(target=_look, args=args, name="gpu look", daemon=True).start()
        self.end = weakref.finalize(self, is_over.set)

    def found(self) -> list[GpuLoad]:
        """Returns the loads since the last call; never waits."""
        return [self._loads.get() for _ in range(self._loads.qsize())]


def _look(
    results: queue.SimpleQueue[GpuLoad], is_over: threading.Event, load: Callable[[str], Any], every_s: float
) -> None:
    samples: dict[int, list[GpuLoad]] = {}
    with contextlib.suppress(OSError, AttributeError):  # no library, or the driver is gone: no figures
        library = Nvml(load)
        while not is_over.wait(every_s):
            for sample in library.sample():
                of_gpu = samples.setdefault(sample.gpu, [])
                of_gpu.append(sample)
                if len(of_gpu) == _SAMPLES:
                    results.put(together(of_gpu))
                    of_gpu.clear()


def together(loads: list[GpuLoad]) -> GpuLoad:
    """Returns several loads of a GPU as one."""
    num = sum(each.samples for each in loads)
    busy = sum(each.busy * each.samples for each in loads) / num
    return GpuLoad(loads[0].gpu, num, busy, max(each.used for each in loads))


def visible_gpus(environment: Mapping[str, str], num_gpus: int) -> tuple[str, ...]:
    """Returns the GPUs that processes may use, by number or UUID, up to the first invalid entry, as CUDA does."""
    listed = environment.get(_VISIBLE)
    if listed is None:
        return tuple(map(str, range(num_gpus)))

    def is_gpu(name: str) -> bool:
        return int(name) < num_gpus if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    return tuple(takewhile(is_gpu, map(str.strip, listed.split(","))))[:num_gpus]


def models_in_time(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[tuple[str, ...], str]:
    """Returns the models of the GPUs and the version of the driver; nothing if the library does not answer soon."""
    answers: queue.SimpleQueue[tuple[tuple[str, ...], str]] = queue.SimpleQueue()

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):
            answers.put(Nvml(load).models())

    thread = threading.Thread(target=ask, name="gpu models", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return ((), "") if answers.empty() else answers.get()


def lacks_nvml() -> str:
    """Returns why this host reports no load of GPUs, or an empty string."""
    try:
        Nvml()
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


# Variables that NCCL and torch read once, before their use.
_SETTINGS: Final = {
    "NCCL_RUNTIME_CONNECT": "1",  # no connections for collectives, which bamboo never calls
    "NCCL_NVLS_ENABLE": "0",  # nor their memory for multicast
    "NCCL_SOCKET_IFNAME": "lo",  # the workers of a run are on one host; the ports need not be visible
    # The watchdog and monitor of torch's own groups, in the user's code, must not end a worker.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LEAST_NCCL: Final = (2, 28, 7)  # the first with ncclCommRevoke
_WHEELS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # torch from PyPI depends on one of them
_STAND_IN: Final = "_BAMBOO_NCCL_STAND_IN"  # set by tests only; BAMBOO_* are fields of a job
HOST_ID: Final = "NCCL_HOSTID"  # NCCL refuses two ranks on one GPU of one host


def nccl_settings(worker: int | str, *, shares: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a worker; the user's environment takes precedence, except for the id of the host."""
    settings = {name: environment.get(name, value) for name, value in _SETTINGS.items()}
    return settings | ({HOST_ID: f"bamboo-worker-{worker}"} if shares else {})


def nccl_lack(nccl: Sequence[int]) -> str:
    """Returns why this version of NCCL cannot be used, or an empty string, also for no version at all."""
    if not nccl or tuple(nccl) >= LEAST_NCCL:
        return ""
    version, least = (".".join(map(str, numbers)) for numbers in (nccl, LEAST_NCCL))
    return f"NCCL {version} was found, and {least} or newer is needed"


def nccl_of_wheel() -> tuple[int, ...]:
    """Returns the version of NCCL installed with torch, without loading it; nothing for another build."""
    for name in _WHEELS:
        with contextlib.suppress(PackageNotFoundError, ValueError):
            return tuple(map(int, version(name).split(".")[:3]))
    return ()


def nccl_stand_in() -> str:
    """Returns the module of the tests that replaces NCCL and streams of GPUs, between CPUs; empty for none."""
    return os.environ.get(_STAND_IN, "")


# The GPUs of this host and the build of torch, and the device that a job gets.
#
# Rules: the launcher and the fork server never start CUDA: a context takes memory on the device, and does not survive a
# fork. So the facts come from device files, from the driver's files in /proc, and from the source of torch's version;
# without those files, from NVIDIA's management library.


@dataclass(frozen=True, slots=True)
class Accelerators:
    """What a launcher knows about its host's visible GPUs, the CUDA of its torch, and NCCL from a wheel."""

    num_gpus: int = 0
    names: tuple[str, ...] = ()
    driver: str = ""
    torch_cuda: str = ""
    nccl: tuple[int, ...] = ()


def accelerators(
    dev: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia"), environment: Mapping[str, str] = os.environ
) -> Accelerators:
    """Returns the facts of this host; quick where there is no GPU."""
    files = [file for file in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name)]
    if not files:
        return Accelerators()
    num_gpus = len(visible_gpus(environment, len(files)))
    models = (_first(r"Model:\s*(.+)", gpu / "information") for gpu in sorted(driver.glob("gpus/*")))
    names, version = tuple(filter(None, models)), _first(r"Kernel Module(?: for \S+)?\s+(\S+)", driver / "version")
    if not names:  # a sandbox may hide the driver's files
        names, version = models_in_time()
    return Accelerators(num_gpus, names, version, torch_cuda(), nccl_of_wheel())


def torch_cuda() -> str:
    """Returns the CUDA version that torch was built with, without importing torch; empty for none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    return _first(r"^cuda[^=]*=\s*'([^']+)'", Path(spec.origin).with_name("version.py"))


def _first(pattern: str, path: Path) -> str:
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def device_for(job: Job, host: Accelerators) -> tuple[DeviceKind, str]:
    """Returns the device of a job, and why ``auto`` became that: cuda if each worker gets a GPU of its own."""
    if job.device != "auto":
        return job.device, ""
    if job.fsdp and host.num_gpus:
        return "cpu", "auto: shards are put together on the CPU only"
    if why := lacks(job, host):
        return "cpu", f"auto: {why}"
    return "cuda", f"auto: {counted(host.num_gpus, 'GPU')}"


def lacks(job: Job, host: Accelerators, num_workers: int | None = None) -> str:
    """Returns why the job's workers, or `num_workers`, cannot compute on this host's GPUs; standbys need one too."""
    num_workers = job.num_workers + job.standby if num_workers is None else num_workers
    if not host.num_gpus:
        return "no GPU"
    if not host.torch_cuda:
        return f"{counted(host.num_gpus, 'GPU')}, and a build of torch without CUDA"
    if num_workers > host.num_gpus and not job.share_gpu:
        return f"{counted(host.num_gpus, 'GPU')} for {counted(num_workers, 'worker')}"
    return ""


def sharing(job: Job, host: Accelerators | None = None) -> str:
    """Returns in words that the workers of a job share GPUs, or an empty string if they do not."""
    host = accelerators() if host is None else host
    if job.device != "cuda" or not job.share_gpu or job.num_workers <= host.num_gpus:
        return ""
    shared = f"{counted(job.num_workers, 'worker')} share {counted(host.num_gpus, 'GPU')} (--share-gpu)"
    return f"{shared}: a mode for tests; they wait for each other, so the times say little about training"


def refuse_what_this_host_lacks(job: Job, host: Accelerators | None = None, num_workers: int | None = None) -> None:
    """Raises EnvironmentLacksError with all that this host lacks for a job's workers, or `num_workers` of them."""
    host = accelerators() if host is None else host
    lacking, problems = lacks(job, host, num_workers), []
    if job.device == "cuda" and lacking:
        way_out = "use --device cpu" + (", or --share-gpu for a test" if host.num_gpus and host.torch_cuda else "")
        problems.append(f"device cuda needs one GPU per worker, and there is {lacking}; {way_out}")
    has_none = not (host.num_gpus and host.torch_cuda)
    if job.device != "cuda" or has_none:
        on_cpu = f"the workers compute on the CPU ({lacking or '--device cpu'})"
        if job.backend == "nccl" and not nccl_stand_in():
            problems.append(f"backend nccl sends between GPUs, and {on_cpu}; use --backend direct")
        if job.retain == "cpu":
            problems.append(f"retain cpu takes values from a GPU to the host, and {on_cpu}; use --retain device")
    elif job.backend == "nccl" and (lack := nccl_lack(host.nccl)):
        problems.append(f"{lack}: install a build of torch with it, or use --backend direct")
    if problems:
        raise EnvironmentLacksError("\n".join(problems))


def device_facts(host: Accelerators) -> dict[str, object]:
    """Returns the facts that decide the bits of a job on GPUs: their models and the CUDA version, or None."""
    models = list(dict.fromkeys(host.names))
    return {"gpus": models or None, "torch_cuda": host.torch_cuda or None, "driver": host.driver}
