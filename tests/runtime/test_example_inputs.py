"""A factory may return example inputs beside its module: the forward is recorded with them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.core.errors import ExitCode, UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.layers import Model
from engine.models.model_loader import build_model
from tests.e2e.plain_loop import train as train_plainly
from tests.runtime.thread_runs import run_in_threads

HERE = __name__
SEEN: list[tuple[Tensor, ...]] = []  # by the forward, while it is recorded


class Masked(nn.Module):
    """Gives the loss with labels, and logits without."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, pixels: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        SEEN.append(tuple(each.clone() for each in (pixels, mask, labels) if each is not None))
        logits = self.out(self.inward(pixels if mask is None else pixels * mask).relu())
        return logits if labels is None else functional.cross_entropy(logits, labels)


def columns() -> list[dict[str, Any]]:
    return [{"labels": at % 3, "pixels": torch.full((8,), float(at)), "mask": torch.ones(8)} for at in range(32)]


def pairs() -> list[tuple[Tensor, int]]:
    return [(torch.full((8,), float(at)), at % 3) for at in range(32)]


TWOS, ONES, LABELS = torch.full((4, 8), 2.0), torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
GIVEN: dict[str, Any] = {
    "tensor": TWOS,
    "tuple": (TWOS, ONES, LABELS),
    "by_name": {"mask": ONES, "pixels": TWOS},
    "with_labels": {"mask": ONES, "pixels": TWOS, "labels": LABELS},
    "small": {"pixels": TWOS[:2], "mask": ONES[:2]},
    "whole_numbers": (TWOS.long(), ONES, LABELS),
    "lacking": {"pixels": TWOS},
    "unknown": {"pixels": TWOS, "mask": ONES, "images": TWOS},
    "flag": {"pixels": TWOS, "mask": ONES, "labels": True},
}


def given(kind: str) -> tuple[nn.Module, Any]:
    return Masked(), GIVEN[kind]


def listed() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 3)), TWOS


def job_of(kind: str, data: str = "columns", **changed: Any) -> Job:
    args = {"microbatches": 2, "steps": 2, "validate_every": 0, "stages": 2, "split": "inward,out", **changed}
    return Job(model=f"{HERE}:given", model_args={"kind": kind}, data=f"{HERE}:{data}", **args)


def built(job: Job) -> Model:
    SEEN.clear()
    data = open_data(job)
    return build_model(job, data.facts, data)


@pytest.mark.parametrize(
    ("kind", "data", "seen"),
    [
        ("tensor", "pairs", (TWOS,)),
        ("tuple", "columns", (TWOS, ONES, LABELS)),
        ("by_name", "columns", (TWOS, ONES)),
        ("with_labels", "columns", (TWOS, ONES, LABELS)),
    ],
)
def test_the_forward_is_recorded_with_the_example(kind: str, data: str, seen: tuple[Tensor, ...]) -> None:
    built(job_of(kind, data))
    for found in SEEN:  # in training and in evaluation
        assert all(torch.equal(one, other) for one, other in zip(found, seen, strict=False))
    assert len(SEEN) == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "small",
            "expected example inputs as the data: pixels float32 [4, 8], mask float32 [4, 8], "
            "found pixels float32 [2, 8], mask float32 [2, 8] (dimension 0 is --microbatch-size; or ",
        ),
        ("whole_numbers", "pixels float32 [4, 8], mask float32 [4, 8], labels int64 [4], found pixels int64 [4, 8]"),
        ("lacking", "pixels float32 [4, 8], mask float32 [4, 8], labels int64 [4], found pixels float32 [4, 8] ("),
        ("unknown", "expected example inputs that the forward takes, found TypeError: got an unexpected keyword"),
        ("flag", "labels int64 [4], found pixels float32 [4, 8], mask float32 [4, 8], labels none"),
    ],
)
def test_an_example_unlike_the_data_is_refused_with_both(kind: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        built(job_of(kind))
    assert refused.value.exit_code == ExitCode.USAGE


def test_a_list_of_layers_is_not_recorded() -> None:
    job = Job(model=f"{HERE}:listed", data=f"{HERE}:pairs")
    with pytest.raises(UserError, match=r"forward is recorded, .* \(it returned Sequential with inputs; "):
        built(job)


def test_a_run_has_the_bits_of_a_plain_loop() -> None:
    job = job_of("with_labels")
    ending = run_in_threads(job)
    assert ending.error is None
    assert [each.texts() for each in ending.view.run_state.rows] == train_plainly(job)
