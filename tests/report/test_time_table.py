"""The table of time sums to the wall clock of each worker, and its waits are those of the dry run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.history.run_history import history_of
from engine.core.history.step_files import Chore, chore_entry
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership
from engine.core.program.build import build_program
from engine.core.program.dry_run import DryRun, dry_run
from engine.report import time_table
from engine.report.load import RunTables
from engine.report.load import load as load_history
from engine.report.time_table import TIMES, StageFacts, TimeTables, dry_waits, stage_facts
from tests.core.made_records import SAMPLES, MadeFiles, made_history
from tests.report.made_up import MS, MadeUpRun, agent, did, load

STEPS, BEGIN_MS = 6, 1000.0
COSTS = {Op.F: 10.0, Op.B: 20.0, Op.I: 10.0, Op.W: 10.0, Op.SEND_F: 1.0, Op.SEND_B: 1.0, Op.STEP: 5.0}
SHADOWED, TWO_PIPELINES = ((1, 0), ((0,), (1,))), ((0, 1, 2, 3), ())  # owners and shadows, of two stages
CASES = [
    (SHADOWED, "1f1b", "lazy"),
    (SHADOWED, "gpipe", "eager"),
    (SHADOWED, "zb1p", "none"),
    (TWO_PIPELINES, "1f1b", "none"),
]


def run_of(case: Any, slow: tuple[int, str, float] = (-1, "", 1.0)) -> tuple[RunTables, DryRun]:
    """Returns a run whose steps go as the dry run does, which is the other; `slow` is a step, an action and a factor.

    An action is recorded from the end of the one before, as a worker does that waits inside it; only an optimizer step
    begins when the votes are there.
    """
    (owners, shadows), schedule, redundancy = case
    ownership = Ownership(Grid(2, 4, len(owners) // 2), owners, shadows)
    program = build_program(schedule, ownership, redundancy)
    shape = {"schedule": schedule, "redundancy": redundancy, "pipelines": len(owners) // 2}
    job, *_ = MadeUpRun(stages=2, microbatches=4, steps=STEPS).events()
    events = [job | shape]
    for place, owner in enumerate(owners):
        events.append(agent("started", 10, of=owner, child=100 + owner, slots=[[*divmod(place, 2)]]))
    epoch = {"epoch": 1, "members": [*owners], "owners": [*owners], "shadows": [*map(list, shadows)], "verdict": []}
    events += [agent("epoch", 900, reason="all are here", **epoch), agent("go", 901, epoch=1)]
    begin_ms = BEGIN_MS
    for step in range(STEPS):

        def cost(action: Action, step: int = step) -> float:
            return COSTS.get(action.op, 0.0) * (slow[2] if (step, str(action)) == slow[:2] else 1.0)

        walked = dry_run(program, ownership, cost)
        free = dict.fromkeys(program, begin_ms)
        for start, end, worker, action in walked.spans:
            begun_ms = begin_ms + start if action.op is Op.STEP else free[worker]
            free[worker] = begin_ms + end
            events.append(did(worker, step, str(action), begun_ms, free[worker]))
        begin_ms += walked.makespan
        events.append(agent("commit", begin_ms, step=step, loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False))
    return load(events), dry_run(program, ownership, lambda action: COSTS.get(action.op, 0.0))


def idle_ms(walked: DryRun) -> dict[int, float]:
    """Returns how long each worker is not busy before its last action ends."""
    ends = {span.worker: span.end for span in sorted(walked.spans, key=lambda span: span.end)}
    busy = {worker: sum(span.end - span.start for span in walked.spans if span.worker == worker) for worker in ends}
    return {worker: end - busy[worker] for worker, end in ends.items()}


def off_the_clock(run: RunTables) -> float:
    """Returns by which share the times of some worker do not sum to its wall clock, as its records have it."""
    of_workers = run.actions.groupby("worker")
    wall_ms = (of_workers["end_ns"].max() - of_workers["start_ns"].min()) / 1e6
    sums_ms = run.time.groupby("worker")[[f"{kind}_ms" for kind in TIMES]].sum().sum(axis="columns")
    return float((sums_ms / wall_ms - 1).abs().max())


def test_the_dry_run_of_a_run_has_the_time_that_its_copies_to_the_host_took() -> None:
    made = history_of(SAMPLES)
    assert stage_facts(made).copy_time == 0.25
    job = Job(stages=2, microbatches=8, schedule="gpipe", redundancy="none", offload="host", offload_time=0.1)
    epoch = replace(made.epochs[0], owners=(0, 1), shadows=(), schedule="")
    costs: dict[tuple[int, int, str], float] = {(0, stage, op): COSTS[op] for stage in (0, 1) for op in (Op.F, Op.B)}
    waits = [sum(dry_waits(job, [epoch], costs, copy_time).values()) for copy_time in (None, 0.1, 3.0)]
    assert waits[0] <= waits[1] < waits[2] / 2


@pytest.mark.parametrize("case", CASES)
def test_waits_are_the_bubbles_of_the_dry_run(case: Any) -> None:
    run, walked = run_of(case)
    assert off_the_clock(run) < 1e-9
    time = run.time.groupby("worker").sum()
    for worker, expected in idle_ms(walked).items():
        assert expected > 0
        assert time["wait_bubble_ms"][worker] == pytest.approx(STEPS * expected, rel=1e-6)
    others = time[[f"wait_{cause}_ms" for cause in ("straggler", "upstream", "downstream", "peers")]]
    assert others.to_numpy().max() == pytest.approx(0.0, abs=1e-3)
    assert time["redundant_ms"].sum() == pytest.approx(
        sum(span.end - span.start for span in walked.spans if _is_redundant(case, span)) * STEPS
    )
    if case[1] == "zb1p":
        parts = time[["backward_input_ms", "backward_weights_ms"]].sum()
        assert parts.tolist() == pytest.approx([2 * 4 * 10 * STEPS] * 2)


def _is_redundant(case: Any, span: Any) -> bool:
    (owners, _), action = case[0], span.action
    return action.op in COSTS and span.worker != owners[2 * action.pipeline + action.stage]


def test_a_wait_for_a_slow_computation_is_a_straggler_s() -> None:
    """Stage 0 is on worker 1 here: worker 0 waits for its first forward, which takes 40 ms once in place of 10."""
    usual, late = (run_of(CASES[0], slow)[0].time.groupby("worker").sum() for slow in ((-1, "", 1.0), (3, "0F0", 4.0)))
    more = late - usual
    assert more["wait_straggler_ms"][0] == pytest.approx(30.0)
    assert more["wall_ms"].tolist() == pytest.approx([30.0, 30.0])
    assert more["forward_ms"].tolist() == pytest.approx([0.0, 30.0])
    assert more[["wait_bubble_ms", "wait_upstream_ms", "wait_peers_ms"]].abs().to_numpy().max() < 1e-3


def test_a_wait_that_no_dry_run_has_keeps_its_direction() -> None:
    """A forward is late by less than that of a straggler: the worker that awaits it waits upstream, by as much."""
    usual, late = (run_of(CASES[0], slow)[0].time.groupby("worker").sum() for slow in ((-1, "", 1.0), (3, "0F0", 1.4)))
    assert (late - usual)["wait_upstream_ms"][0] == pytest.approx(4.0)
    assert late["wait_straggler_ms"].max() == 0


def test_a_run_with_a_death_sums_to_the_wall_clock_and_a_slip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load(MadeUpRun(dead=((5, 2), (8, 0))).events())
    assert off_the_clock(run) < 1e-9
    assert (run.time.groupby("worker")["replayed_ms"].sum() > 0).sum() == 2
    assert (run.time[[f"{kind}_ms" for kind in TIMES]] >= 0).all(axis=None)
    assert run.stages["replayed_ms"].tolist() == pytest.approx([*_replayed(run)])
    monkeypatch.delitem(time_table._KIND_OF, Op.B)  # as if a new op had been forgotten
    assert off_the_clock(run) > 0.01


def _replayed(run: RunTables) -> list[float]:
    rows = run.actions[run.actions["replayed"]]
    taken = ((rows["end_ns"] - rows["start_ns"]) / 1e6).groupby(rows["stage"]).sum()
    return [float(each) for each in taken.reindex(range(4), fill_value=0.0)]


def test_overlapping_records_count_once_and_missing_steps_not_at_all() -> None:
    """A device may end an action after the next one began; a long run leaves out ranges of steps."""
    head = [each for each in MadeUpRun(steps=1).events() if each["event"] in ("job", "started", "epoch", "go")]
    spans = [("0F0", 0, 2000, 2010), ("0F1", 0, 2005, 2020), ("0F0", 7, 9000, 9004), ("0F1", 7, 9006, 9010)]
    run = load([*head, *(did(0, step, text, start, end) for text, step, start, end in spans)])
    assert run.time[["step", "wall_ms", "forward_ms", "control_ms"]].to_numpy().tolist() == [
        [0, 20.0, 20.0, 0.0],
        [7, 10.0, 8.0, 2.0],
    ]


def test_flops_count_once_and_their_share_of_the_gpu_s_is_known() -> None:
    """Worker 1 owns stage 0, whose forwards worker 0 makes too, as its shadow."""
    run, _ = run_of((SHADOWED, "1f1b", "eager"))
    facts = StageFacts({}, {0: (10**9, 2 * 10**9), 1: (10**8, 10**8)}, {1: "GPU 0 (NVIDIA H100 80GB HBM3)"})
    time = TimeTables(run.actions, run.chores, run.job, run.epochs, facts).time()
    assert time.groupby("worker")["flops"].unique().map(list).to_dict() == {0: [4 * 2e8], 1: [4 * 3e9]}
    assert time["mfu"].isna().tolist() == (time["worker"] == 0).tolist()
    row = time[time["worker"] == 1].iloc[2]
    assert row["mfu"] == pytest.approx(4 * 3e9 / (row["wall_ms"] / 1e3) / 67e12)


class _FilesWithChores(MadeFiles):
    chores: tuple[tuple[int, bytes], ...] = ()

    def read(self, first: int) -> Iterator[tuple[int, bytes]]:
        for worker, data in super().read(first):
            yield worker, b"".join([data, *(chore for of, chore in self.chores if of == worker)])


def test_a_chore_is_taken_off_its_action_and_off_control_and_a_gpu_hides_it() -> None:
    """A load is inside its forward and inside a wait; the copy of a checkpoint lies between the votes and the step."""
    head = [
        each for each in MadeUpRun(stages=2, steps=1).events() if each["event"] in ("job", "started", "epoch", "go")
    ]
    spans = [
        *((0, "0F0", 2000, 2010), (0, "0RECV_B0", 2010, 2020), (0, "0B0", 2020, 2030), (0, "0COMMIT", 2030, 2031)),
        *((0, "0STEP", 2036, 2038), (1, "1SEND_B0", 2014, 2015), (1, "1COMMIT", 2030, 2032)),
    ]
    history = made_history(
        [*head, *(did(worker, 0, text, *at) for worker, text, *at in spans), did(0, 1, "0F0", 2044, 2050)]
    )
    files = history.files = _FilesWithChores(history)
    chores = [
        *((Chore.DATA, 2001, 2004, "0F0"), (Chore.DATA, 2011, 2013, "0F1"), (Chore.DATA, 2021, 2029, "0F1")),
        *((Chore.CHECKPOINT, 2033, 2035, ""), (Chore.AUDIT, 2038, 2042, "")),
    ]
    files.chores = tuple(
        (0, chore_entry(1, 0, chore, start * MS, end * MS, action)) for chore, start, end, action in chores
    )
    run = load_history(history)
    assert run.gaps == () and off_the_clock(run) < 1e-9
    taken = run.time[run.time["worker"] == 0].sum()
    expected = {"data": 5, "forward": 13, "backward": 10, "transfer": 3, "optimizer": 2, "checkpoint": 2, "audit": 4}
    expected |= {"wait_downstream": 5, "wait_peers": 1, "control": 5, "wait_bubble": 0, "wall": 50}
    assert {kind: taken[f"{kind}_ms"] for kind in expected} == pytest.approx(expected)
    (edge,) = run.edges.to_dict("records")
    assert (edge["sender"], edge["receiver"], edge["value"], edge["send_ms"], edge["receive_ms"]) == (
        1,
        0,
        "gradient",
        1,
        3,
    )
