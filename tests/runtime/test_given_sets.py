"""Data sets as users have them: what a factory may return, columns, collate functions, evaluation sets and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import Columns, DataFacts, InputSelection, indexed
from engine.models.data_sources import (
    batch_of,
    bound,
    collate_columns,
    evaluation,
    evaluation_sets,
    given_sets,
    num_samples,
    why_not,
)
from engine.models.layers import FunctionLayer
from engine.models.model_loader import build_model
from tests.looped import looped

JOB = Job(microbatch_size=2)
X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
PAIRS = TensorDataset(X, Y)


class Rows:
    """Samples that are mappings, as those of the package datasets."""

    def __init__(self, samples: list[dict[str, Any]], form: str | None = None):
        self.samples, self.format = samples, {"type": form}
        self.features = {"label": SimpleNamespace(num_classes=7)}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self.samples[number]
        return {name: torch.as_tensor(each) for name, each in sample.items()} if self.format["type"] else sample

    def with_format(self, kind: str) -> Rows:
        return Rows(self.samples, kind)


COLUMNS = Rows([{"tokens": [number, 1, 2], "label": number % 3} for number in range(5)])


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (PAIRS, (6, {})),
        ([(X[0], 0), (X[1], 1), (X[2], 0)], (3, {})),
        ((PAIRS, COLUMNS), (6, {"validation": 5})),
        ({"train": PAIRS, "test": COLUMNS, "other": PAIRS}, (6, {"test": 5, "other": 6})),
    ],
    ids=["one", "a list of samples", "a pair", "by name"],
)
def test_a_factory_may_return_data_sets(made: Any, sizes: tuple[int, Mapping[str, int]]) -> None:
    source = given_sets(made)
    assert source is not None
    data = bound(replace(source, facts=DataFacts(task="classify")), JOB)
    assert (num_samples(data), evaluation_sets(data)) == sizes


class Stream(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ((X, Y), r"TensorDataset\(inputs, targets\)"),
        ({"valid": PAIRS}, "the set to train on is called 'train'; found valid"),
        (3, "^$"),
    ],
    ids=["tensors", "no training set", "other"],
)
def test_the_way_out_is_said_for_other_objects(made: Any, words: str) -> None:
    assert given_sets(made) is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(why_not(made))


@pytest.mark.parametrize("made", [DataLoader(PAIRS), Stream(), iter(X)], ids=["loader", "stream", "iterator"])
def test_a_stream_is_a_training_set(made: Any) -> None:
    for returned, names in ((made, []), ((made, PAIRS), ["validation"]), ({"train": made, "test": PAIRS}, ["test"])):
        sets = given_sets(returned)
        assert sets is not None
        assert (sets.training, list(sets.evaluations)) == (made, names)
    assert given_sets((PAIRS, made)) is None  # it has no end that is known


def test_a_loader_with_batches_of_another_size_is_refused_at_the_start() -> None:
    """The first step failed, with the name of a class of bamboo and no way out."""
    loader = DataLoader(PAIRS, batch_size=8)
    source = given_sets(loader)
    assert source is not None
    found = r"expected 8, the batch_size of the DataLoader, found 2 \(or let the factory return its data set"
    with pytest.raises(UserError, match=found):
        bound(source, replace(JOB, microbatch_size=2), lambda: loader)


def test_columns_are_inputs_by_name_and_one_is_the_target() -> None:
    source = given_sets({"train": COLUMNS})
    assert source is not None
    data = bound(source, replace(JOB, seed=5))
    assert data.facts == DataFacts(
        task="classify", num_classes=7, features=3, form=Columns(("tokens", "label"), "label")
    )
    batch = data.microbatch(0, 0, 0, 2)
    assert torch.equal(batch.inputs[1], batch.targets[0])
    assert batch.inputs[0][:, 0].remainder(3).tolist() == batch.targets[0].tolist()


def test_a_column_without_numbers_is_left_out_and_one_of_several_shapes_is_named() -> None:
    assert list(collate_columns([{"text": "a", "x": 1.5, "y": 2}, {"text": "b", "x": 2.5, "y": 3}])) == ["x", "y"]
    with pytest.raises(ValueError, match=r"'x' has rows of several shapes, \[1\] and \[2\]"):
        collate_columns([{"x": [1]}, {"x": [1, 2]}])
    with pytest.raises(TypeError, match=r"a column of targets .* and one of inputs, found x"):
        batch_of({"x": torch.zeros(2)})


def both(input_ids: Tensor, labels: Tensor) -> None:
    """Takes the target, as a module that returns its loss."""


def annotated(columns: dict[str, Tensor]) -> None:
    """Takes all columns as one dict."""


@looped(
    ("function", "names", "expected"),
    [
        (both, ("input_ids", "mask", "labels"), InputSelection((), {"input_ids": 0, "labels": 2})),
        (lambda x: None, ("input_ids", "labels"), InputSelection((0,), {})),
        (lambda batch: None, ("input_ids", "labels"), InputSelection((), {"input_ids": 0, "labels": 1}, is_dict=True)),
        (annotated, ("input_ids", "mask"), InputSelection((), {"input_ids": 0, "mask": 1}, is_dict=True)),
        (lambda *inputs: None, ("input_ids", "mask", "labels"), InputSelection((0, 1), {})),
        (lambda **named: None, ("input_ids", "mask", "labels"), InputSelection((), {"input_ids": 0, "mask": 1})),
        (
            lambda labels, **named: None,
            ("input_ids", "mask", "labels"),
            InputSelection((), {"input_ids": 0, "mask": 1, "labels": 2}),
        ),
        (lambda mask=None: None, ("input_ids", "mask", "labels"), InputSelection((), {"mask": 1})),
        (lambda x: None, ("input_ids", "mask", "labels"), "columns that the first layer takes (x)"),
        (lambda input_ids, place: None, ("input_ids", "mask", "labels"), "columns that the first layer takes"),
    ],
)
def test_the_first_layer_takes_columns_by_the_names_of_its_parameters(
    function: Any, names: tuple[str, ...], expected: Any
) -> None:
    if isinstance(expected, InputSelection):
        assert Columns(names, "labels").taken_by(function) == expected
        return
    with pytest.raises(UserError) as caught:
        Columns(names, "labels").taken_by(function)
    assert expected in str(caught.value)


def test_named_columns_reach_the_layer() -> None:
    from engine.models.data import with_form
    from engine.models.layers import Model, layer_spec
    from engine.models.losses import default_loss

    model = Model((layer_spec("first", FunctionLayer(lambda tokens: tokens * 2)), nn.Identity()), default_loss)  # type: ignore[arg-type]
    layer = with_form(model, Columns(("label", "tokens"), "label")).layers[0].build()
    assert layer(torch.zeros(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_job_names_a_collate_function() -> None:
    job = replace(JOB, collate="tests.runtime.test_given_sets:renamed")
    data = bound(indexed(COLUMNS), job)
    assert data.facts.form == Columns(("x", "y"), "y")
    assert data.microbatch(0, 0, 0, 2).inputs[0].dtype == torch.float32
    with pytest.raises(UserError, match="this source makes microbatches"):
        bound(data, job)


def renamed(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    columns = collate_columns(samples)
    return {"x": columns["tokens"].float(), "y": columns["label"]}


def test_an_evaluation_set_goes_on_at_its_begin_and_each_has_its_name() -> None:
    data = bound(indexed(PAIRS, {"a": TensorDataset(X[:3], Y[:3]), "b": PAIRS}), JOB)
    assert [evaluation(data, "a", index, 2).targets[0].tolist() for index in range(2)] == [[0, 1], [2, 0]]
    assert evaluation(data, "b", 1, 2).targets[0].tolist() == [2, 3]
    assert data.validation(0, 2).targets[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "targets", "facts"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2), DataFacts(task="regress", features=3, outputs=2)),
        (torch.zeros(4, 3), torch.zeros(4), DataFacts(task="regress", features=3, outputs=1)),
        (torch.zeros(4, 9).long(), torch.zeros(4, 9).long(), DataFacts(task="causal", sequence=9)),
        (torch.zeros(4, 1, 8, 6), torch.zeros(4).long(), DataFacts(task="classify", channels=1, height=8, width=6)),
    ],
)
def test_facts_are_read_off_the_first_microbatch(inputs: Tensor, targets: Tensor, facts: DataFacts) -> None:
    assert bound(indexed(TensorDataset(inputs, targets)), JOB).facts == facts


def test_a_built_in_model_asks_for_the_sizes_that_no_sample_tells() -> None:
    with pytest.raises(UserError, match=r"data whose facts have vocabulary.*DataFacts"):
        build_model(Job(model="gpt"), DataFacts(task="causal", sequence=9))
