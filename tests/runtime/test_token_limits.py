"""Rows of tokens beyond the tables of a model of transformers are refused, with the row, its number and the limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.core.errors import Problem, UserError
from engine.core.job.hugging_face import MODEL
from engine.core.job.job import Job
from engine.core.units import Args
from engine.models.data import DataSets, indexed
from engine.models.data_sources import open_data
from engine.models.hugging_face import text
from engine.models.model_loader import build_model
from engine.models.model_registry import problems_of
from engine.models.token_limits import TokenLimit, limit_rows, row_problem, token_limits
from engine.models.user_factory import made_by
from engine.runtime.process.progress_board import LoaderStatus, ProgressBoard
from engine.runtime.worker.microbatches import WatchedData
from tests.e2e.hf_soak import job_of
from tests.runtime.test_hugging_face import folder_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about itself
]


def model_of(job: Job) -> nn.Module:
    made: nn.Module = made_by("model", job.model, job.model_args, 0)
    return made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", {"input_ids": TokenLimit(64, 32), "labels": TokenLimit(64, 0)}),
        ("llama", {"input_ids": TokenLimit(64, 0), "labels": TokenLimit(64, 0)}),
        ("bert_classifier", {"input_ids": TokenLimit(64, 32), "labels": TokenLimit(0, 0)}),
        ("whisper", {"decoder_input_ids": TokenLimit(64, 32), "labels": TokenLimit(64, 32)}),
        ("vit", {}),
    ],
)
def test_limits_are_the_rows_of_the_tables(name: str, expected: dict[str, TokenLimit], tmp_path: Path) -> None:
    found = token_limits(model_of(job_of(name, tmp_path)))
    assert {key: found[key] for key in expected} == expected
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "BartForConditionalGeneration"])
def test_the_longest_row_fits_and_a_longer_one_does_not(name: str) -> None:
    """One model begins behind the number of the padding, the other at an offset."""
    import transformers

    kind = getattr(transformers, name)
    sizes = {"vocab_size": 16, "hidden_size": 8, "d_model": 8, "max_position_embeddings": 6}
    config = kind.config_class(**sizes, num_hidden_layers=1, encoder_layers=1, decoder_layers=1)
    config.num_attention_heads = config.encoder_attention_heads = config.decoder_attention_heads = 2
    model = kind(config)
    most = token_limits(model)["input_ids"].length
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


def test_a_row_within_the_limits_has_no_problem_and_ignored_labels_are_none() -> None:
    limits = {"input_ids": TokenLimit(10, 4), "labels": TokenLimit(10, 0)}
    row = {"input_ids": [0, 9, 0, 0], "labels": [-100, 9, 0, 0], "note": "text"}
    assert row_problem(row, limits, "row 0") is None
    for column, value in (("input_ids", -1), ("input_ids", 10), ("labels", -1), ("labels", 10)):
        assert row_problem(row | {column: [0, value]}, limits, "row 0") == Problem(
            "data",
            "token ids below 10, the vocabulary of the model",
            f"{value} in row 0, column {column}",
            "read the texts with its own tokenizer",
        )


def rows(*lengths: int, id_at: tuple[int, int] = (0, 0)) -> DataSets:
    samples = [{"input_ids": torch.ones(length, dtype=torch.int64)} for length in lengths]
    samples[id_at[0]]["input_ids"][0] = id_at[1]
    return indexed([{**each, "labels": each["input_ids"]} for each in samples])


def __getattr__(name: str) -> Any:
    """Returns the factories of data that jobs of these tests name."""
    made = {"long": rows(*[32] * 7, 33), "other": rows(*[8] * 8, id_at=(6, 64)), "late": rows(*[8] * 8, id_at=(6, 64))}
    if name not in made:
        raise AttributeError(name)
    return lambda: replace(made[name], draws=name == "late")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("long", "rows of at most 32 tokens, the positions of the model, found 33 in row 7 of the training set"),
        ("other", "token ids below 64, the vocabulary of the model, found 64 in row 6 of the training set"),
    ],
)
def test_rows_are_refused_before_the_first_step(name: str, words: str, tmp_path: Path) -> None:
    job = replace(job_of("gpt2", tmp_path), data=f"{__name__}:{name}")
    data = WatchedData(open_data(job), LoaderStatus(ProgressBoard.create(1), 0))
    with pytest.raises(UserError, match=words):
        build_model(job, data.facts, data)


def test_rows_that_are_not_read_before_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    job = replace(job_of("gpt2", tmp_path), data=f"{__name__}:late")
    data = open_data(job)
    limit_rows(data, token_limits(model_of(job)))
    with pytest.raises(UserError, match=r"found 64 in row [01] of microbatch\(step=\d, .*\), column input_ids"):
        [data.microbatch(number // 3, 0, number % 3, 2) for number in range(6)]  # all rows, two at a time


def test_a_text_and_a_file_of_tokens_are_refused_with_the_argument(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(" ".join(str(number % 10) for number in range(330)))
    place = str(folder_of(tmp_path / "model"))
    args: Args = {"file": str(file), "tokenizer": place, "length": 40}
    job = Job(model=MODEL, model_args={"path": place, "random": True}, data=f"{text.__module__}:text", data_args=args)
    data = open_data(job)
    with pytest.raises(UserError, match=r"of at most 32 tokens, .*, found 40 in row 0 .*--set data_args\.length=32"):
        build_model(job, data.facts, data)
    tokens = tmp_path / "a.bin"
    tokens.write_bytes(bytes(2000))
    job = replace(job, data=str(tokens), data_args={"vocabulary": 100, "sequence": 64})
    data = open_data(job)
    with pytest.raises(UserError) as caught:
        build_model(job, data.facts, data)
    assert [str(each) for each in caught.value.problems] == [
        "data_args.vocabulary: expected at most 64, as the model has, found 100",
        "data_args.sequence: expected at most 32, as the model has, found 64",
    ]


@pytest.mark.parametrize("data", ["text", "auto", "synthetic", "notes.md"])
def test_data_of_another_vocabulary_is_refused(data: str) -> None:
    (problem,) = problems_of(Job(model=MODEL, model_args={"path": "gpt2"}, data=data))
    assert str(problem).startswith("data: expected tokens of the model: FILE.txt, FILE.bin or package.module:factory")
    assert not problems_of(Job(model=MODEL, model_args={"path": "gpt2"}, data="tokens.bin"))
