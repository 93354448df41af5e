"""Ordinary modules take data sets of columns by name; the column of targets is no argument twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import Data
from engine.models.data_sources import open_data, samples_of
from engine.models.layers import Model
from engine.models.model_loader import build_model
from engine.models.traced.ordinary import OutputLoss
from engine.models.user_code import exception_of
from tests.e2e.plain_loop import train as train_plainly
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

HERE = __name__


class Network(nn.Module):
    """Gives the loss with labels, and logits alone without."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def told(self, pixels: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.out(self.inward(pixels if mask is None else pixels * mask).relu())
        return {"loss": None if labels is None else functional.cross_entropy(logits, labels), "logits": logits}


class Masked(Network):
    def forward(self, pixels: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return self.told(pixels, mask, labels)


class Named(Network):
    def forward(self, labels: Tensor, **named: Any) -> Any:
        return self.told(labels=labels, **named)


class WithoutLoss(Network):
    def forward(self, **named: Any) -> Any:
        return self.told(**named)["logits"]


class OtherName(Network):
    def forward(self, pixels: Tensor, target: Tensor) -> Any:
        return self.told(pixels, None, target)


class Lacking(Network):
    def forward(self, image: Tensor, size: Tensor, labels: Tensor) -> Any:
        return self.told(image * size, None, labels)


def rows() -> list[dict[str, Any]]:
    drawn = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return [{"labels": at % 3, "pixels": each, "mask": (each > 0).float()} for at, each in enumerate(drawn)]


def job_of(module: Any, **changed: Any) -> Job:
    given = {"microbatches": 2, "steps": 2, "validate_every": 0, "split": "inward,out", **changed}
    return Job(model=f"{HERE}:{module.__name__}", data=f"{HERE}:rows", **given)


def built(job: Job) -> tuple[Model, Data]:
    data = open_data(job)
    return build_model(job, data.facts, data), data


@pytest.mark.parametrize("module", [Masked, Named, WithoutLoss, OtherName])
def test_columns_become_arguments_by_name(module: type[nn.Module]) -> None:
    model, data = built(job_of(module))
    batch = data.microbatch(0, 0, 0, 4)
    assert (len(model.layers) > 1, isinstance(model.loss, OutputLoss)) == (True, module is not WithoutLoss)
    whole = [layer.build() for layer in model.layers]
    outputs = batch.inputs
    for each in whole:
        outputs = each(*outputs)
    named = dict(zip(("labels", "pixels", "mask"), batch.inputs, strict=True))
    inputs = named["pixels"] * (1 if module is OtherName else named["mask"])
    weights = {name: tensor for each in whole for name, tensor in each.state_dict().items()}
    reference = Masked()
    reference.load_state_dict(weights)
    expected = reference(inputs, labels=named["labels"])["loss"]
    assert torch.equal(model.loss(outputs, batch.targets), expected)


def test_a_lacking_column_is_named() -> None:
    with pytest.raises(UserError, match=r"columns that the first layer takes \(image, size\)"):
        built(job_of(Lacking))


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        (lambda row: {**row, "labels": [1, 2]}, "labels int64 [4, 2], pixels float32 [4, 8], mask float32 [4, 8]"),
        (lambda row: ({"pixels": row["pixels"][:3]}, 1), "pixels float32 [4, 3], targets int64 [4]"),
        (lambda row: (row["pixels"][:3], 1), "inputs float32 [4, 3], targets int64 [4]"),
    ],
)
def test_an_exception_of_the_first_forward_tells_the_columns(
    monkeypatch: pytest.MonkeyPatch, changed: Any, columns: str
) -> None:
    wrong = [changed(row) for row in rows()]
    monkeypatch.setitem(globals(), "rows", lambda: wrong)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        built(job_of(Masked))
    assert exception_of(caught.value).error.endswith(f": the microbatch has {columns}")


def _by_name(pixels: Tensor, mask: Tensor) -> Tensor:
    return pixels * mask


def layers() -> list[Any]:
    return [_by_name, nn.Linear(8, 16), nn.Linear(16, 3)]


@pytest.mark.parametrize(("made", "pipelines"), [(Masked, 1), (Masked, 2), (layers, 2)])
def test_stages_pipelines_and_a_death_give_the_bits_of_a_plain_loop(made: Any, pipelines: int) -> None:
    split = {} if made is Masked else {"split": ""}
    job = job_of(made, pipelines=pipelines, stages=2, validate_every=1, **split)
    ending = run_in_threads(job, parse_kills([f"1:1@{pipelines - 1}"], job))
    assert ending.error is None, ending.error
    assert [row.texts() for row in ending.view.run_state.rows] == train_plainly(job)


def test_an_exception_in_training_tells_the_microbatch_and_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(Masked, stages=1)
    numbers = samples_of(open_data(job), 1, 0, 0)
    wrong = [{**row, "labels": 99 if at == numbers[2] else 1} for at, row in enumerate(rows())]
    monkeypatch.setitem(globals(), "rows", lambda: wrong)
    ending = run_in_threads(job)
    told = f"in the loss of step 1, microbatch 0 of pipeline 0 (samples {', '.join(map(str, numbers))}) ("
    assert told in str(ending.error)


def test_pipelines_share_out_the_samples_of_a_pass() -> None:
    _, data = built(job_of(Masked, pipelines=2))
    found = [
        tuple(pixels.tolist())
        for step in range(2)
        for pipeline in range(2)
        for microbatch in range(2)
        for pixels in data.microbatch(step, pipeline, microbatch, 4).inputs[1]
    ]
    assert sorted(found) == sorted(tuple(each["pixels"].tolist()) for each in rows())
