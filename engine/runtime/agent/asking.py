"""Asks the policy of an elastic job at a tick, if that is due, and lets the coordinator decide on its answer."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.elastic.rebalancing import Rebalancing
from engine.core.elastic.wishes import wish
from engine.core.history.elastic_records import PolicyRecord
from engine.core.membership.events import Wanted
from engine.core.membership.state import State
from engine.runtime.agent.run_state import RunState
from engine.runtime.ipc.recorder import Recorder, now_ns


def ask(
    asked: Rebalancing,
    run: RunState,
    known: State,
    recorder: Recorder,
    decide: Callable[[Wanted], object],
    *,
    takes_in: bool = False,
) -> Rebalancing:
    """Asks if that is due, and records the answer. Returns what was asked; workers that begin again need a new one."""
    free_bytes = _free_bytes if run.job.device == "cpu" else lambda: None  # a GPU's memory is not that of the host
    found = wish(asked, run.job, known, now_ns(), run.times, free_bytes, takes_in=takes_in)
    if found.why:
        owners = found.wanted.owners if found.wanted else ()
        recorder.write(PolicyRecord(step=known.committed, why=found.why, owners=owners))
    if found.wanted is not None:
        decide(found.wanted)
    return found.asked


def _free_bytes() -> int | None:
    """Returns the bytes of memory of this host that processes can still get."""
    with open("/proc/meminfo") as facts:
        return next((1024 * int(line.split()[1]) for line in facts if line.startswith("MemAvailable:")), None)
