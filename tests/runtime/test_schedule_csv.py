"""Interchange with torch's pipelining: its compute lists load and run here, ours load there."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.job.job_rules import check_schedule
from engine.core.ownership import Grid, Ownership, directions_of, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.schedule_csv import lists_from_csv, placement_of, rows_to_csv
from engine.core.program.schedules import SCHEDULES, of_kind
from engine.core.program.verify import verify
from tests.core.provenance import Machine
from tests.core.recovery_cases import ANY_ORDER, seeded

# torch's own 1F1B cannot be dumped, and its order for pictures has the last stage one microbatch ahead of what it runs.
# torch's schedule, stages per worker, and ours with the same lists but for the order of microbatches
PAIRS = [
    ("ScheduleGPipe", 1, "gpipe"),
    ("ScheduleInterleaved1F1B", 2, "interleaved"),
    ("ScheduleInterleaved1F1B", 3, "interleaved-flexible"),
    ("ScheduleLoopedBFS", 2, "looped-bfs"),
    ("ScheduleInterleavedZeroBubble", 1, "zb1p"),
    ("ScheduleInterleavedZeroBubble", 2, "zb1p"),
    ("ScheduleZBVZeroBubble", 2, "zbv"),
    ("ScheduleDualPipeV", 2, "dualpipev"),
]
P = 4


def theirs() -> Any:
    """Returns the module of torch; its import takes seconds, and every process of the tests collects this file."""
    return importlib.import_module("torch.distributed.pipelining.schedules")


def of_torch(name: str, v: int, m: int) -> Any:
    """Returns a schedule of torch's for worker 0, made without a process group."""
    placed = SCHEDULES["zbv" if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else "interleaved"].placement
    mine = [stage for stage, owner in enumerate(fresh(Grid(P * v, m), v, placed).owners) if owner == 0]
    stages = [
        SimpleNamespace(
            group_size=P, group_rank=0, group=None, num_stages=P * v, stage_index=stage, has_backward=True,
            is_first=stage == 0, is_last=stage == P * v - 1, stage_index_to_group_rank={}, submod=None,
        )
        for stage in mine
    ]  # fmt: skip
    make = getattr(theirs(), name)
    single = issubclass(make, theirs().PipelineScheduleSingle)
    return make(stages[0] if single else stages, m, loss_fn=len)


def csv_of_torch(name: str, v: int, m: int, folder: Path) -> str:
    schedule = of_torch(name, v, m)
    if isinstance(schedule, theirs().PipelineScheduleSingle):
        rows = schedule._get_pipeline_order() or {}
        return "\n".join(",".join(str(each) if each else "" for each in rows[rank]) for rank in range(P)) + "\n"
    schedule._dump_csv(str(folder / "schedule.csv"), format="compute_only")
    return (folder / "schedule.csv").read_text()


def state_after(schedule: str, ownership: Ownership) -> object:
    """Returns the provenance of what a step with a schedule leaves in every replica."""
    machine = Machine(ownership, retain=True)
    machine.enter([build_program(schedule, ownership)], ownership)
    assert machine.run(seeded(ANY_ORDER))
    return machine.state()


@pytest.mark.parametrize("m", [8, 12])
@pytest.mark.parametrize(("name", "v", "ours"), PAIRS)
def test_lists_of_torch_load_are_verified_and_leave_the_same(
    name: str, v: int, ours: str, m: int, tmp_path: Path
) -> None:
    text = csv_of_torch(name, v, m, tmp_path)
    assert check_schedule(text, P * v, v, m, "auto") == []
    grid = Grid(P * v, m)
    ownership = fresh(grid, v, placement_of(text, "auto"))
    program = build_program(text, ownership)
    assert verify(program, ownership) == ()
    assert {a.op for line in lists_from_csv(text) for a in line} <= {a.op for line in program.values() for a in line}
    assert state_after(text, ownership) == state_after("1f1b", fresh(grid))
    assert lists_from_csv(text) == SCHEDULES[ours](P, m, v)


@pytest.mark.parametrize("m", [8, 11])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if directions_of(name) == 1])
def test_ours_load_there(name: str, m: int, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    v = max(2, schedule.stages_per_worker[0]) if schedule.takes(2) else 1
    path = tmp_path / "ours.csv"
    has_pairs = schedule.overlaps == "OVERLAP_F_B"  # the only kind that torch reads
    path.write_text(rows_to_csv(schedule(P, m, v), of_kind("OVERLAP_F_B") if has_pairs else None))
    host = of_torch("ScheduleZBVZeroBubble" if schedule.placement == "v" else "ScheduleLoopedBFS", v, m)
    host._load_csv(str(path), format="compute_only")
    loaded = [tuple(str(each) for each in host.pipeline_order[rank]) for rank in range(P)]
    assert loaded == [tuple(line.split(",")) for line in path.read_text().splitlines()]
    assert any("OVERLAP_F_B" in line for line in loaded[0]) == has_pairs
    owners = host.stage_index_to_group_rank
    # What torch simulates is without pairs, though it runs them: they are taken apart for it.
    apart = {rank: [part for a in line for part in a.sub_actions or (a,)] for rank, line in host.pipeline_order.items()}
    with_transfers = theirs()._add_send_recv(apart, lambda stage: owners[stage], P * v)
    theirs()._simulate_comms_compute(with_transfers, lambda stage: owners[stage], P * v)  # raises when it cannot go on
    assert lists_from_csv(path.read_text()) == schedule(P, m, v)


def test_a_v_shadows_nothing_on_its_own_worker() -> None:
    ownership = fresh(Grid(8, 8), 2, "v")
    shadowed = with_shadows(ownership, "lazy", 1, ownership.workers())
    assert ownership.owner(0, 3) == ownership.owner(0, 4) == 3
    assert 3 not in (*shadowed.shadows_of(0, 3), *shadowed.shadows_of(0, 4))
