"""A job that workers can join shares out slots anew and has blocks, unless another value is given."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.core.job.job import Job
from engine.files.jobs.job_file import FOR_JOINERS, resolve_job
from engine.harness.job_checks import readable

SHARDS = {"elastic": "true", "fsdp": "1", "pipelines": "2"}
DEEP = ("model_args.depth=14",)  # 16 layers on 4 stages


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(*settings: str, **flags: str) -> tuple[Job, dict[str, str]]:
    file = Path("run.json")
    found = resolve_job(file if file.exists() else None, {}, settings, flags, offered=readable)
    return found.job, dict(found.origins)


@pytest.mark.parametrize("flags", [{"standby": "1"}, {"elastic": "true"}, {"standby": "2", "schedule": "zb1p"}, SHARDS])
def test_a_job_with_joiners_has_four_blocks_and_moves_them(flags: dict[str, str]) -> None:
    job, origins = resolved(*DEEP, **flags)
    assert (job.elastic, job.blocks, origins["blocks"]) == (True, 4, FOR_JOINERS)


def test_a_job_without_joiners_has_stages() -> None:
    job, origins = resolved(*DEEP)
    assert (job.elastic, job.blocks, origins["blocks"]) == (False, 1, "default")


def test_the_smallest_stage_bounds_the_blocks() -> None:
    assert resolved("model_args.depth=10", standby="1")[0].blocks == 3
    assert resolved(standby="1")[0].blocks == 1
    assert resolved(*DEEP, "partition=2,8,12", standby="1")[0].blocks == 2


def test_a_cut_that_only_the_workers_know_has_one_block() -> None:
    assert resolved(*DEEP, "partition=parameters", standby="1")[0].blocks == 1


def test_a_value_that_is_given_wins() -> None:
    job, origins = resolved(*DEEP, standby="1", blocks="2")
    assert (job.blocks, origins["blocks"]) == (2, "--blocks")
    assert not resolved(*DEEP, "elastic=false", "standby=1")[0].elastic


def test_a_record_keeps_its_blocks_and_gets_joiners() -> None:
    Path("run.json").write_text(json.dumps({"job": asdict(Job(steps=5)), "origins": {}, "host": {}}))
    job, _ = resolved(standby="1")
    assert (job.standby, job.elastic, job.blocks) == (1, True, 1)
