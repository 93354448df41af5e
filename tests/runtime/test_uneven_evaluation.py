"""The last samples of an uneven evaluation set, where the forward of an ordinary module returns the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.core.config.job import Job
from engine.core.errors import UserError
from engine.core.ownership import Grid, one_slot_each
from engine.models.model_loader import build_model
from engine.models.sources.evaluations import evaluation
from engine.models.sources.open_data import open_data
from engine.runtime.replica.replicas import Replicas
from engine.runtime.worker.validation import Validation, unmeasured
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


def job_of(module: type[nn.Module], data: Any, **changed: Any) -> Job:
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


def test_a_pass_counts_the_samples_that_it_measures() -> None:
    job = job_of(ByToken, sequences)
    data = open_data(job)
    model = build_model(job, data.facts, data)
    replicas = Replicas(job, model, (0,), [(0, 0)])
    replicas.learn(borders_of(job, model, data))
    control = SimpleNamespace(at=(0, 0, False), check=lambda: None)
    context: Any = SimpleNamespace(job=job, worker=0, replicas=replicas, data=data, borders=(), control=control)
    plane: Any = SimpleNamespace(aside=None)
    ended = Validation(context, plane, one_slot_each(Grid(1, job.microbatches))).run()
    assert [(each.name, each.samples) for each in ended.sets or ()] == [("short", 8)]


def test_a_set_of_which_nothing_would_be_measured_is_refused() -> None:
    job = job_of(ByToken, sequences, microbatch_size=16)
    source = open_data(job)
    with pytest.raises(UserError, match=r"at least 16 samples \(microbatch_size\) .* found 11 in short"):
        unmeasured(job, build_model(job, source.facts, source), source)
