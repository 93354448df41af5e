"""A job that workers can join shares out slots anew and has the blocks that dry runs choose; a given value wins."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.protocol.block_choice import block_choice, step_after_death
from engine.files.jobs.job_file import FOR_JOINERS, FOR_SEVERAL, merge, resolve_job
from engine.files.jobs.job_layers import set_layer
from engine.files.jobs.resolved_job import ResolvedJob
from engine.harness.job_checks import readable

SHARDS = {"elastic": "true", "fsdp": "1", "pipelines": "2"}
DEEP = ("model_args.depth=14",)  # 16 layers on 4 stages


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolution(*settings: str, **flags: str) -> ResolvedJob:
    file = Path("run.json")
    return resolve_job(file if file.exists() else None, {}, settings, flags, offered=readable)


def resolved(*settings: str, **flags: str) -> tuple[Job, dict[str, str]]:
    found = resolution(*settings, **flags)
    return found.job, dict(found.origins)


@pytest.mark.parametrize("flags", [{"standby": "1"}, {"elastic": "true"}, {"standby": "2", "schedule": "zb1p"}, SHARDS])
def test_a_job_with_joiners_has_the_blocks_of_the_rule_and_moves_them(flags: dict[str, str]) -> None:
    job, origins = resolved(*DEEP, **flags)
    choice = block_choice(job, 4)
    assert (job.elastic, job.blocks) == (True, choice.blocks)
    assert job.blocks > 1
    assert (origins["elastic"], origins["blocks"]) in [
        (elastic, f"{FOR_JOINERS} (auto: {choice.why})") for elastic in (FOR_JOINERS, "--elastic")
    ]


@pytest.mark.parametrize("flags", [{}, {"standby": "1"}, {"elastic": "true"}])
def test_auto_chooses_where_no_worker_joins_too(flags: dict[str, str]) -> None:
    found = resolution(*DEEP, blocks="auto", **flags)
    assert found.job == resolution(*DEEP, **{"elastic": "true", **flags}).job
    assert found.origins["blocks"] == f"--blocks (auto: {found.why_blocks})"
    assert found.blocks_line == f"blocks: {found.job.blocks} per stage, because {found.why_blocks}"
    assert (
        f"takes {step_after_death(replace(found.job, blocks=1)):.4g} forwards of a stage with 1 block"
        in found.why_blocks
    )
    assert f"{step_after_death(found.job):.4g} with {found.job.blocks}" in found.why_blocks


def test_auto_is_taken_wherever_a_value_is() -> None:
    flag = resolution(*DEEP, blocks="auto").job
    assert resolution(*DEEP, "blocks=auto").job == flag
    assert resolve_job(None, {"BAMBOO_BLOCKS": "auto"}, DEEP, {}, offered=readable).job == flag
    Path("job.yaml").write_text("blocks: auto\n")
    assert resolve_job(Path("job.yaml"), {}, DEEP, {}, offered=readable).job == flag
    with pytest.raises(UserError, match="expected a whole number >= 1, or auto, found 'most'"):
        resolution(blocks="most")
    with pytest.raises(UserError, match="expected a whole number, found 'auto'"):
        resolution(stages="auto")


def test_a_job_of_several_workers_moves_whole_stages() -> None:
    job, origins = resolved(*DEEP)
    assert (job.elastic, job.blocks, origins["elastic"], origins["blocks"]) == (True, 1, FOR_SEVERAL, "default")
    job, origins = resolved(*DEEP, blocks="2")
    assert (job.elastic, job.blocks, origins["elastic"]) == (True, 2, FOR_SEVERAL)


@pytest.mark.parametrize(
    "flags",
    [{"elastic": "false"}, {"stages": "1"}, {"redundancy": "none"}, {"workers": "1"}],
    ids=lambda flags: next(iter(flags)),
)
def test_a_job_that_nobody_can_take_over_or_that_says_so_moves_none(flags: dict[str, str]) -> None:
    job, origins = resolved(*DEEP, **flags)
    assert (job.elastic, job.blocks) == (False, 1)
    assert origins["elastic"] == ("--no-elastic" if "elastic" in flags else "default")


def test_a_scenario_and_a_record_move_stages_only_if_they_say_so() -> None:
    assert not merge([set_layer(DEEP)], readable).job.elastic
    assert not resolve_job(None, {}, DEEP, {}, offered=readable, moves=False).job.elastic, "on several hosts"
    Path("run.json").write_text(json.dumps({"job": asdict(Job(steps=5)), "origins": {}, "host": {}}))
    assert not resolved()[0].elastic


def test_the_smallest_stage_bounds_the_blocks() -> None:
    assert resolved("model_args.depth=6", standby="1")[0].blocks == 2
    assert resolved(standby="1")[0].blocks == 1
    assert resolution(standby="1").why_blocks == "the smallest stage has 1 layer"
    assert resolved(*DEEP, "partition=2,8,12", standby="1")[0].blocks == 2


def test_a_cut_that_only_the_workers_know_has_one_block() -> None:
    found = resolution(*DEEP, "partition=parameters", standby="1")
    assert (found.job.blocks, found.why_blocks) == (1, "only the workers know the layers of the stages")


def test_the_most_workers_make_a_job_elastic_with_blocks_for_all_of_them() -> None:
    found = resolution(*DEEP, max_workers="12")
    assert (found.job.elastic, found.job.blocks, found.job.max_workers) == (True, 3, 12)
    assert found.blocks_line.startswith("blocks: 3 per stage, because a step of 12 workers takes ")
    assert found.origins["elastic"] == FOR_JOINERS
    job = resolution(*DEEP, "max_workers=12", "elastic=true", blocks="4").job
    assert (job.elastic, job.blocks) == (True, 4)
    assert resolution(*DEEP, max_workers="12", pipelines="2", blocks="auto").job.blocks == 3, "two of 24 each"
    with pytest.raises(UserError, match="--max-workers: expected a whole number <= 16, found 17"):
        resolution(*DEEP, max_workers="17")
    with pytest.raises(UserError, match="--max-workers: expected 0 without elastic, found 12"):
        resolution(*DEEP, max_workers="12", elastic="false")
    Path("run.json").write_text(json.dumps({"job": asdict(found.job), "origins": {}, "host": {}}))
    assert resolution().job == found.job


def test_a_record_with_too_few_blocks_gets_as_many_as_more_workers_need() -> None:
    Path("run.json").write_text(json.dumps({"job": asdict(resolution(*DEEP).job), "origins": {}, "host": {}}))
    job = resolution(max_workers="12").job
    assert (job.elastic, job.blocks) == (True, 3), "the blocks of the record are too few"
    assert resolution(max_workers="12", blocks="4").job.blocks == 4


def test_a_value_that_is_given_wins() -> None:
    job, origins = resolved(*DEEP, standby="1", blocks="2")
    assert (job.blocks, origins["blocks"]) == (2, "--blocks")
    assert not resolved(*DEEP, "elastic=false", "standby=1")[0].elastic


def test_a_record_keeps_its_blocks_and_gets_joiners() -> None:
    Path("run.json").write_text(json.dumps({"job": asdict(Job(steps=5)), "origins": {}, "host": {}}))
    job, _ = resolved(standby="1")
    assert (job.standby, job.elastic, job.blocks) == (1, True, 1)
    Path("run.json").write_text(
        json.dumps({"job": asdict(resolution(*DEEP, blocks="auto").job), "origins": {}, "host": {}})
    )
    again = resolution()
    assert (again.job.blocks, again.why_blocks) == (3, "")
