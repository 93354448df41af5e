"""The plan of a job: the shadows of each slot stand beside the grid."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bamboo_cli.plan import print_plan
from bamboo_cli.worker_rows import slots_text
from engine.core.action import parse_action
from engine.core.errors import UserError
from engine.core.faults.expansion import describe
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.core.program.dry_run import dry_run
from engine.core.program.offload import with_copy_times
from engine.core.protocol.block_choice import step_after_death
from engine.harness import job_checks
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.stage.stage import build_layer
from tests.kills import parse_kills

SIZES: dict[str, Any] = {"stages": 3, "microbatches": 2}
SHADOWS = "shadows: stage 0 on worker 2, stage 1 on worker 0, stage 2 on worker 1"


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (Job(**SIZES), f"redundancy lazy; {SHADOWS}"),
        (Job(**SIZES, redundancy="none"), "redundancy none: no worker shadows a stage"),
        (Job(stages=1), "redundancy lazy: no worker shadows a stage"),
        (
            Job(**SIZES, redundancy="eager"),
            f"redundancy eager; {SHADOWS} (redundant forwards in brackets)",
        ),
        (
            Job(stages=1, pipelines=2, redundancy_level=1),
            "redundancy lazy; shadows: stage 0 on worker 1, stage 0@1 on worker 0",
        ),
        (
            Job(stages=1, pipelines=2, redundancy="reroute"),
            "redundancy reroute: the owner of the same stage in the next pipeline takes over",
        ),
    ],
)
def test_who_would_take_over(job: Job, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(job, as_json=False)
    assert line in capsys.readouterr().out.splitlines()


def test_the_dry_run_counts_copies_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(stages=4, microbatches=16, schedule="gpipe", redundancy="none", offload="host", offload_time=0.1)
    print_plan(job, as_json=True)
    plan, (program, ownership) = json.loads(capsys.readouterr().out), initial_program(job)
    assert plan["makespan"] == dry_run(program, ownership, with_copy_times(0.1)).makespan
    assert plan["makespan"] > dry_run(program, ownership).makespan
    print_plan(job, as_json=False)
    assert "backward = 2 x forward and a copy to the host = 0.1 x forward: " in capsys.readouterr().out


def test_the_layers_of_a_model_are_built_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model: dict[str, Any] = {"model": "mlp", "model_args": {"depth": 2, "width": 16}, "stages": 2}
    print_plan(Job(**model), as_json=True, build=True)
    costs = json.loads(capsys.readouterr().out)["model"]
    layers = [build_layer(job := Job(**model), build_model(job, open_data(job).facts), index) for index in range(3)]
    assert [row["parameters"] for row in costs["layers"]] == [
        sum(p.numel() for p in each.parameters()) for each in layers
    ]
    assert [row["stage"] for row in costs["layers"]] == [0, 1, 1]
    weight = next(p for p in layers[1].parameters() if p.dim() == 2)
    middle = costs["layers"][1]
    assert middle["forward_flops"] == 2 * job.microbatch_size * weight.numel()
    assert middle["flops"] == 3 * middle["forward_flops"], "the backward makes gradients of inputs and of weights"
    assert middle["optimizer"] > 2 * middle["weights"], "two moments and a count"
    with pytest.raises(UserError, match="stages: expected at most 3, the layers of the model"):
        job_checks.layer_costs(Job(**model | {"stages": 9}))


def test_layers_are_a_table_with_sums_of_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "forward_flops": 4,
        "flops": 2 * 10**6,
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "buffers": 0,
        "residual": 100,
        "input": 64,
    }
    layer = {"name": "in", "kind": "Linear", "parameters": 1000, "output": 64, **sizes}
    layers = [layer | {"layer": number, "stage": number} for number in range(2)]
    monkeypatch.setattr(
        job_checks, "layer_costs", lambda job: {"layers": layers, "parameters": 2000, "notes": ["a note"]}
    )
    print_plan(Job(stages=2, microbatches=2, residuals="recompute"), as_json=False, build=True)
    *_, first, total, _, _, model, note, about, titles, _, peak, _, _ = capsys.readouterr().out.splitlines()
    assert first.split() == "0 in (Linear) 0 1,000 2.00 16 kB 0.064 kB".split()
    assert total.split() == "= stage 0 1,000 2.00 16 kB 0.064 kB".split()
    assert model.startswith("model: 2,000 parameters, 8.00 MFLOP per step") and note == "a note"
    assert about.startswith("predicted tensors") and titles.split()[-1] == "total"
    # Weights and moments of two slots, as each shadows the other; two activations that a successor may need; the log.
    assert peak.split() == "0 peak 8 kB 16 kB 0 kB 0 kB 4 kB 0.128 kB 4 kB 0 kB 32.13 kB".split()
    print_plan(Job(stages=2, microbatches=2), as_json=False, build=True)
    *_, peak, hand_over, _, _, last = capsys.readouterr().out.splitlines()
    # Worker 1 gets the residuals of two microbatches of stage 0, and worker 0 that of the only one in stage 1.
    assert (hand_over.split()[:2], last.split()[:2]) == (["0", "hand-over"], ["1", "hand-over"])
    assert [row.split()[-6:-4] for row in (peak, hand_over, last)] == [["4", "kB"], ["4.164", "kB"], ["4.328", "kB"]]


def test_redundant_forwards_are_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(Job(**SIZES, redundancy="eager"), as_json=False)
    assert "(1F0)" in capsys.readouterr().out
    print_plan(Job(**SIZES), as_json=False)
    assert "(1F0)" not in capsys.readouterr().out


def test_json_has_the_shadows_of_each_stage_and_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(Job(**SIZES, redundancy_level=2), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["redundancy"] == "lazy"
    assert {slot: sorted(line) for slot, line in said["shadows"].items()} == {
        "0@0": [1, 2],
        "1@0": [0, 2],
        "2@0": [0, 1],
    }


def test_every_worker_but_the_owner_may_shadow() -> None:
    _, ownership = initial_program(Job(**SIZES, pipelines=2, redundancy_level=5))
    assert all(len(set(ownership.replicas(*slot))) == 6 for slot in ownership.grid.slots())


def test_faults_are_described_as_inject_does(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(**SIZES)
    faults = parse_kills(["5:2", "7:1:LOG:during"], job)
    print_plan(job, as_json=False, faults=faults)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "kill" in line] == describe(faults, job)
    print_plan(job, as_json=True, faults=faults)
    assert [each["text"] for each in json.loads(capsys.readouterr().out)["faults"]] == describe(faults, job)


def test_blocks_without_redundant_forwards_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(**SIZES, blocks=4, redundancy="eager")
    print_plan(job, as_json=True)
    said = json.loads(capsys.readouterr().out)
    _, ownership = initial_program(job)
    again = {
        parse_action(text).stage
        for worker, actions in said["actions"].items()
        for text in actions
        if text.endswith("F0") and "_" not in text and ownership.owner(0, parse_action(text).stage) != int(worker)
    }
    left = [block for block in range(12) if block not in again]
    assert again
    assert said["lazy"] == [f"{block}@0" for block in left]
    print_plan(job, as_json=False)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "stay lazy" in each)
    assert line.startswith(
        f"no redundant forwards of blocks {slots_text(((0, block) for block in left), False, {})}, which stay lazy:"
    )
    print_plan(Job(**SIZES, redundancy="eager"), as_json=False)
    assert "stay lazy" not in capsys.readouterr().out


def test_the_steps_with_other_workers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(stages=3, blocks=2, elastic=True, standby=1)
    print_plan(job, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert (
        "predicted, with backward = 2 x forward: 30 forwards of a stage (60 of a block), bubble 20.0% of the time"
        in lines
    )
    assert (
        "worker 3 waits (--standby) until another one is lost: a step then takes 40.5 forwards of a stage, and 30 once "
        "it has replaced it"
    ) in lines
    print_plan(replace(job, standby=2), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["standby"] == {"workers": [3, 4], "after_a_death": step_after_death(job), "replaced": 30}
    assert (said["most"], said["makespan"]) == (None, 60)


def test_the_step_of_all_workers_that_may_join_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(stages=2, blocks=4, elastic=True, max_workers=8)
    print_plan(job, as_json=False)
    line = "2 to 8 workers (--max-workers): a step of 8 takes 11.25 forwards of a stage, and all of them own blocks"
    assert line in capsys.readouterr().out.splitlines()
    each_with_one = replace(job, stages=8, blocks=1)
    print_plan(job, as_json=True)
    most = json.loads(capsys.readouterr().out)["most"]
    assert most == {"workers": 8, "time": dry_run(*initial_program(each_with_one)).makespan / 4, "owners": 8}
    print_plan(replace(job, blocks=2, max_workers=3), as_json=False)
    assert "and 2 of them own blocks" in capsys.readouterr().out
