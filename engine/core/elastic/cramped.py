"""Cramped workers: which newcomers have no memory for one slot, and wait.

Rules: the memory that the host has free is shared out to equal parts, one for each member that stays and one for each
newcomer that has enough, as the policy shares it out. Newcomers that have enough keep it before others get some, and a
cramped one needs a tenth more than a slot takes: so memory that comes and goes changes little. The host looks when
members, newcomers or the sizes of slots change, and each ten seconds while a worker is cramped or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.elastic.worker_times import WorkerTimes, owned_sizes
from engine.core.membership.events import Cramped
from engine.core.membership.state import State
from engine.core.membership.waiting import is_unknown
from engine.core.texts import size_text

LOOK_AGAIN_NS = 10_000_000_000
_AGAIN_PERCENT = 110  # of a slot, for a worker that is cramped


class MemoryLook(NamedTuple):
    """What the last look was about, and its time."""

    about: tuple[tuple[int, ...], ...] = ()
    at_ns: int = 0


def look_for_memory(
    last: MemoryLook,
    job: Job,
    known: State,
    newcomers: Collection[int],
    now_ns: int,
    times: WorkerTimes,
    free_bytes: Callable[[], int | None],
) -> tuple[MemoryLook, Cramped | None]:
    """Returns the last look, and the workers that are cramped if these are others; `newcomers` also load."""
    near = tuple(sorted(each for each in newcomers if each in known.waiting or is_unknown(known, each)))
    sizes = owned_sizes(times, job)
    if not (near or known.cramped) or not sizes or known.is_over:
        return last, None
    staying = tuple(worker for worker in known.members if worker not in known.leaving)
    about = (staying, near, known.waiting, sizes)
    if about == last.about and now_ns - last.at_ns < LOOK_AGAIN_NS:
        return last, None
    found = _cramped(job, known, len(staying), near, min(sizes), free_bytes())
    is_news = found.keys() != known.cramped.keys()
    return MemoryLook(about, now_ns), Cramped(now_ns, found) if is_news else None


def _cramped(
    job: Job, known: State, num_members: int, near: Collection[int], least: int, free_bytes: int | None
) -> dict[int, str]:
    if free_bytes is None:
        return {}
    found, parts = dict[int, str](), num_members
    for worker in sorted(near, key=lambda each: (each in known.cramped, each not in known.eager, each)):
        part = free_bytes // (parts + 1)
        if 100 * part >= least * (_AGAIN_PERCENT if worker in known.cramped else 100):
            parts += 1
            continue
        text = f"waits on: one {job.slot_noun} takes {size_text(least)}, and it has {size_text(part)}"
        found[worker] = known.cramped.get(worker, text)
    return found
