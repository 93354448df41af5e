"""The executor between real processes: replicas that stay in step bit for bit, and steps that survive a death."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from engine.core.ownership import Grid, Ownership, one_slot_each, with_shadows
from tests.runtime.peers import PeerServer
from tests.runtime.small_run import NORMED, TIED_GPT, Rows, SmallRun, small_job

JOBS: dict[str, dict[str, Any]] = {
    "normed": NORMED,
    "normed, two pipelines": NORMED | {"pipelines": 2},
    "tied gpt": TIED_GPT,
    "tied gpt, two pipelines": TIED_GPT | {"pipelines": 2, "stages": 2},
    "sgd, recomputed": NORMED | {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "activation_checkpoint": 1},
}


def fresh(pipelines: int, stages: int, redundancy: Any = "none", level: int = 1) -> Ownership:
    ownership = one_slot_each(Grid(stages, 4, pipelines))
    return with_shadows(ownership, redundancy, level, range(pipelines * stages))


def ran(peers: PeerServer, port: int, values: dict[str, Any], ownership: Ownership, num_steps: int = 3) -> Rows:
    with contextlib.closing(SmallRun(peers, port, small_job(**values), ownership)) as small:
        rows = small.run(num_steps)
    assert rows is not None
    return rows


def by_slot(rows: Rows) -> dict[tuple[int, int], list[list[str]]]:
    """Returns the different states that are held of each slot."""
    found: dict[tuple[int, int], list[list[str]]] = {}
    for held in rows.values():
        for slot, state in held.items():
            if state not in found.setdefault(slot, []):
                found[slot].append(state)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_every_replica_has_the_bits_of_a_run_without_any(peers: PeerServer, port: int, name: str) -> None:
    values = JOBS[name]
    pipelines, stages = values.get("pipelines", 1), values.get("stages", 3)
    plain = by_slot(ran(peers, port, values | {"redundancy": "none"}, fresh(pipelines, stages)))
    for redundancy in ("lazy", "eager"):
        level = 2 if redundancy == "eager" else 1
        ownership = fresh(pipelines, stages, redundancy, level)
        rows = ran(peers, port, values | {"redundancy": redundancy}, ownership)
        assert sum(len(held) for held in rows.values()) == pipelines * stages * (1 + level)
        found = by_slot(rows)
        assert all(len(states) == 1 for states in found.values()), "a shadow differs from its owner"
        assert {slot: states[0][:2] for slot, states in found.items()} == {
            slot: states[0][:2] for slot, states in plain.items()
        }


def without(ownership: Ownership, dead: int) -> Ownership:
    """Returns the ownership in which the heirs of `dead` own: the first shadow, or who holds it in another pipeline."""
    grid, owners, shadows = ownership.grid, [], []
    for pipeline, stage in grid.slots():
        replicas = [each for each in ownership.replicas(pipeline, stage) if each != dead]
        elsewhere = [each for d in range(grid.pipelines) for each in ownership.replicas(d, stage) if each != dead]
        owner, *others = replicas or elsewhere[:1]
        owners.append(owner)
        shadows.append(tuple(others))
    return Ownership(grid, tuple(owners), tuple(shadows))


def heal(small: SmallRun, redundancy: Any, level: int) -> bool:
    """Begins a step with the shadows that are wanted; says whether some of them are new."""
    healed = with_shadows(small.ownership, redundancy, level, small.links)
    slots = healed.grid.slots()
    new = [(w, slot) for slot in slots for w in healed.shadows_of(*slot) if w not in small.ownership.shadows_of(*slot)]
    small.go_on(healed, new)
    return bool(new)


def survived(
    peers: PeerServer, port: int, values: dict[str, Any], kills: dict[int, tuple[int, str, str]], num_steps: int = 4
) -> Rows:
    """Runs with kills, each at (step, action, when) of a worker, recovering and healing; returns what is held then."""
    job = small_job(**values)
    level = values.get("redundancy_level", 1)
    ownership = fresh(job.pipelines, job.stages, job.redundancy, level)
    with contextlib.closing(SmallRun(peers, port, job, ownership, kills)) as small:
        rows = small.run(num_steps)
        while rows is None or small.step < num_steps:
            if rows is None:
                rows = small.run(1) if small.recover(without(small.ownership, small.dead[-1])) else None
            else:
                is_healed = not heal(small, job.redundancy, level)
                rows = small.run(num_steps - small.step if is_healed else 1)
        assert sorted(small.dead) == sorted(kills), "not exactly those died who should"
    return rows


def check_survival(
    peers: PeerServer, port: int, values: dict[str, Any], kills: dict[int, tuple[int, str, str]], num_steps: int = 4
) -> None:
    plain = ran(peers, port, values | {"redundancy": "none"}, fresh(values.get("pipelines", 1), 3), num_steps)
    found = by_slot(survived(peers, port, values, kills, num_steps))
    assert all(len(states) == 1 for states in found.values()), "a shadow differs from its owner"
    assert {slot: states[0][:2] for slot, states in found.items()} == {
        slot: states[0][:2] for slot, states in by_slot(plain).items()
    }


MOMENTS = [
    {0: (1, "0F0", "before")},
    {0: (1, "0B2", "after")},
    {1: (1, "1F2", "before")},
    {1: (1, "1SEND_B0", "after")},
    {2: (1, "2B3", "after")},
    {2: (1, "2REDUCE_GRAD", "after")},
    {1: (1, "1LOG", "after")},
    {0: (1, "0COMMIT", "before")},
    {2: (1, "2COMMIT", "after")},
    {1: (1, "1STEP", "before")},
    {1: (1, "1STEP", "after")},
]


@pytest.mark.parametrize("kills", MOMENTS, ids=str)
@pytest.mark.parametrize("redundancy", ["lazy", "eager"])
def test_a_death_changes_no_bit(peers: PeerServer, port: int, redundancy: str, kills: Any) -> None:
    check_survival(peers, port, NORMED | {"redundancy": redundancy}, kills)
