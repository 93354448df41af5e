"""A parameter without a gradient keeps its bits and its state, as with torch's optimizers, on every replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.core.job.job import Job
from engine.runtime.device.missing_gradients import is_missing
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.stage import gradient_of
from tests.e2e.plain_loop import train as train_plainly
from tests.kills import parse_kills
from tests.runtime.kept_states import keeping_all, kept_states
from tests.runtime.test_ordinary_runs import assert_equal, plain_loop, weights
from tests.runtime.thread_runs import run_in_threads

MODELS = "tests.runtime.unused_models"
JOB: dict[str, Any] = {
    **{"data": "synthetic", "microbatches": 2, "steps": 4, "lr": 0.05, "warmup_steps": 0, "lr_schedule": "constant"},
    **{"clip_norm": 0.0, "validate_every": 0, "stages": 3, "optimizer_args": {"weight_decay": 0.5}},
}
_DECAYS = {"momentum": 0.9, "weight_decay": 0.5}
ROUTED: dict[str, dict[str, Any]] = {
    "float16, a tied weight with one gradient": {
        **{"model_args": {"borrows": True}, "dtype": "float16", "clip_norm": 0.1, "log_every": 1},
        **{"pipelines": 2, "optimizer": "sgd", "optimizer_args": _DECAYS},
    },
}
MORE: dict[str, dict[str, Any]] = {
    "one pipeline": {},
    "two pipelines": {"pipelines": 2, "clip_norm": 0.1},
    "adam": {"optimizer": "adam", "pipelines": 2},
    "momentum": {"optimizer": "sgd", "optimizer_args": _DECAYS, "log_every": 1},
    "a detached layer, a tied weight without gradients": {"model_args": {"detached": True, "borrows": True}},
}


@pytest.mark.parametrize("fields", ROUTED.values(), ids=ROUTED)
def test_a_list_of_layers_equals_a_plain_loop_killed_and_resumed(fields: dict[str, Any], tmp_path: Path) -> None:
    job = Job(**JOB | {"model": f"{MODELS}:routed"} | fields)
    expected = train_plainly(job)
    ending = run_in_threads(keeping_all(job, tmp_path), parse_kills(["2:1:B:1"], job))
    assert [row.texts() for row in ending.view.run_state.rows] == expected
    resumed = run_in_threads(replace(job, stages=1), origin=kept_states(job, ending, tmp_path, 1)[0])
    assert [row.texts() for row in resumed.view.run_state.rows] == [row for row in expected if int(row[0]) > 1]


@pytest.mark.soak
@pytest.mark.parametrize("fields", MORE.values(), ids=MORE)
def test_more_lists_equal_a_plain_loop(fields: dict[str, Any], tmp_path: Path) -> None:
    test_a_list_of_layers_equals_a_plain_loop_killed_and_resumed(fields, tmp_path)


def test_an_ordinary_module_equals_a_plain_loop_on_the_unsplit_module(tmp_path: Path) -> None:
    job = Job(**JOB | {"model": f"{MODELS}:whole", "optimizer_args": {}})
    _, state = weights(job, tmp_path)
    assert_equal(state, plain_loop(job))


def test_minus_zeros_survive_every_sum_and_only_they_are_missing() -> None:
    leaf = torch.ones(3, 2, requires_grad=True)
    missing = gradient_of(leaf)
    assert is_missing(missing)
    assert is_missing((missing + missing) / 2 * 0.3)
    for number in (0.0, 1.5, -1e-40):
        given = torch.full((3, 2), number)
        assert (missing + given).view(torch.int32).equal(given.view(torch.int32))
        assert not is_missing(given)
    one_is_there = missing.clone()
    one_is_there[2, 1] = 0.0
    assert not is_missing(one_is_there)
    assert is_missing(torch.zeros(0))
    leaf.grad = missing  # a gradient that is there
    assert not is_missing(gradient_of(leaf))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_the_optimizer_leaves_out_what_has_no_gradient(optimizer: str) -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    chosen = LayerOptimizer(Job(optimizer=optimizer, optimizer_args={"weight_decay": 0.5}), layer)
    chosen.step(0.1, {"weight": torch.full((2, 3), -0.0), "bias": torch.ones(2)})
    assert layer.weight.equal(before)
    assert chosen.state["weight"] == {}
