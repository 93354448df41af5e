"""The last samples of an uneven evaluation set, where the forward of an ordinary module returns the loss."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.samples import EvaluationPart
from engine.core.messages import Evaluation
from engine.core.ownership import Grid, fresh
from engine.models.data_sources import EvaluatedBatch, evaluation, open_data
from engine.models.layers import Model, Tensors, as_tensors
from engine.models.model_loader import build_model
from engine.runtime.checkpoint.outputs import merged_outputs
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import build_layer
from engine.runtime.worker import layer_costs
from engine.runtime.worker.validation import Prediction, Validation, unmeasured
from tests.runtime.small_jobs import borders_of

HERE = __name__


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Embedding(32, 8), nn.Linear(8, 4)

    def logits(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.out(self.inward(tokens))
        return made


class ByToken(Network):
    """Shifts and flattens the output, so that the loss takes one row per token."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(tokens)[:, :-1].reshape(-1, 4), labels[:, 1:].reshape(-1))


class BySequence(Network):
    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": nn.CrossEntropyLoss()(self.logits(tokens)[:, 0], labels[:, 0])}


class BySample(Network):
    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.logits(tokens).mean(dim=1)
        return {"loss": nn.CrossEntropyLoss()(logits, labels), "logits": logits}


def _tokens() -> Tensor:
    return torch.randint(0, 4, (22, 4), generator=torch.Generator().manual_seed(0))


def sequences() -> dict[str, Any]:
    rows = [{"tokens": each, "labels": each} for each in _tokens()]
    return {"train": rows, "short": rows[:11]}


def samples() -> dict[str, Any]:
    rows = [{"tokens": each, "labels": int(each[0])} for each in _tokens()]
    return {"train": rows, "short": rows[:11]}


def job_of(module: Any, data: Any, **changed: Any) -> Job:
    given = {"microbatches": 1, "microbatch_size": 4, "stages": 1, "validate_every": 1, **changed}
    return Job(model=f"{HERE}:{module.__name__}", data=f"{HERE}:{data.__name__}", **given)


@pytest.mark.parametrize(
    ("module", "data", "is_cut"),
    [(ByToken, sequences, False), (BySequence, sequences, False), (BySample, samples, True)],
)
def test_the_last_samples_count_only_where_the_loss_pairs_rows(module: Any, data: Any, is_cut: bool) -> None:
    job = job_of(module, data)
    source = open_data(job)
    model = build_model(job, source.facts, source)
    assert model.is_cut_by_sample is is_cut
    notes = unmeasured(job, model, source)
    assert [note.partition(":")[0] for note in notes] == ["the last 3 of 11 samples of short are not measured"] * (
        not is_cut
    )
    if is_cut:
        batch = evaluation(source, "short", 2, 4)
        outputs = batch.inputs
        with torch.no_grad():
            whole = [layer.build().eval() for layer in model.layers]
            for each in whole:
                outputs = each(*outputs)
            found = model.loss(tuple(each[:3] for each in outputs), tuple(each[:3] for each in batch.targets))
            plain = module()
            plain.load_state_dict({name: tensor for each in whole for name, tensor in each.state_dict().items()})
            named = dict(zip(source.facts.form.names, batch.inputs, strict=True))  # type: ignore[attr-defined]
            expected = plain(**{name: each[:3] for name, each in named.items()})["loss"]
        torch.testing.assert_close(found, expected)


def measured(job: Job, kind: type[Validation] = Validation, outputs: str = "") -> tuple[Evaluation, ...]:
    """Returns the results of a validation pass of a job with one worker, or writes those of a prediction."""
    data = open_data(job)
    model = build_model(job, data.facts, data)
    replicas = Replicas(job, model, (0,), [(0, 0)])
    replicas.learn(borders_of(job, model, data))
    control = SimpleNamespace(at=(0, 0, False), check=lambda: None, busy=nullcontext)
    parts = {"job": job, "replicas": replicas, "data": data, "control": control, "outputs": outputs}
    context: Any = SimpleNamespace(worker=0, borders=(), **parts)
    plane: Any = SimpleNamespace(aside=None)
    return kind(context, plane, fresh(Grid(1, job.microbatches))).run().sets or ()


def test_a_pass_counts_the_samples_that_it_measures() -> None:
    assert [(each.name, each.samples) for each in measured(job_of(ByToken, sequences))] == [("short", 8)]


def _over_time(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the loss of outputs [time, sample, class]; it pairs rows also of a part, but others."""
    return functional.cross_entropy(
        outputs[0].transpose(0, 1).reshape(-1, 4)[: targets[0].numel()], targets[0].flatten()
    )


def timewise() -> Model:
    """Its outputs have as many rows as a microbatch, but a row is a time: there are 4 of both."""
    layers: Any = (nn.Embedding(32, 8), nn.Linear(8, 4), lambda each: each.transpose(0, 1))
    return Model(layers, _over_time)


class Timewise(Network):
    """An ordinary module with such outputs, and the default loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens).transpose(0, 1)


class Constant(Network):
    """Its second output has the same rows for all samples."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits(tokens).mean(dim=1), torch.arange(4.0)


class Doubled(Network):
    """Its second output has two equal rows for each sample."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits(tokens).mean(dim=1), torch.ones(8)


class Sampled(Network):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        made = self.logits(tokens)
        return made.mean(dim=1), made.sum(dim=(1, 2))


