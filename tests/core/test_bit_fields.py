"""The fields of a job that decide bits: known in one place, for the twin and for a job that is resumed."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from engine.core.job.bit_fields import BIT_FACTS, NEUTRAL, BitDifference, bit_differences, twin_of
from engine.core.job.job import Job
from tests.looped import looped

FACTS: dict[str, object] = dict.fromkeys(BIT_FACTS, "a") | {"isa": ["avx2"], "host": "h"}
DECISIVE = {
    "model",
    "model_args",
    "split",
    "init",
    "device",
    "deterministic",
    "data",
    "data_args",
    "collate",
    "loss",
    "loss_args",
    "variable_shapes",
    "loss_normalisation",
    "slices",
    "pipelines",
    "microbatches",
    "microbatch_size",
    "steps",
    "optimizer",
    "optimizer_args",
    "lr",
    "lr_schedule",
    "lr_args",
    "param_groups",
    "scaler_args",
    "warmup_steps",
    "clip_norm",
    "ema",
    "dtype",
    "backend",
    "seed",
    "threads",
}


def found(changed: dict[str, Any], job: Job | None = None) -> list[BitDifference]:
    job = job or Job()
    return bit_differences(asdict(job.masked), FACTS, replace(job, **changed), FACTS)


def test_every_field_decides_bits_or_is_neutral() -> None:
    assert {each.name for each in fields(Job)} == NEUTRAL | DECISIVE
    assert not NEUTRAL & DECISIVE


def test_neutral_fields_may_change() -> None:
    neutral = {"stages": 2, "schedule": "gpipe", "redundancy": "none", "audit": 5, "activation_checkpoint": 2}
    assert found(neutral) == []


@pytest.mark.parametrize("changed", [{"pipelines": 2}, {"seed": 1}, {"model_args": {"width": 8}}, {"threads": 2}])
def test_a_field_that_decides_bits_is_named_with_both_values(changed: dict[str, Any]) -> None:
    ((name, value),) = changed.items()
    assert found(changed) == [BitDifference(name, getattr(Job(), name), value)]


def test_the_number_of_steps_decides_bits_by_the_learning_rate_only() -> None:
    assert found({"steps": 90}) == [BitDifference("steps", 80, 90)]
    assert found({"steps": 90}, Job(lr_schedule="constant")) == []
    assert found({"steps": 90}, Job(lr_schedule="exponential", lr_args={"gamma": 0.9})) == []
    assert found({"steps": 90}, Job(lr_schedule="mine:schedule")) == []
    assert found({"steps": 90}, Job(lr_schedule="onecycle")) == [BitDifference("steps", 80, 90)]
    assert found({"steps": 90}, Job(lr_schedule="polynomial")) == [BitDifference("steps", 80, 90)]
    assert found({"steps": 90}, Job(lr_schedule="polynomial", lr_args={"total_iters": 70})) == []


@looped("name", BIT_FACTS)
def test_another_host_or_program_is_named(name: str) -> None:
    now = FACTS | {name: "b", "host": "other"}
    assert [each.name for each in bit_differences(asdict(Job()), FACTS, Job(), now)] == [name]


def test_a_secret_argument_is_compared_without_its_value() -> None:
    job = Job(model_args={"hf_token": "abc"})
    assert found({"model_args": {"hf_token": "other"}}, job) == []


def test_a_field_that_the_kept_job_did_not_know_had_its_default() -> None:
    before = {name: value for name, value in asdict(Job()).items() if name != "clip_norm"}
    assert bit_differences(before, FACTS, Job(), FACTS) == []
    assert bit_differences(before, FACTS, Job(clip_norm=2.0), FACTS) == [BitDifference("clip_norm", 1.0, 2.0)]


def test_jobs_of_older_versions_were_deterministic() -> None:
    before = {name: value for name, value in asdict(Job()).items() if name not in ("deterministic", "device")}
    assert bit_differences(before, FACTS, Job(device="cpu"), FACTS) == []
    assert bit_differences(before, FACTS, Job(device="cpu", deterministic=False), FACTS) == [
        BitDifference("deterministic", True, False)
    ]


def test_the_cheapest_job_differs_in_neutral_fields_only() -> None:
    job = Job(redundancy="eager", redundancy_level=2, log_every=2, seed=3)
    assert bit_differences(asdict(job), FACTS, twin_of(job), FACTS) == []
