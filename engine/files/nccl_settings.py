"""The environment variables that a worker sets before its first communicator of NCCL; NCCL and torch read them once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SETTINGS: Final = {
    "NCCL_RUNTIME_CONNECT": "0",  # connections for collectives are made with the group, too
    "NCCL_SOCKET_IFNAME": "lo",  # the workers of a run are on one host, and strangers need not see their ports
    # Groups of torch's own, in the user's code: their watchdog and their monitor must not end a worker.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LEAST_NCCL: Final = (2, 29, 0)  # the oldest version with all fields of the configuration that is given to it
HOST_ID: Final = "NCCL_HOSTID"  # NCCL refuses two ranks on one GPU of one host


def nccl_settings(worker: int | str, *, shares: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a worker; what the user's environment has stays, but for the id of the host."""
    found = {name: environment.get(name, value) for name, value in _SETTINGS.items()}
    return found | ({HOST_ID: f"bamboo-worker-{worker}"} if shares else {})
