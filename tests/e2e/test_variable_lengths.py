"""Microbatches of different sizes: the weights of a plain loop, whatever dies and however the model is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from tests.e2e.plain_loop import train
from tests.kills import parse_kills
from tests.runtime.kept_states import run_and_keep
from tests.runtime.thread_runs import run_in_threads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODELS = "tests.e2e.length_models:"
STREAM = "tests.e2e.stream_models:"
FIELDS: dict[str, Any] = {
    "model": MODELS + "layers",
    "data": MODELS + "Lengths",
    "variable_shapes": True,
    "microbatches": 3,
    "steps": 6,
}
TOKENS = {"loss_normalisation": "tokens"}


@pytest.mark.parametrize(
    ("fields", "kills"),
    [
        ({"stages": 3, "validate_every": 3}, ("2:1:B:1",)),
        ({"stages": 3, "redundancy": "eager", "activation_checkpoint": 2, **TOKENS}, ("1:2:B:1", "4:1:F:2")),
        ({"stages": 2, "blocks": 2, "log_every": 1, "model": MODELS + "Ordinary", **TOKENS}, ("3:1:B:1",)),
        ({"stages": 2, "pipelines": 2, "redundancy": "reroute", **TOKENS}, ("2:0:F:1@1",)),
    ],
)
def test_lengths_and_deaths_change_no_bit(fields: dict[str, Any], kills: tuple[str, ...]) -> None:
    job = Job(**FIELDS | {"validate_every": 0} | fields)
    ending = run_in_threads(job, parse_kills(kills, job))
    assert ending.error is None, ending.error
    assert len(ending.view.run_state.epochs) > len(kills)
    assert [row.texts()[:5] for row in ending.view.run_state.rows] == train(job)


def test_a_record_that_would_keep_a_length_is_refused() -> None:
    job = Job(**FIELDS | {"model": MODELS + "Fixed"})
    data = open_data(job)
    with pytest.raises(UserError, match="shape gives Python a value"):
        build_model(job, data.facts, data)


def test_nccl_needs_sizes_in_advance() -> None:
    (problem,) = check_job(Job(variable_shapes=True, backend="nccl", device="cuda"))
    assert problem.field == "variable_shapes"


def test_other_sizes_name_the_way_out() -> None:
    data = open_data(Job(**FIELDS | {"variable_shapes": False}))
    with pytest.raises(ValueError, match=r"were asked for|--variable-shapes lets sizes differ"):
        assert [data.microbatch(0, 0, number, 4) for number in range(9)] == []


STREAMS = {"data": STREAM + "Stateful", "collate": STREAM + "collated", "microbatch_size": 2, "audit": 1, **TOKENS}


@pytest.mark.parametrize(
    "of_data",
    [
        pytest.param({"data": STREAM + "plain"}, marks=pytest.mark.soak),
        {},
        pytest.param({"data": STREAM + "buckets", "collate": ""}, marks=pytest.mark.soak),
    ],
)
def test_a_stream_goes_on_through_deaths_and_resumes_on_other_workers(of_data: dict[str, Any], tmp_path: Path) -> None:
    job = Job(**FIELDS | STREAMS | {"validate_every": 0, "stages": 3} | of_data)
    ending, origins = run_and_keep(job, tmp_path)
    rows = [row.texts()[:5] for row in ending.view.run_state.rows]
    assert rows == train(job)
    for origin, stages, kill in ((origins[0], 2, "3:0:F:1"), (origins[3], 4, "5:0:B:1")):
        other = replace(job, stages=stages)
        resumed = run_in_threads(other, parse_kills((kill,), other), origin=origin)
        assert resumed.error is None, resumed.error
        others = [row.texts()[:5] for row in resumed.view.run_state.rows]
        assert others == [row for row in rows if int(row[0]) > origin.step]
