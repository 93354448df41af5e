"""Parts of a plan: what one member needs of a repair, as a difference to the grid of a plan that all members have.

The grid of a plan is its members with their hosts, the owners and shadows of all slots, and the schedule. All members
have that of the last plan by which training began, and the coordinator keeps it. So the bytes of a failure grow with
the job, and not with its square: each member is told what changed, and how it and its peers go on.

    coordinator    grid of epoch 3 --change--> grid of epoch 4      its digest
    member         grid of epoch 3 --change--> grid of epoch 4      is compared

Rules: a part has the digest of its grid. A member with no such base, with another result, or with peers of whom it is
not told (those of tied stages, which a coordinator does not know) asks for the whole plan. A newcomer gets the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from engine.core.ownership import Grid, Members, Ownership, Slot
from engine.core.program.dependencies import peers_of
from engine.core.program.inventory import GridChange, PlanMessage, PlanPartMessage, Repair

V = TypeVar("V")
_ALONE = -1  # the number of the host, if all are on one

ownership_of = lru_cache(maxsize=8)(Ownership)


def grid_of(plan: PlanMessage) -> PlanMessage:
    """Returns a plan with nothing but its epoch and its grid."""
    return replace(plan, committed=0, leaving=(), inventories=(), wanted=(), ships=(), repair=None, digest="")


@lru_cache(maxsize=4)  # workers of one process share it
def first_grid(epoch: int, members: Members, ownership: Ownership, hosts: tuple[int, ...] = ()) -> PlanMessage:
    """Returns the grid of an epoch that begins without a plan."""
    owners, shadows = ownership.owners, ownership.shadows or ((),) * len(ownership.owners)
    return PlanMessage(epoch, 0, (*members,), (), owners, shadows, (), hosts=hosts, before=owners)


def _digest(of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()


def _grid_digest(grid: PlanMessage) -> str:
    return _digest((grid.members, grid.hosts, grid.owners, grid.shadows, grid.before, grid.schedule))


def both_digests(plan: PlanMessage, repair: Repair) -> str:
    """Returns the SHA-256 of the grid of a plan and that of its whole repair, as text."""
    return f"{_grid_digest(plan)} {_digest(repair)}"


# At the coordinator


def parts_of(plan: PlanMessage, base: PlanMessage, shape: Grid) -> Iterator[tuple[int, PlanPartMessage]]:
    """Yields the part of each member that has the base; none if the plan is no repair, or cannot be told in parts."""
    repair, change = plan.repair, _change(base, plan)
    wanted = _differing(plan.owners, plan.wanted or plan.owners)
    is_told = _wanted(plan, wanted) == plan.wanted
    if repair is None or not is_told or _changed(base, change) != replace(grid_of(plan), epoch=base.epoch):
        return
    ownership = ownership_of(shape, plan.owners, plan.shadows)
    rests = {rest.worker: rest for rest in repair.rests}
    done, (logged, healing) = frozenset(repair.done), map(_by_slot, (repair.logged, repair.healing))
    digest, ends = both_digests(plan, repair), bool(done)
    for worker in set(plan.members).intersection(base.members):
        peers = peers_of(worker, ownership)
        slots = sorted({slot for peer in peers for slot in ownership.held_by(peer)})
        part = Repair(
            tuple(rests[peer] for peer in peers),
            repair.adopted,
            tuple(slot for slot in slots if slot in done),
            tuple((each, slot) for slot in slots for each in logged.get(slot, ())),
            tuple((each, slot) for slot in slots for each in healing.get(slot, ())),
        )
        yield worker, PlanPartMessage(plan.epoch, plan.committed, plan.leaving, change, part, digest, ends, wanted)


def _by_slot(replicas: Iterable[tuple[int, Slot]]) -> Mapping[Slot, list[int]]:
    workers: dict[Slot, list[int]] = {}
    for worker, slot in replicas:
        workers.setdefault(slot, []).append(worker)
    return workers


def _hosts(grid: PlanMessage) -> dict[int, int]:
    return dict(zip(grid.members, grid.hosts or (_ALONE,) * len(grid.members), strict=True))


def _change(base: PlanMessage, plan: PlanMessage) -> GridChange:
    old, new = _hosts(base), _hosts(plan)
    return GridChange(
        base.epoch,
        tuple(worker for worker in old if worker not in new),
        tuple((worker, host) for worker, host in new.items() if worker not in old),
        _differing(base.owners, plan.owners),
        _differing(base.shadows, plan.shadows),
        _differing(base.owners, plan.before),
        plan.schedule,
    )


def _differing(old: Sequence[V], new: Sequence[V]) -> tuple[tuple[int, V], ...]:
    pairs = enumerate(zip(old, new, strict=True))
    return tuple((place, value) for place, (was, value) in pairs if value != was)


# At a member


def document_of(part: PlanPartMessage, known: Iterable[PlanMessage], worker: int, grid: Grid) -> PlanMessage | None:
    """Returns the plan of a part, from the grids that a worker has; None if it needs the whole plan."""
    base = next((each for each in known if each.epoch == part.change.base), None)
    if base is None or (grid.ties and part.ends):
        return None
    changed, ownership, digest = _grid_after(base, part.change, grid)
    told_of = {rest.worker for rest in part.repair.rests}
    if not part.digest.startswith(digest) or not told_of.issuperset(peers_of(worker, ownership)):
        return None
    return replace(
        changed,
        epoch=part.epoch,
        committed=part.committed,
        leaving=part.leaving,
        repair=part.repair,
        digest=part.digest,
        wanted=_wanted(changed, part.wanted),
    )


@lru_cache(maxsize=4)  # workers of one process share the grids
def _grid_after(base: PlanMessage, change: GridChange, shape: Grid) -> tuple[PlanMessage, Ownership, str]:
    """Returns the grid after a change, with its ownership and its digest."""
    changed = _changed(base, change)
    return changed, ownership_of(shape, changed.owners, changed.shadows), _grid_digest(changed)


def _changed(base: PlanMessage, change: GridChange) -> PlanMessage:
    """Returns the base with a change of its grid."""
    old = _hosts(base)
    there = {**{worker: host for worker, host in old.items() if worker not in change.gone}, **dict(change.joined)}
    members = tuple(sorted(there))
    return replace(
        base,
        members=members,
        hosts=tuple(there[worker] for worker in members) if base.hosts else (),
        owners=_with(base.owners, change.owners),
        shadows=_with(base.shadows, change.shadows),
        before=_with(base.owners, change.before),
        schedule=change.schedule,
    )


def _wanted(grid: PlanMessage, wanted: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return _with(grid.owners, wanted) if wanted else ()


def _with(values: Sequence[V], new: Iterable[tuple[int, V]]) -> tuple[V, ...]:
    changed = list(values)
    for place, value in new:
        changed[place] = value
    return tuple(changed)