@pytest.mark.parametrize(
    ("made", "data", "found"),
    [
        (
            timewise,
            sequences,
            r"outputs\[0\] float32 \[4, 4, 4\], whose row 3 is not that of the same sample elsewhere",
        ),
        (Timewise, sequences, r"outputs\[0\] float32 \[4, 4, 4\], whose row 3"),
        (Constant, samples, r"outputs\[1\] float32 \[4\], whose row 3"),
        (Doubled, samples, r"outputs\[1\] float32 \[8\], which has not 4 rows"),
        (Sampled, samples, ""),
    ],
)
def test_rows_that_are_no_samples_are_not_cut(made: Any, data: Any, found: str) -> None:
    job = job_of(made, data)
    if not found:
        assert [(each.name, each.samples) for each in measured(job)] == [("short", 11)]
        return
    where = "in the last microbatch of the evaluation set short, of 3 samples"
    with pytest.raises(UserError, match=rf"one row per sample, found {found}.*, {where} .*--validation-microbatches 2"):
        measured(job)
    assert [each.samples for each in measured(job_of(made, data, validation_microbatches=2))] == [8]
    with pytest.raises(UserError, match=r"of 11 samples \(a smaller microbatch_size\)"):
        EvaluatedBatch((torch.arange(12.0),), ()).first(
            EvaluationPart("short", 0, 11), 12, EvaluatedBatch((torch.arange(12.0),), ()), is_narrow=False
        )


def test_a_set_smaller_than_a_microbatch_is_measured_once() -> None:
    found = measured(job_of(Sampled, samples, microbatch_size=16))
    assert [(each.name, each.samples) for each in found] == [("short", 11)]


class Both(Network):
    """Returns the loss beside outputs that do not depend on the labels."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        hidden = self.inward(tokens)
        logits = self.out(hidden).mean(dim=1)
        return {"loss": functional.cross_entropy(logits * 2, labels), "logits": logits, "hidden": hidden}


class AsTuple(Both):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        found = Both.forward(self, tokens, labels)
        return found["loss"], found["logits"]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class AsDataclass(AsTuple):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return Output(*super().forward(tokens, labels))


class Hidden(Network):
    """Returns the loss alone, which more than the output decides."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens).mean(dim=1)
        return functional.cross_entropy(logits, labels) + logits.square().mean()


class Whole(Hidden):
    """Its loss is known for whole microbatches only."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().forward(tokens, labels), self.logits(tokens).mean(dim=1)


class Leaking(Network):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.logits(tokens).mean(dim=1)
        return functional.cross_entropy(logits, labels), logits * (labels[:, None] >= 0)


def shape(outputs: Tensors, targets: Tensors) -> float:
    (logits,), (labels,) = outputs, targets
    return logits.shape[1] + labels.shape[0] / 100


METRICS = f"accuracy,shape={HERE}:shape"


@pytest.mark.parametrize("made", [Both, AsTuple, AsDataclass, BySample, Whole])
def test_metrics_measure_the_output_beside_a_loss(made: type[nn.Module]) -> None:
    job = job_of(made, samples, metrics=METRICS, split="" if made is Whole else "inward,out")
    (found,) = measured(job)
    (plain,) = measured(replace(job, metrics=""))
    assert (found.samples, found.loss, plain.metrics) == (plain.samples, plain.loss, {})
    assert found.metrics["shape"] == pytest.approx(4.04 if made is Whole else (8 * 4.04 + 3 * 4.03) / 11)
    assert 0 <= found.metrics["accuracy"] <= 1
    data = open_data(job)
    with_metrics, without = (build_model(each, data.facts, data) for each in (job, replace(job, metrics="")))
    batch = data.microbatch(0, 0, 0, 4)
    counts = []
    for model in (with_metrics, without):  # training sees the outputs of the loss only
        outputs = batch.inputs
        for layer in model.layers:
            outputs = as_tensors(layer.build()(*outputs), "a layer")
        counts.append(len(outputs))
    assert counts == [2, 2] if made is Whole else [1, 1]


@pytest.mark.parametrize("made", [Both, Whole])
def test_a_prediction_has_the_output_beside_a_loss(made: type[nn.Module], tmp_path: Path) -> None:
    job = job_of(made, samples, predict_args={"samples": "short"})
    assert measured(job, Prediction, str(tmp_path)) == ()
    model = build_model(job, (data := open_data(job)).facts, data)
    layers = [build_layer(job, model, index) for index in range(len(model.layers))]
    network = Network()
    network.load_state_dict({name: tensor for each in layers for name, tensor in each.state_dict().items()})
    tokens = torch.cat([_tokens()[:11], _tokens()[:1]])
    with torch.no_grad():
        expected = torch.cat([network.logits(each).mean(dim=1) for each in tokens.split(4)])[:11]
    assert torch.equal(merged_outputs(tmp_path)["output"], expected)


@pytest.mark.parametrize(
    ("made", "found"), [(Hidden, "the loss alone"), (Leaking, "one that depends on the targets"), (ByToken, "the loss")]
)
def test_metrics_without_an_output_are_refused_with_the_ways_out(made: type[nn.Module], found: str) -> None:
    job = job_of(made, sequences if made is ByToken else samples, metrics=METRICS)
    data = open_data(job)
    words = (
        rf"metrics: expected a forward that returns an output besides its loss, found {found}.*return \(loss, output\)"
    )
    with pytest.raises(UserError, match=words):
        build_model(job, data.facts, data)
    build_model(replace(job, metrics="perplexity"), data.facts, data)


def test_a_set_of_which_nothing_would_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_costs, "set_up", lambda settings: None)  # of the whole process
    job = job_of(ByToken, sequences, microbatch_size=16)
    source = open_data(job)
    with pytest.raises(UserError, match=r"at least 16 samples \(microbatch_size\) .* found 11 in short"):
        unmeasured(job, build_model(job, source.facts, source), source)
    with pytest.raises(UserError, match=r"at least 16 samples .* or --validate-every 0"):
        layer_costs.layer_costs(job)  # as with --dry-run --build
