"""The check before training: one planted layer of each kind is refused by its name, and nothing that is pure."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from engine.core.checks.trajectory import DigestByName, PurityBook
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.datasets import VectorData
from engine.models.layers import Batch, Model
from engine.models.losses import default_loss
from engine.models.model_loader import build_model
from engine.models.model_registry import MODELS
from engine.runtime.stage.random_streams import positions
from engine.runtime.worker import microbatches as data_trial
from engine.runtime.worker.pure_check import PureCheck, TrialShare
from tests.runtime.impure_layers import IMPURE, PURE, Counting, OfProcess, Picky, between
from tests.runtime.small_jobs import borders_of, small_job, starts_of
from tests.runtime.test_models import SMALL_ARGS
from tests.soaked import soaked

DATA = VectorData(0)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a trial of data load all that it would: a busy machine could end it early."""
    monkeypatch.setattr(data_trial, "_SPARE_S", 60.0)


def check_of(model: Model, data: Data = DATA, **values: Any) -> PureCheck:
    job = small_job(**{"stages": 2, "model": "mlp", "microbatch_size": 3, **values})
    return PureCheck(job, model, data, starts_of(job, model), borders_of(job, model, data))


def run(check: PureCheck) -> dict[str, DigestByName]:
    return dict(check.run(dict.fromkeys(range(check.job.stages), TrialShare())))


def refused(check: PureCheck) -> list[str]:
    with pytest.raises(UserError) as caught:
        run(check)
    assert {problem.field for problem in caught.value.problems} <= {"model", "data"}
    assert all("--no-check-pure" in problem.hint for problem in caught.value.problems)
    return [problem.found for problem in caught.value.problems]


@pytest.mark.parametrize("kind", IMPURE)
def test_a_layer_of_each_kind_is_refused_by_its_name(kind: str) -> None:
    planted, sign = IMPURE[kind]
    one, other = refused(check_of(between(planted)))
    assert one.startswith("layer 1 (one): ")
    assert other.startswith("layer 2 (other): ")
    sign, _, changed = sign.partition(": a forward changes ")
    assert sign in one
    assert changed in one.partition("; a forward changes ")[2]


def test_layers_of_a_list_are_tried_as_the_copies_that_they_are() -> None:
    model = build_model(small_job(model="tests.runtime.impure_layers:listed"), DATA.facts)
    (found,) = refused(check_of(model))
    assert found.startswith("layer 1 (1): its forward of microbatch 0 draws from the generator linear.stream")


def test_one_copy_is_enough_for_what_shows_when_a_forward_is_redone() -> None:
    with pytest.raises(UserError, match=r"layer 1 \(one\)"):
        check_of(between(Counting)).run({0: TrialShare(is_twice=False)})


RECOMPUTED = {"activation_checkpoint": 2, "dtype": "bfloat16"}


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize(
    ("fields", "redundancy"),
    [({}, "lazy"), (RECOMPUTED, "none"), soaked({}, "none"), soaked(RECOMPUTED, "lazy")],
)
def test_what_is_pure_is_not_refused(kind: str, fields: dict[str, Any], redundancy: str) -> None:
    check = check_of(between(PURE[kind]), redundancy=redundancy, **fields)
    one, other = run(check), run(check_of(between(PURE[kind]), redundancy=redundancy, **fields))
    assert one == other
    assert len(check.trials) + len(check.unchecked) == 4


DEEP = ("resnet34", "resnet101", "resnet152")  # of the blocks of resnet18 and resnet50


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=pytest.mark.soak) if each in DEEP else each for each in sorted(MODELS)]
)
@pytest.mark.parametrize(
    "fields", [{}, {"activation_checkpoint": 2, "dtype": "bfloat16", "stages": 3}], ids=["plain", "recomputed"]
)
def test_no_built_in_model_is_refused(model: str, fields: dict[str, Any]) -> None:
    job = Job(model=model, model_args=SMALL_ARGS[model], **{"stages": 2, "microbatch_size": 2, **fields})
    data = open_data(job)
    built = build_model(job, data.facts)
    check = PureCheck(job, built, data, starts_of(job, built), borders_of(job, built, data))
    marks = run(check)
    assert check.unchecked == []
    assert len(marks) == 1 + len(built.layers)  # the data too
    assert built.check_pure == (model != "timed")


def test_a_stage_that_does_not_take_what_is_drawn_is_tried_with_zeros() -> None:
    first, relu, *others = between(Picky).layers
    check = check_of(Model((first, replace(relu, build=nn.ReLU), *others), default_loss))
    assert check.starts == (0, 2)
    (found,) = refused(check)
    assert found.startswith("layer 2 (other): its output of microbatch 0 differs when its forward is redone")
    assert check.unchecked == []


def test_a_layer_that_always_raises_is_left_to_training() -> None:
    def raises(x: Tensor) -> Tensor:
        raise RuntimeError("planted")

    model = between(Counting)
    check = PureCheck(small_job(stages=1), Model(model.layers, raises), DATA, (0,), ())  # type: ignore[arg-type]
    assert len(refused(check)) == 2
    assert check.unchecked == ["last"]


def test_a_loss_and_data_that_differ_are_named() -> None:
    class Drifting(VectorData):
        loads = 0

        def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
            self.loads += 1
            batch = super().microbatch(step, pipeline, microbatch, size)
            return Batch((batch.inputs[0] + self.loads,), batch.targets)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return default_loss(outputs, targets) * random.random()  # noqa: S311

    pure = between(PURE["remembering"])
    (found,) = refused(check_of(pure, Drifting(0)))
    assert found == "auto: the inputs of microbatch 1 of pipeline 0 in step 0 differ when they are loaded again"
    (found,) = refused(check_of(Model(pure.layers, loss)))
    assert found == "layer 3 (last): its forward of microbatch 0 draws from Python's random"


def test_what_depends_on_its_process_shows_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    book = PurityBook()
    book.add(0, run(check_of(between(OfProcess))).items())
    monkeypatch.setattr(os, "getpid", lambda: 3)
    with pytest.raises(UserError) as caught:
        book.add(2, run(check_of(between(OfProcess))).items())
    assert [problem.found for problem in caught.value.problems] == [
        "layer 1 (one): its output of microbatch 0 differs between worker 0 and worker 2",
        "layer 2 (other): its output of microbatch 0 differs between worker 0 and worker 2",
    ]


def test_no_trace_is_left() -> None:
    impure, pure = check_of(between(IMPURE["numpy"][0])), check_of(between(PURE["reseeding"]))
    before = positions()
    refused(impure)
    run(pure)
    assert positions() == before


def test_where_a_step_has_one_microbatch_it_is_tried_twice() -> None:
    class Only(VectorData):
        def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
            assert microbatch == 0
            return super().microbatch(step, pipeline, microbatch, size)

    assert refused(check_of(between(Counting), Only(0), microbatches=1))


def test_flops_of_a_layer_are_counted() -> None:
    job = Job(model="mlp", model_args={"depth": 2, "width": 16}, stages=2, microbatch_size=3)
    built = build_model(job, DATA.facts)
    check = PureCheck(job, built, DATA, starts_of(job, built), borders_of(job, built, DATA))
    run(check)
    middle = next(trial for trial in check.trials if trial.index == 1)
    assert middle.flops == (2 * 3 * 16 * 16, 4 * 3 * 16 * 16), "the backward makes gradients of inputs and of weights"
