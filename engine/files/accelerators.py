"""The GPUs of this host and the build of torch, read without starting CUDA; their load; the needs of NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.core.errors import EnvironmentLacksError
from engine.core.job.job import DeviceKind, Job
from engine.core.texts import counted

# The load of the GPUs of a host, from NVIDIA's management library; a host without it tells none.
#
# Rules: the library starts no CUDA. A call may stand still behind a driver that does, so a thread of its own calls, and
# whoever asks gets what it has found so far. A GPU has the number that it has for workers: the library counts all of
# the host by their bus, and so does CUDA in a worker (`CUDA_DEVICE_ORDER`), among those that are visible.


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


# What a worker needs of NCCL: its least version, and the variables that NCCL and torch read once, before their use.
_SETTINGS: Final = {
    "NCCL_RUNTIME_CONNECT": "1",  # no connections for collectives, which bamboo never calls
    "NCCL_NVLS_ENABLE": "0",  # nor their memory for multicast
    "NCCL_SOCKET_IFNAME": "lo",  # the workers of a run are on one host, and strangers need not see their ports
    # Groups of torch's own, in the user's code: their watchdog and their monitor must not end a worker.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LEAST_NCCL: Final = (2, 28, 7)  # the first with ncclCommRevoke
_WHEELS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # torch of the Python package index brings one of them
_STAND_IN: Final = "_BAMBOO_NCCL_STAND_IN"  # set by tests only; BAMBOO_* are fields of a job
HOST_ID: Final = "NCCL_HOSTID"  # NCCL refuses two ranks on one GPU of one host


def nccl_settings(worker: int | str, *, shares: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a worker; what the user's environment has stays, but for the id of the host."""
    found = {name: environment.get(name, value) for name, value in _SETTINGS.items()}
    return found | ({HOST_ID: f"bamboo-worker-{worker}"} if shares else {})


def nccl_lack(found: Sequence[int]) -> str:
    """Returns why this version of NCCL is of no use, or an empty string; so for no version at all."""
    told, least = (".".join(map(str, each)) for each in (found, LEAST_NCCL))
    return f"NCCL {told} was found, and {least} or newer is needed" if found and tuple(found) < LEAST_NCCL else ""


def nccl_of_wheel() -> tuple[int, ...]:
    """Returns the version of NCCL that is installed beside torch, without loading it; empty for another build."""
    for name in _WHEELS:
        try:
            return tuple(int(each) for each in version(name).split(".")[:3])
        except (PackageNotFoundError, ValueError):
            continue
    return ()


def nccl_stand_in() -> str:
    """Returns the module of the tests that stands in for NCCL and for streams of GPUs, between CPUs; empty for none."""
    return os.environ.get(_STAND_IN, "")


# The GPUs of this host and the build of torch, read without starting CUDA; and the device that a job takes there.
#
# Rules: the launcher and the fork server never start CUDA: a context takes memory on the device, and does not survive a
# fork. So the facts come from device files, from the driver's files in /proc, and from the text of torch's own version;
# without those files, from NVIDIA's management library, which starts no CUDA.


@dataclass(frozen=True, slots=True)
class Accelerators:
    """What a launcher can know of the GPUs of its host.

    `num_gpus` are those that processes may see, `names` their models as the driver tells them, `torch_cuda` the CUDA
    version that torch was built with: empty for a build without CUDA. `nccl` is the version of NCCL, if a wheel has it.
    """

    num_gpus: int = 0
    names: tuple[str, ...] = ()
    driver: str = ""
    torch_cuda: str = ""
    nccl: tuple[int, ...] = ()


