"""Asks the policy of an elastic job at a tick, if that is due, and lets the coordinator decide on its answer.

It tells the coordinator, too, which newcomers have too little memory for a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.core.config.job import Job
from engine.core.elastic.cramped import MemoryLook, look_for_memory
from engine.core.elastic.rebalancing import Rebalancing
from engine.core.elastic.wishes import wish
from engine.core.history.elastic_records import PolicyRecord
from engine.core.membership.events import Cramped, Wanted
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
    found = wish(asked, run.job, known, now_ns(), run.times, _memory_of(run.job, known), takes_in=takes_in)
    if found.why:
        owners = found.wanted.owners if found.wanted else ()
        recorder.write(PolicyRecord(step=known.committed, why=found.why, owners=owners))
    if found.wanted is not None:
        decide(found.wanted)
    return found.asked


def look_at_memory(
    last: MemoryLook,
    run: RunState,
    known: State,
    newcomers: Collection[int],
    decide: Callable[[Cramped], object],
) -> MemoryLook:
    """Looks at the memory that newcomers need, if that is due. Returns the look."""
    look, cramped = look_for_memory(last, run.job, known, newcomers, now_ns(), run.times, _memory_of(run.job, known))
    if cramped is not None:
        decide(cramped)
    return look


def _memory_of(job: Job, known: State) -> Callable[[], int | None]:
    """Returns what reads the free memory for the workers of a job.

    That of a GPU is not that of the host, and that of other hosts is not known here.
    """
    is_known = job.device == "cpu" and len({*known.nodes.values()}) < 2
    return _free_bytes if is_known else lambda: None


def _free_bytes() -> int | None:
    """Returns the bytes of memory of this host that processes can still get."""
    with open("/proc/meminfo") as facts:
        return next((1024 * int(line.split()[1]) for line in facts if line.startswith("MemAvailable:")), None)
