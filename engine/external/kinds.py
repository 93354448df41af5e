"""The kinds of faults that can strike any job from outside: signals, and what `effects` does beyond them.

A slow process is stopped now and then.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import count

from engine.core.faults.fault import FaultKind, Kinds, Parameter, Parameters, Sign, TimedSignal

_PERIOD_NS = 20_000_000
_FACTOR = Parameter("factor", "number", "how many times as long its work takes", 4.0)
_FOR = Parameter("for", "duration", "how long; without it, to the end of the run")
_PAUSE_FOR = Parameter("for", "duration", "how long it stands still", required=True, least=1)
_PATH = Parameter("path", "text", "a folder on the file system, one of at most 1 GiB", required=True)
_FULL_FOR = Parameter("for", "duration", "how long; without it, to the end of the run", least=1)
_SIGNALS = ("kill", "terminate", "stop")  # kinds of bamboo's own workers that need nothing but a process


def _stands_still(sign: Sign, value: object, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


PAUSE = FaultKind("pause", "Stops the process for a while.", "agent", False, (_PAUSE_FOR,), _stands_still)
SLOW = FaultKind("slow", "Stops the process for a part of each 20 ms.", "agent", False, (_FACTOR, _FOR), _stands_still)

DISK_FULL = FaultKind(
    "disk-full", "Fills a small file system to its last byte: ENOSPC.", "agent", False, (_PATH, _FULL_FOR)
)
OOM = FaultKind("oom", "Limits the memory of the process: the kernel ends it when it needs more.", "agent", True)
CUT = FaultKind("cut", "Destroys the TCP connections between two ranks.", "agent", False)
_BEYOND = (DISK_FULL, OOM, CUT)


def external_kinds(kinds: Kinds) -> dict[str, FaultKind]:
    """Returns the kinds that can strike any process by name, given those of bamboo's own workers."""
    return {name: kinds[name] for name in _SIGNALS} | {kind.name: kind for kind in (PAUSE, SLOW, *_BEYOND)}


def signals_of(kind: FaultKind, parameters: Parameters) -> Iterator[TimedSignal]:
    """Yields the signals of a fault in their order; without an end if a process is slow to the end of the run."""
    if kind.name == "pause":
        yield from (TimedSignal(0, signal.SIGSTOP), TimedSignal(int(parameters["for_ns"]), signal.SIGCONT))
    elif kind.name == "slow":
        stopped_ns = int(_PERIOD_NS * (1 - 1 / max(1.0, float(parameters["factor"]))))
        for at_ns in count(0, _PERIOD_NS):
            if at_ns >= int(parameters.get("for_ns", at_ns + 1)):
                return
            yield from (TimedSignal(at_ns, signal.SIGSTOP), TimedSignal(at_ns + stopped_ns, signal.SIGCONT))
    else:
        yield from kind.signals(parameters)
