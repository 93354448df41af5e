"""An exception in a loss or a metric: it names its place, and the values that torch's own words lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import DataFacts
from engine.models.layers import Loss, Model, Tensors
from engine.models.losses import IGNORED, default_loss, loss_of, metrics_of
from engine.models.model_loader import build_model
from engine.models.user_code import exception_of
from engine.runtime.stage.stage import Stage

OUTPUTS = (torch.zeros(4, 10),)


def told(loss: Loss, targets: Tensors, outputs: Tensors = OUTPUTS) -> str:
    """Returns the exception of a loss in the words of a run."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the words name the type
        loss_of(Model((nn.Identity(),), loss), outputs, targets)  # type: ignore[arg-type]
    frames = caught.value.__traceback__
    assert frames is not None
    return exception_of(caught.value.with_traceback(frames.tb_next)).at_start()  # without the frame of the test


def cross(outputs: Any, targets: Any) -> Any:
    """Is a loss as users write it."""
    return nn.functional.cross_entropy(outputs[0], targets[0])


@pytest.mark.parametrize("loss", [default_loss, cross], ids=["default", "own"])
def test_a_target_that_is_no_class_is_told_with_the_number_of_classes(loss: Loss) -> None:
    """Only `IndexError: Target 12 is out of bounds.` was told, without a place."""
    words = told(loss, (torch.tensor([1, IGNORED, 12, 3]),))
    assert words.startswith("in the loss: IndexError: Target 12 is out of bounds: 10 classes, target 12; ")
    assert "expected targets from 0 to 9, or a last layer with one output for each class" in words
    assert ("test_losses.py" in words) == (loss is cross)


def test_shapes_that_do_not_fit_are_told() -> None:
    words = told(cross, (torch.zeros(1, dtype=torch.int64),))
    assert words.startswith("in the loss: ValueError: Expected input batch_size (4) to match target batch_size (1)")
    assert "outputs float32 [4, 10], targets int64 [1] (" in words


def test_a_loss_of_torch_is_told_that_it_gets_tuples() -> None:
    words = told(nn.CrossEntropyLoss(), (torch.zeros(4, dtype=torch.int64),))
    assert words.startswith("in the loss: TypeError: cross_entropy_loss(): argument 'input'")
    assert words.endswith("outputs float32 [4, 10], targets int64 [4]; both are tuples: take outputs[0] and targets[0]")


@pytest.mark.parametrize(
    ("found", "kind"), [(torch.ones(4), r"float32 \[4\]"), (0.5, "float"), (None, "NoneType")], ids=str
)
def test_a_loss_returns_a_tensor_with_one_number(found: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"a tensor with one number, the mean over the microbatch, found {kind}"):
        loss_of(Model((nn.Identity(),), lambda outputs, targets: found), OUTPUTS, ())  # type: ignore[arg-type]


def test_a_metric_is_named_too() -> None:
    model = Model((nn.Identity(),), default_loss, metric=lambda outputs, targets: targets[3])  # type: ignore[arg-type]
    with pytest.raises(IndexError) as caught:
        metrics_of(model, OUTPUTS, (torch.ones(4),))
    assert exception_of(caught.value).place == "the metric metric"


@pytest.mark.parametrize(
    ("targets", "metric"),
    [(torch.tensor([0, 1, 2, 2]), 0.75), (torch.tensor([0, IGNORED, 2, 2]), 2 / 3), (torch.ones(4, 3), None)],
    ids=["classes", "some count", "numbers"],
)
def test_accuracy_is_the_metrics_of_a_cross_entropy(targets: torch.Tensor, metric: float | None) -> None:
    """A classifier of the user's own layers had no metric."""
    outputs = torch.eye(3)[[0, 1, 2, 0]]
    found = metrics_of(Model((nn.Identity(),), default_loss), (outputs,), (targets,))  # type: ignore[arg-type]
    assert found == ({} if metric is None else {"accuracy": pytest.approx(metric)})


def test_the_first_targets_are_tried_before_training() -> None:
    """Wrong classes came up in step 0, where they ended the run with 3, after talk of a takeover."""
    model = Model((nn.Linear(8, 10),), default_loss)  # type: ignore[arg-type]
    stage = Stage(Job(stages=1), model, 0, 0, 1)
    stage.probe((torch.ones(4, 8),), (torch.tensor([1, 2, 9, 3]),))
    with pytest.raises(IndexError):
        stage.probe((torch.ones(4, 8),), (torch.tensor([1, 2, 10, 3]),))


def test_the_targets_and_the_metrics_of_a_validation_are_tried_before_training() -> None:
    """They came up in the first validation, which may be after the last step."""
    inputs, good, bad = (torch.ones(4, 8),), (torch.tensor([1, 2, 9, 3]),), (torch.tensor([1, 2, 10, 3]),)
    stage = Stage(Job(stages=1), Model((nn.Linear(8, 10),), default_loss), 0, 0, 1)  # type: ignore[arg-type]
    stage.probe(inputs, good, [good])
    with pytest.raises(IndexError):
        stage.probe(inputs, good, [bad])
    model = Model((nn.Linear(8, 10),), default_loss, metric=lambda outputs, targets: targets[3])  # type: ignore[arg-type]
    with pytest.raises(IndexError) as caught:
        Stage(Job(stages=1), model, 0, 0, 1).probe(inputs, good, [good])
    assert exception_of(caught.value).place == "the metric metric"


def test_an_exception_in_a_backward_names_the_layer() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise ValueError("planted in a backward")

    layers = (nn.Linear(8, 10), Broken.apply)
    stage = Stage(Job(stages=1), Model(layers, default_loss), 0, 0, 2)  # type: ignore[arg-type]
    stage.forward(0, 0, (torch.ones(4, 8),), (torch.zeros(4, dtype=torch.int64),))
    with pytest.raises(ValueError, match="planted") as caught:
        stage.backward(0, 0, ())
    assert exception_of(caught.value).place == "the backward of layer 1 (1)"


def named(**fields: Any) -> Model:
    """Returns the model of a job that names its loss."""
    return build_model(
        Job(model="mlp", data="digits", **fields),
        DataFacts(task="classify", num_classes=10, channels=1, height=4, width=4),
    )


def test_a_job_names_its_loss_with_arguments() -> None:
    outputs, targets = (torch.randn(4, 10),), (torch.tensor([1, 2, IGNORED, 3]),)
    model = named(loss="cross_entropy", loss_args={"label_smoothing": 0.1})
    expected = nn.functional.cross_entropy(outputs[0], targets[0], label_smoothing=0.1)
    assert torch.equal(loss_of(model, outputs, targets), expected)
    assert list(metrics_of(model, outputs, targets)) == ["accuracy"]
    own = named(loss=f"{__name__}:scaled", loss_args={"factor": 3.0})
    assert torch.equal(loss_of(own, outputs, targets), scaled(outputs, targets, factor=3.0))
    with pytest.raises(UserError, match=r"loss_args\.label_smoothing: expected a number >= 0 and < 1, found 1\.5"):
        named(loss="cross_entropy", loss_args={"label_smoothing": 1.5})
    with pytest.raises(UserError, match="did you mean 'cross_entropy'"):
        named(loss="crossentropy")
    with pytest.raises(UserError, match="no arguments without a loss"):
        named(loss_args={"label_smoothing": 0.1})


def scaled(outputs: Any, targets: Any, factor: float = 1.0) -> Any:
    """Is a loss with an argument."""
    return cross(outputs, targets) * factor
