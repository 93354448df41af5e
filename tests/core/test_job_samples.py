"""The order of samples is a permutation for every size and key, and the ledger has every sample once in every pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.job.job import Job, code_in, metric_problems, named_metrics
from engine.core.job.samples import EvaluationPart, first_position, parts_of, permuted, sample_at, shares


@given(size=st.integers(1, 300), key=st.integers(0, 2**63 - 1))
def test_every_number_has_one_place(size: int, key: int) -> None:
    assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


def test_a_key_names_an_order_of_its_own_that_looks_random() -> None:
    orders = [tuple(permuted(place, 1000, key) for place in range(1000)) for key in range(20)]
    assert len(set(orders)) == 20
    for order in orders:
        # The rank correlation with the place has a standard deviation of 1 / sqrt(999) in a random order.
        correlation = 1 - 6 * sum((place - number) ** 2 for place, number in enumerate(order)) / (1000 * (1000**2 - 1))
        assert abs(correlation) < 5 / 999**0.5
    # Over the orders, no place likes a number: in 20 random orders of 1000, one pair stands in at most a few of them.
    together = Counter(pair for order in orders for pair in enumerate(order))
    assert max(together.values()) <= 4


def test_a_place_beyond_the_set_is_refused() -> None:
    with pytest.raises(InvariantError, match="position 7 of a permutation of 7"):
        permuted(7, 7, 0)


@given(
    num_samples=st.integers(1, 50),
    pipelines=st.integers(1, 3),
    microbatches=st.integers(1, 4),
    size=st.integers(1, 7),
)
def test_every_sample_is_in_every_pass_once(num_samples: int, pipelines: int, microbatches: int, size: int) -> None:
    job = Job(pipelines=pipelines, microbatches=microbatches, microbatch_size=size)
    per_step = pipelines * microbatches * size
    steps = -(-3 * num_samples // per_step)  # three passes at least
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(steps):
        for pipeline in range(pipelines):
            for microbatch in range(microbatches):
                for data_epoch, first, length in shares(
                    first_position(job, step, pipeline, microbatch), size, num_samples
                ):
                    seen.update(
                        (data_epoch, sample_at(data_epoch, place, num_samples, job.seed))
                        for place in range(first, first + length)
                    )
    for data_epoch in range(3):
        assert [seen[data_epoch, number] for number in range(num_samples)] == [1] * num_samples


# The parts of a validation pass, and the metrics that a job names.


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
