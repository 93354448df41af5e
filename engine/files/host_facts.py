"""Facts that a run's bits and speed depend on, read without starting a process and without importing torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.core.errors import EnvironmentLacksError, Problem, UserError, ensure
from engine.core.history.process_records import HostRecord
from engine.core.job.bit_fields import INSTRUCTION_SETS, fixed_set
from engine.files.accelerators import accelerators, device_facts

DISTRIBUTION = "bamboo-train"
# Instruction sets with which math libraries choose other kernels, and so other bits.
_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")

# Environment variables with the same effect.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


def host_facts(folder: Path) -> dict[str, object]:
    """Returns versions, the git commit of `folder`, and this host's name, kernel, processor and memory (bytes).

    The environment variables that select compute kernels are one fact, None if none is set.
    """
    cpu = _cpu_info(Path("/proc/cpuinfo"))
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    system = os.uname()
    return {
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "bamboo": installed_version(DISTRIBUTION),
        "git_commit": git_commit(folder),
        "host": system.nodename,
        "kernel": system.release,
        "machine": system.machine,
        "cpu": cpu.get("model name"),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "kernel_variables": _kernel_variables() or None,
        **device_facts(accelerators()),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def fix_instruction_set(name: str) -> None:
    """Makes all child processes compute with one instruction set; torch must not be loaded here yet.

    Raises:
        UserError: there is no such set, or the environment asks for something else.
        EnvironmentLacksError: the processor of this host does not have it.
    """
    if name not in INSTRUCTION_SETS:
        raise UserError([Problem("--isa", f"one of {', '.join(INSTRUCTION_SETS)}", repr(name))])
    variables, needs = INSTRUCTION_SETS[name]
    ensure("torch" not in sys.modules, "torch has chosen its instruction set already")
    wrong = {key: os.environ[key] for key in variables if os.environ.get(key, variables[key]) != variables[key]}
    if wrong:
        hint = f"--isa {name} sets it, and the environment has another value"
        raise UserError([Problem(key, repr(variables[key]), repr(value), hint) for key, value in wrong.items()])
    cpu = _cpu_info(Path("/proc/cpuinfo"))
    if lacks := [flag for flag in needs if flag not in cpu.get("flags", "").split()]:
        text = f"instruction set {name}: expected a processor with {', '.join(lacks)}, found {cpu.get('model name')!r}"
        raise EnvironmentLacksError(f"{text} on host {os.uname().nodename}")
    os.environ.update(variables)


def fixed_instruction_set() -> str:
    """Returns the instruction set that this process's environment fixes, or an empty string."""
    return fixed_set(_kernel_variables())


def _kernel_variables() -> list[str]:
    return [f"{name}={os.environ[name]}" for name in _KERNEL_VARIABLES if os.environ.get(name)]


def host_record(now: datetime, node: str = "", run_id: str = "") -> HostRecord:
    """Returns the record of this host and the time `now`, for the history of a run; one of several has a name."""
    return HostRecord(
        cpu=_cpu_info(Path("/proc/cpuinfo")).get("model name", os.uname().machine),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=installed_version("torch") or "",
        began=now.astimezone().isoformat(timespec="seconds"),
        node=node,
        run_id=run_id,
    )


def git_commit(folder: Path) -> str | None:
    """Returns the commit checked out in the repository around `folder`; None before its first, or outside of one."""
    try:
        for parent in (folder.resolve(), *folder.resolve().parents):
            if (parent / ".git").exists():
                git_dir = parent / ".git"
                if git_dir.is_file():  # in a worktree or a submodule it names the folder
                    git_dir = parent / git_dir.read_text().removeprefix("gitdir:").strip()
                return _commit(git_dir)
    except OSError:
        pass  # an unreadable repository must not keep a job from training
    return None


def installed_version(distribution: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_info(path: Path) -> dict[str, str]:
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _commit(git_dir: Path) -> str | None:
    head = (git_dir / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git_dir / "commondir"
    refs = git_dir / common.read_text().strip() if common.exists() else git_dir
    if (refs / name).exists():
        return (refs / name).read_text().strip()
    packed = refs / "packed-refs"
    if not packed.exists():
        return None
    match = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", packed.read_text(), re.MULTILINE)
    return match[1] if match else None
