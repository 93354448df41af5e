"""The job: its defaults are allowed, each rule between values is held, all broken ones are named at once."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from engine.core.job.job import PARTITION_FORMS, Job
from engine.core.job.job_rules import check_job
from engine.core.job.torch_parts import LR_SCHEDULES
from engine.core.job.torch_parts import SCHEDULES as SCHEDULES_OF_TORCH
from engine.core.ownership import Redundancy, directions_of
from engine.core.program.schedules import SCHEDULES
from engine.core.units import MOST_FLOAT
from tests.looped import looped


def problems_of(**values: Any) -> list[str]:
    """Returns what is wrong with the default job after a change."""
    return [str(problem) for problem in check_job(replace(Job(), **values))]


def test_defaults_are_allowed_and_every_field_says_what_it_is() -> None:
    assert problems_of() == []
    assert all(field.metadata["help"] for field in fields(Job))


@looped(
    ("name", "least"),
    [
        ("stages_per_worker", 1),
        *((name, 1) for name in ("stages", "pipelines", "microbatches", "microbatch_size", "steps", "threads")),
        ("redundancy_level", 1),
        ("validation_microbatches", 0),
        *((name, 0) for name in ("seed", "warmup_steps", "activation_checkpoint", "audit", "validate_every")),
    ],
)
def test_counts_have_a_least_value(name: str, least: int) -> None:
    assert problems_of(**{name: least}) == []
    assert problems_of(**{name: least - 1}) == [f"{name}: expected a whole number >= {least}, found {least - 1}"]


@pytest.mark.parametrize(
    ("name", "most"), [("stages", 4096), ("pipelines", 1024), ("microbatches", 65536), ("threads", 1024)]
)
def test_counts_that_start_something_have_a_greatest_value(name: str, most: int) -> None:
    some: dict[str, dict[str, Any]] = {
        "stages": {"stages_per_worker": 4, "schedule": "interleaved"},
        "pipelines": {"stages": 1},
    }
    assert problems_of(**some.get(name, {}), **{name: most}) == []
    assert problems_of(**{name: most + 1}) == [f"{name}: expected a whole number <= {most}, found {most + 1}"]


@pytest.mark.parametrize("lr", [0.0, -1e-3, 1e40, math.inf, math.nan])
def test_learning_rate_is_finite_and_positive(lr: float) -> None:
    assert problems_of(lr=lr) == [f"lr: expected a finite float32 number > 0, found {lr!r}"]


def test_the_greatest_number_of_float32_is_taken() -> None:
    assert problems_of(lr=MOST_FLOAT, clip_norm=MOST_FLOAT) == []
    assert MOST_FLOAT.hex() == "0x1.fffffe0000000p+127"


@pytest.mark.parametrize("clip_norm", [-0.5, 1e40, math.inf, math.nan])
def test_clip_norm_is_finite_and_not_negative(clip_norm: float) -> None:
    assert problems_of(clip_norm=0.0) == []
    assert problems_of(clip_norm=clip_norm) == [
        f"clip_norm: expected a finite float32 number >= 0, found {clip_norm!r}"
    ]


def test_unknown_names_come_with_the_nearest_known_one() -> None:
    assert problems_of(schedule="1f1") == [
        f"schedule: expected one of {', '.join(sorted(SCHEDULES))}, found '1f1' (did you mean '1f1b'?)"
    ]
    known = ", ".join(sorted((*LR_SCHEDULES, *SCHEDULES_OF_TORCH)))
    assert problems_of(lr_schedule="cosin") == [
        f"lr_schedule: expected one of {known}, or package.module:name, found 'cosin' (did you mean 'cosine'?)"
    ]
    assert problems_of(schedule="zzz")[0].endswith("found 'zzz'")


@looped("name", [*SCHEDULES, *LR_SCHEDULES])
def test_known_names_are_allowed(name: str) -> None:
    if name in LR_SCHEDULES:
        assert problems_of(lr_schedule=name) == []
    else:
        schedule = SCHEDULES[name]
        shape = {"stages_per_worker": schedule.stages_per_worker[0], "pipelines": directions_of(name)}
        assert problems_of(schedule=name, **shape) == []


def test_two_directions_need_pairs_of_pipelines_and_a_worker_in_each_half() -> None:
    both: dict[str, Any] = {"schedule": "dualpipe", "stages": 4, "microbatches": 4}
    assert Job(**both, pipelines=4).num_workers == 8
    (odd,) = problems_of(**both, pipelines=3)
    assert odd.startswith("pipelines: expected an even number with schedule dualpipe, found 3")
    (middle,) = problems_of(**both | {"stages": 3}, pipelines=2)
    assert middle.startswith("stages: expected an even number with schedule dualpipe, found 3")
    (shards,) = problems_of(**both, pipelines=2, fsdp=1)
    assert shards.startswith("fsdp: expected 0 with schedule dualpipe")


def test_offload_is_refused_with_shards_and_without_a_time() -> None:
    (shards,) = problems_of(offload="host", pipelines=2, fsdp=1)
    assert shards.startswith("offload: expected none with fsdp, found 'host'")
    (time,) = problems_of(offload="host", offload_time=0.0)
    assert time.startswith("offload_time: expected a number > 0, in forwards, found 0.0")


@looped("form", ["uniform", "parameters", "profile", "type:", "type:Conv|Linear", "1,3,20"])
def test_forms_of_a_partition(form: str) -> None:
    assert problems_of(partition=form) == []


@looped("form", ["", "1,", ",1", "1;2", "-1", "1, 2", "Uniform ", "kind:Conv", "1.5"])
def test_other_forms_are_refused(form: str) -> None:
    (problem,) = problems_of(partition=form)
    assert problem.startswith(f"partition: expected {PARTITION_FORMS}, found {form!r}")


def test_a_long_form_is_refused_and_cut() -> None:
    (problem,) = problems_of(partition="9" * 5000)
    assert problem.startswith(f"partition: expected {PARTITION_FORMS}, found '999")
    assert len(problem) < 1000


@looped("form", ["3", "1,2", "1,2,3,4", "1,20,3", "1,1,2", "0,1,2"])
def test_a_list_has_the_first_layer_of_every_stage_but_the_first(form: str) -> None:
    assert problems_of(partition=form) == [f"partition: expected 3 rising layer numbers from 1, found {form!r}"]
    assert problems_of(partition="7", stages=2) == []


def test_a_misspelt_form_is_met_with_the_nearest() -> None:
    (problem,) = problems_of(partition="unifrom")
    assert problem.endswith("found 'unifrom' (did you mean 'uniform'?)")


def test_one_stage_needs_no_boundaries() -> None:
    assert problems_of(partition="", stages=1) == []


def test_a_broken_pattern_is_explained() -> None:
    (problem,) = problems_of(partition="type:Conv(")
    assert problem == (
        "partition: expected a regular expression after type:, found 'type:Conv(' "
        "(missing ), unterminated subpattern at position 4)"
    )


@pytest.mark.parametrize("name", ["a", "run-1", "0.1_x", "a" * 40])
def test_names_that_make_a_folder(name: str) -> None:
    assert problems_of(name=name) == []


@looped("name", ["A", "-a", ".a", "a/b", "a b", "a" * 41, "..", "a\n", "\u00e9"])
def test_names_that_do_not(name: str) -> None:
    assert problems_of(name=name) == [
        f"name: expected up to 40 of a-z 0-9 . _ - (first a letter or digit), found {name!r}"
    ]


def test_all_problems_are_named_at_once() -> None:
    found = problems_of(stages=0, microbatches=70000, lr=0.0, schedule="x", partition="?", name="?")
    assert [text.partition(":")[0] for text in found] == [
        "stages",
        "microbatches",
        "lr",
        "schedule",
        "partition",
        "name",
    ]


def test_the_product_of_the_counts_is_bounded() -> None:
    (problem,) = problems_of(stages=1024, microbatches=1024)
    assert "stages x pipelines x microbatches <= 1000000, found 1048576" in problem
    (problem,) = problems_of(stages=205, pipelines=5)
    assert "stages x pipelines / stages_per_worker <= 1024, the workers of a job, found 1025" in problem


@looped("redundancy", ["none", "lazy", "eager"])
@looped("sizes", [{"stages": 1}, {"stages": 2}, {"stages": 1, "pipelines": 2}])
def test_one_shadow_is_allowed_whatever_the_size(redundancy: str, sizes: dict[str, int]) -> None:
    assert problems_of(redundancy=redundancy, **sizes) == []


def test_a_level_needs_as_many_other_workers() -> None:
    assert problems_of(stages=2, pipelines=2, redundancy_level=3) == []
    assert problems_of(stages=2, pipelines=2, redundancy="eager", redundancy_level=4) == [
        "redundancy_level: expected a whole number <= 3, found 4 "
        "(4 workers, and a shadow is another one than the owner)"
    ]
    assert problems_of(stages=1, redundancy_level=2)[0].startswith("redundancy_level: expected a whole number <= 1")
    assert problems_of(stages=2, redundancy="none", redundancy_level=4) == []


@pytest.mark.parametrize("redundancy", ["none", "reroute"])
def test_streams_need_a_shadow(redundancy: Redundancy) -> None:
    assert problems_of(pipelines=2, redundancy=redundancy, log_every=1) == [
        f"log_every: expected 0 without shadows, found 1 (with redundancy {redundancy} there is no shadow to send to: "
        "give --redundancy lazy or eager)"
    ]
    assert problems_of(redundancy="eager", log_every=1) == []


def test_streams_come_before_the_log_of_the_step() -> None:
    assert problems_of(microbatches=4, log_every=3) == []
    for log_every in (4, 99):
        assert problems_of(microbatches=4, log_every=log_every) == [
            f"log_every: expected a whole number <= 3, found {log_every} "
            "(of 4 microbatches; after the last, the log of the whole step is sent)"
        ]


def test_rerouting_needs_a_second_pipeline() -> None:
    assert problems_of(redundancy="reroute", pipelines=2) == []
    assert problems_of(redundancy="reroute") == [
        "redundancy: expected none, lazy or eager with one pipeline, found 'reroute' "
        "(the next pipeline takes over: give --pipelines 2 or more)"
    ]
