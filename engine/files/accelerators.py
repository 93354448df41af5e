"""The GPUs of this host and the build of torch, read without starting CUDA; and the device that a job takes there.

Rules: the launcher and the fork server never start CUDA: a context takes memory on the device, and does not survive a
fork. So the facts come from device files, from the driver's files in /proc, and from the text of torch's own version;
without those files, from NVIDIA's management library, which starts no CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.core.config.job import DeviceKind, Job
from engine.core.errors import EnvironmentLacksError
from engine.core.texts import counted
from engine.files.nccl_settings import nccl_lack, nccl_of_wheel, nccl_stand_in
from engine.files.nvml import models_in_time, visible_gpus


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
