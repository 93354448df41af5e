"""The parts of a validation pass, and the metrics that a job names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.job.job import Job, code_in, metric_problems, named_metrics
from engine.core.job.samples import EvaluationPart, parts_of

JOB = Job(microbatch_size=4, validation_microbatches=3)


def test_a_finite_set_is_measured_at_most_once() -> None:
    assert parts_of(JOB, {"short": 6, "long": 99, "endless": 0}) == (
        EvaluationPart("short", 0, 4),
        EvaluationPart("short", 1, 2),
        *(EvaluationPart(name, number, 4) for name in ("long", "endless") for number in range(3)),
    )
    whole = parts_of(replace(JOB, validation_microbatches=0), {"long": 99, "endless": 0})
    assert sum(part.rows for part in whole if part.name == "long") == 99
    assert len(whole) == 25 + 8  # of an endless set the usual number


def test_metrics_have_names() -> None:
    job = Job(metrics="accuracy, f1=mine:score ,other.module:top5")
    assert named_metrics(job) == {"accuracy": "accuracy", "f1": "mine:score", "top5": "other.module:top5"}
    assert metric_problems(job) == []
    assert code_in(job.metrics) == ["mine:score", "other.module:top5"]
    assert named_metrics(Job()) == {}


@pytest.mark.parametrize("text", ["acuracy", "f1=accuracy,f1=mine:f", "two words=mine:f", "mine", ","])
def test_a_wrong_metric_is_refused(text: str) -> None:
    assert [each.field for each in metric_problems(Job(metrics=text))][:1] == ["metrics"]
