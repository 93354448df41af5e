"""What a worker needs of NCCL: its least version, and the variables that NCCL and torch read once, before their use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

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
