"""Memory: a worker that asks for more than there is."""

from __future__ import annotations

import resource
import signal
from typing import Any

from engine.runtime.faults.registry import Parameters, Scene, Sign, fault_kind

_CHUNK_BYTES = 64 << 20
_MARGIN_BYTES = 256 << 20  # so that it asks a few times before it is refused


def _runs_out(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "raised" or (sign == "exit" and value == -signal.SIGKILL)


@fault_kind(
    "oom", "The worker runs out of memory: its limit is lowered, then it allocates.", "worker", _runs_out, ends=True
)
def oom(scene: Scene) -> None:
    """Asks for memory, untouched so that the host does not suffer, until it is refused."""
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
        raise MemoryError(f"injected by fault {scene.fault!r}") from error
