"""The executor between real processes: replicas that stay in step bit for bit, and steps that survive a death."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import pytest
import torch

from engine.core.action import Action, Op
from engine.core.ownership import Grid, Ownership, one_slot_each, with_shadows
from engine.core.value import Kind, Value
from engine.models.model_loader import build_model, open_data
from engine.runtime.ipc.control import Fenced
from engine.runtime.replica.replicas import Replicas
from engine.runtime.replica.value_store import ValueStore
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.worker_context import WorkerContext
from tests.runtime.peers import PeerServer
from tests.runtime.small_run import NORMED, STATEFUL, TIED_GPT, Rows, SmallRun, small_job

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


def ran(peers: PeerServer, values: dict[str, Any], ownership: Ownership, num_steps: int = 3) -> Rows:
    with contextlib.closing(SmallRun(peers, small_job(**values), ownership)) as small:
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


_UNDISTURBED: dict[str, dict[tuple[int, int], list[list[str]]]] = {}


def undisturbed(
    peers: PeerServer, values: dict[str, Any], pipelines: int, stages: int, num_steps: int = 3
) -> dict[tuple[int, int], list[list[str]]]:
    """Returns what is held of each slot when nobody dies and nobody holds anything twice; each job is run once."""
    alone = {name: value for name, value in values.items() if name not in ("redundancy_level", "log_every")}
    alone["redundancy"] = "none"
    key = repr((sorted(alone.items()), pipelines, stages, num_steps))
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = by_slot(ran(peers, alone, fresh(pipelines, stages), num_steps))
    return _UNDISTURBED[key]


@pytest.mark.parametrize("name", JOBS)
def test_every_replica_has_the_bits_of_a_run_without_any(peers: PeerServer, name: str) -> None:
    values = JOBS[name]
    pipelines, stages = values.get("pipelines", 1), values.get("stages", 3)
    plain = undisturbed(peers, values, pipelines, stages)
    for redundancy in ("lazy", "eager"):
        level = 2 if redundancy == "eager" else 1
        ownership = fresh(pipelines, stages, redundancy, level)
        rows = ran(peers, values | {"redundancy": redundancy}, ownership)
        assert sum(len(held) for held in rows.values()) == pipelines * stages * (1 + level)
        found = by_slot(rows)
        assert all(len(states) == 1 for states in found.values()), "a shadow differs from its owner"
        assert {slot: states[0][:2] for slot, states in found.items()} == {
            slot: states[0][:2] for slot, states in plain.items()
        }


def without(ownership: Ownership, dead: Collection[int]) -> Ownership:
    """Returns the ownership in which the heirs of `dead` own: the first shadow, or who holds it in another pipeline."""
    grid, owners, shadows = ownership.grid, [], []
    for pipeline, stage in grid.slots():
        replicas = [each for each in ownership.replicas(pipeline, stage) if each not in dead]
        elsewhere = [each for d in range(grid.pipelines) for each in ownership.replicas(d, stage) if each not in dead]
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
    peers: PeerServer, values: dict[str, Any], kills: dict[int, tuple[int, str, str]], num_steps: int = 4
) -> Rows:
    """Runs with kills, each at (step, action, when) of a worker, recovering and healing; returns what is held then."""
    job = small_job(**values)
    level = values.get("redundancy_level", 1)
    ownership = fresh(job.pipelines, job.stages, job.redundancy, level)
    with contextlib.closing(SmallRun(peers, job, ownership, kills)) as small:
        rows = small.run(num_steps)
        while rows is None or small.step < num_steps:
            if rows is None:
                rows = small.run(1) if small.recover(without(small.ownership, small.dead)) else None
            else:
                is_healed = not heal(small, job.redundancy, level)
                rows = small.run(num_steps - small.step if is_healed else 1)
        assert sorted(small.dead) == sorted(kills), "not exactly those died who should"
    return rows


def check_survival(
    peers: PeerServer, values: dict[str, Any], kills: dict[int, tuple[int, str, str]], num_steps: int = 4
) -> None:
    plain = undisturbed(peers, values, values.get("pipelines", 1), 3, num_steps)
    found = by_slot(survived(peers, values, kills, num_steps))
    assert all(len(states) == 1 for states in found.values()), "a shadow differs from its owner"
    assert {slot: states[0][:2] for slot, states in found.items()} == {
        slot: states[0][:2] for slot, states in plain.items()
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
def test_a_death_changes_no_bit(peers: PeerServer, redundancy: str, kills: Any) -> None:
    check_survival(peers, NORMED | {"redundancy": redundancy}, kills)


@pytest.mark.parametrize(
    "kills", [{1: (1, "1B1", "after")}, {2: (2, "2LOG", "before")}, {0: (1, "0COMMIT", "after")}], ids=str
)
@pytest.mark.parametrize("checkpoint", [0, 2])
def test_a_death_changes_no_bit_of_tied_layers(peers: PeerServer, kills: Any, checkpoint: int) -> None:
    check_survival(peers, TIED_GPT | {"activation_checkpoint": checkpoint}, kills)


@pytest.mark.parametrize(
    "kills", [{4: (1, "1F2@1", "before")}, {2: (1, "2REDUCE_GRAD", "after")}, {3: (1, "0STEP@1", "before")}], ids=str
)
@pytest.mark.parametrize("redundancy", ["none", "reroute", "eager"])
def test_another_pipeline_stands_in(peers: PeerServer, redundancy: str, kills: Any) -> None:
    if redundancy == "none":
        kills = {worker: (2, *moment[1:]) for worker, moment in kills.items()}
    check_survival(peers, NORMED | {"pipelines": 2, "redundancy": redundancy}, kills)


def test_two_deaths_one_after_the_other(peers: PeerServer) -> None:
    kills = {1: (0, "1B1", "after"), 2: (2, "2F1", "after")}
    check_survival(peers, NORMED | {"redundancy": "lazy"}, kills, 5)


@pytest.mark.parametrize(
    "kills",
    [{1: (1, "1B1", "after"), 2: (1, "2B3", "after")}, {1: (1, "1STEP", "before"), 2: (1, "2STEP", "after")}],
    ids=str,
)
def test_two_deaths_in_one_step(peers: PeerServer, kills: Any) -> None:
    check_survival(peers, NORMED | {"redundancy": "lazy", "redundancy_level": 2}, kills)


@pytest.mark.parametrize("name", ["normed, two pipelines", "tied gpt, two pipelines"])
def test_who_owns_what_changes_no_bit(peers: PeerServer, name: str) -> None:
    values = JOBS[name] | {"redundancy": "none"}
    stages = values.get("stages", 3)
    plain = by_slot(ran(peers, values, fresh(2, stages)))
    for owners in ((0,) * (2 * stages), (0, 1, *(0 for _ in range(2, 2 * stages)))):
        found = by_slot(ran(peers, values, Ownership(Grid(stages, 4, 2), owners)))
        assert found == plain


STREAMED = [
    {1: (1, "1STREAM1", "before")},
    {1: (1, "1STREAM1", "after")},
    {1: (1, "1B2", "after")},
    {2: (1, "2SEND_B2", "after")},
    {0: (1, "0STREAM2", "after")},
    {2: (1, "2REDUCE_GRAD", "after")},
]


@pytest.mark.parametrize("kills", STREAMED, ids=str)
@pytest.mark.parametrize("redundancy", ["lazy", "eager"])
def test_a_death_changes_no_bit_of_what_is_streamed(peers: PeerServer, redundancy: str, kills: Any) -> None:
    check_survival(peers, STATEFUL | {"redundancy": redundancy, "log_every": 1}, kills)


class Nothing:
    """Stands for what must not be used."""


def lone_executor(**values: Any) -> Executor:
    job = small_job(**NORMED | {"stages": 1, **values})
    data = open_data(job)
    model = build_model(job, data.facts)
    nothing: Any = Nothing()
    replicas = Replicas(job, model, (0,), [(0, 0)])
    return Executor(WorkerContext(job, 0, (0,), (), replicas, data, nothing, nothing, nothing, nothing, nothing))


def test_a_fence_takes_nobody_out_of_the_optimizer_steps() -> None:
    executor = lone_executor()

    def failpoint() -> None:
        raise Fenced

    executor._meet(Action(0, Op.STEP), failpoint)
    for op in (Op.F, Op.LOG, Op.COMMIT):
        with pytest.raises(Fenced):
            executor._meet(Action(0, op), failpoint)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_made_is_held_until_the_commit_if_anybody_could_need_it(keeps: bool) -> None:
    value_store = ValueStore(keeps)
    made, got = (Value(Kind.ACTIVATION, 0, 0, microbatch) for microbatch in (1, 2))
    parameter = torch.ones(2, requires_grad=True)
    value_store.make(made, (parameter * 2, torch.arange(2)))
    value_store.receive(got, (torch.zeros(2),))
    assert value_store.values() == (made, got)
    (one, other) = value_store.to_send(made) if keeps else value_store.consume(made)
    assert one.grad_fn is None
    assert (one.requires_grad, other.requires_grad) == (True, False)
    assert value_store.consume(got)[0].tolist() == [0.0, 0.0]
    assert value_store.values() == ((made,) if keeps else ())
    if keeps:
        assert value_store.consume(made)[0].tolist() == [2.0, 2.0]
        assert value_store.values() == (made,)
    value_store.clear()
    assert value_store.values() == ()