def accelerators(
    dev: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia"), environment: Mapping[str, str] = os.environ
) -> Accelerators:
    """Returns the facts of this host; quick where there is no GPU."""
    files = [each for each in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    if not files:
        return Accelerators()
    num_gpus = len(visible_gpus(environment, len(files)))
    told = (_first(r"Model:\s*(.+)", each / "information") for each in sorted(driver.glob("gpus/*")))
    names, version = tuple(filter(None, told)), _first(r"Kernel Module(?: for \S+)?\s+(\S+)", driver / "version")
    if not names:  # a sandbox may hide the driver's files
        names, version = models_in_time()
    return Accelerators(num_gpus, names, version, torch_cuda(), nccl_of_wheel())


def torch_cuda() -> str:
    """Returns the CUDA version that torch was built with, without importing torch; empty for none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    return _first(r"^cuda[^=]*=\s*'([^']+)'", Path(found.origin).with_name("version.py"))


def _first(pattern: str, path: Path) -> str:
    try:
        found = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def device_for(job: Job, found: Accelerators) -> tuple[DeviceKind, str]:
    """Returns the device of a job, and why ``auto`` has become it: cuda where each worker gets a GPU of its own."""
    if job.device != "auto":
        return job.device, ""
    if job.fsdp and found.num_gpus:
        return "cpu", "auto: shards are put together on the CPU only"
    if why := lacks(job, found):
        return "cpu", f"auto: {why}"
    return "cuda", f"auto: {counted(found.num_gpus, 'GPU')}"


def lacks(job: Job, found: Accelerators, num_workers: int | None = None) -> str:
    """Returns why the workers of a job, or as many, cannot compute on the GPUs of this host; empty if they can.

    Those that wait need a GPU too: their memory is there, and CUDA has begun, when they take a place.
    """
    num_workers = job.num_workers + job.standby if num_workers is None else num_workers
    if not found.num_gpus:
        return "no GPU"
    if not found.torch_cuda:
        return f"{counted(found.num_gpus, 'GPU')}, and a build of torch without CUDA"
    if num_workers > found.num_gpus and not job.share_gpu:
        return f"{counted(found.num_gpus, 'GPU')} for {counted(num_workers, 'worker')}"
    return ""


def sharing(job: Job, found: Accelerators | None = None) -> str:
    """Returns in words that the workers of a job share GPUs; empty if each has one of its own, or none has one."""
    found = accelerators() if found is None else found
    if job.device != "cuda" or not job.share_gpu or job.num_workers <= found.num_gpus:
        return ""
    shared = f"{counted(job.num_workers, 'worker')} share {counted(found.num_gpus, 'GPU')} (--share-gpu)"
    return f"{shared}: a mode for tests; they wait for each other, so the times say little about training"


def refuse_what_this_host_lacks(job: Job, found: Accelerators | None = None, num_workers: int | None = None) -> None:
    """Raises EnvironmentLacksError for a job whose workers cannot compute or exchange tensors here as it says.

    It names all that lacks. `num_workers` are those of this host, if it has not all of them.
    """
    found = accelerators() if found is None else found
    lacking, problems = lacks(job, found, num_workers), []
    if job.device == "cuda" and lacking:
        way_out = "use --device cpu" + (", or --share-gpu for a test" if found.num_gpus and found.torch_cuda else "")
        problems.append(f"device cuda needs one GPU per worker, and there is {lacking}; {way_out}")
    has_none = not (found.num_gpus and found.torch_cuda)
    if job.device != "cuda" or has_none:
        on_cpu = f"the workers compute on the CPU ({lacking or '--device cpu'})"
        if job.backend == "nccl" and not nccl_stand_in():
            problems.append(f"backend nccl sends between GPUs, and {on_cpu}; use --backend direct")
        if job.retain == "cpu":
            problems.append(f"retain cpu takes values from a GPU to the host, and {on_cpu}; use --retain device")
    elif job.backend == "nccl" and (lack := nccl_lack(found.nccl)):
        problems.append(f"{lack}: install a build of torch with it, or use --backend direct")
    if problems:
        raise EnvironmentLacksError("\n".join(problems))


def device_facts(found: Accelerators) -> dict[str, object]:
    """Returns the facts that decide the bits of a job on GPUs: their models and the CUDA version; None without one."""
    return {"gpus": _each_once(found.names) or None, "torch_cuda": found.torch_cuda or None, "driver": found.driver}


def _each_once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
