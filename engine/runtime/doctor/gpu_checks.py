"""What a host's GPUs, their driver and the build of torch allow, in words: a pure function of their facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from engine.core.texts import counted
from engine.files.accelerators import Accelerators
from engine.files.nccl_settings import LEAST_NCCL

# The first driver of each major version of CUDA (NVIDIA's table of compatibility).
_FIRST_DRIVER = {11: 450, 12: 525, 13: 580}


class GpuVerdict(NamedTuple):
    """What was found, and the fix if something is missing."""

    status: Literal["ok", "warn"]
    found: str
    fix: str = ""


def judge_gpus(torch: Mapping[str, Any], host: Accelerators) -> GpuVerdict:
    """Judges the GPUs by the facts of torch's probe (`version`, `num_gpus`, `nccl`) and of the host's files.

    `nccl` is the version of NCCL, empty for none, `reconfigures` torch's own ways to form a group of it anew; `nvml`,
    which may be added, says why there is no load of GPUs.
    """
    usable, cuda = int(torch["num_gpus"]), host.torch_cuda
    if not usable and not host.num_gpus:
        return GpuVerdict("ok", "none: workers run on the CPU, and play the faults of GPUs (without_gpu: double)")
    if not usable:
        return _unusable(torch, host)
    names = " and ".join(dict.fromkeys(host.names))
    parts = [f"{usable} x {names}" if names else counted(usable, "GPU")]
    parts += [f"driver {host.driver}"] * bool(host.driver) + [f"CUDA {cuda}"] * bool(cuda)
    found = ", ".join(parts)
    if len(set(host.names)) > 1:
        fix = "CUDA_VISIBLE_DEVICES with GPUs of one kind: others have other kernels, and so other bits"
        return GpuVerdict("warn", f"{found}; GPUs of several kinds", fix)
    nccl, least = (".".join(map(str, each)) for each in (torch["nccl"], LEAST_NCCL))
    if tuple(torch["nccl"]) < LEAST_NCCL:
        fix = f"install a build of torch with NCCL {least} or newer, or use --backend direct: tensors then go through "
        return GpuVerdict("warn", f"{found}, {f'NCCL {nccl}: too old' if nccl else 'no NCCL'}", f"{fix}host memory")
    each = "a worker each with --device cuda, or several with --share-gpu for a test"
    no_load = f"; no load of GPUs in reports: {torch['nvml']}" if torch.get("nvml") else ""
    ways = " and ".join(torch.get("reconfigures", ()))
    watched = f"; {ways} could form groups anew (not used yet)" if ways else ""
    return GpuVerdict("ok", f"{found}, NCCL {nccl}; {each}{watched}{no_load}")


def _unusable(torch: Mapping[str, Any], host: Accelerators) -> GpuVerdict:
    found = f"{counted(host.num_gpus, 'GPU')} that torch {torch['version']} cannot use"
    if not host.torch_cuda:
        return GpuVerdict("warn", f"{found}: it was built without CUDA", "install a CUDA build of torch")
    needed = _FIRST_DRIVER.get(_major(host.torch_cuda), 0)
    if host.driver and _major(host.driver) < needed:
        why = f"driver {host.driver}, and CUDA {host.torch_cuda} needs {needed} or newer"
        return GpuVerdict("warn", f"{found}: {why}", "update the driver, or install torch for an older CUDA")
    return GpuVerdict("warn", found, "install a CUDA build of torch that fits the driver; nvidia-smi tells its version")


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0
