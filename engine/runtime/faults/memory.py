"""Memory: a worker that allocates more memory than its limit."""

from __future__ import annotations

import resource
import signal
from typing import Any

from engine.core.faults.fault_kind import Parameters, Sign
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_CHUNK_BYTES = 64 << 20
_MARGIN_BYTES = 256 << 20  # a few allocations succeed first


def _runs_out(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "raised" or (sign == "exit" and value == -signal.SIGKILL)


@fault_kind(
    "oom", "The worker runs out of memory: its limit is lowered, then it allocates.", "worker", _runs_out, ends=True
)
def oom(context: WorkerFaultContext) -> None:
    """Allocates until MemoryError; does not touch the memory, so that the host does not run short."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MARGIN_BYTES, hard))
    hoard = []
    try:
        while True:
            hoard.append(bytearray(_CHUNK_BYTES))
    except MemoryError as error:
        hoard.clear()
        raise MemoryError(f"injected by fault {context.fault!r}") from error
