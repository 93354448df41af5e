"""A finite data set as a source: its order, its draws, its forms, files of tokens, and what a user is told."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.job.samples import first_position, sample_at, shares
from engine.core.units import Args
from engine.models.data import DataFacts, indexed
from engine.models.data_sources import bound, num_samples, open_data
from engine.models.layers import Batch

FACTS = DataFacts(task="regress", features=2, outputs=1)
JOB = Job(pipelines=2, microbatches=3, microbatch_size=4)


class Rows:
    """Samples that name their number; with `noise`, a reader draws from every stream of the process."""

    def __init__(self, length: int, noise: bool = False):
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, float]:
        drawn = float(torch.rand(())) + random.gauss() if self.noise else 0.0
        return torch.tensor([float(number), drawn]), float(number)


def numbers(batch: Batch) -> list[int]:
    return [int(each) for each in batch.inputs[0][:, 0]]


def test_microbatches_follow_the_ledger_over_the_ends_of_passes() -> None:
    data = bound(indexed(Rows(37), Rows(5), FACTS, seed=3), JOB)
    assert num_samples(data) == 37
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(5):
        for pipeline in range(2):
            for microbatch in range(3):
                position = first_position(JOB, step, pipeline, microbatch)
                places = [
                    (share.data_epoch, place)
                    for share in shares(position, 4, 37)
                    for place in range(share.first, share.first + share.length)
                ]
                batch = data.microbatch(step, pipeline, microbatch, 4)
                assert numbers(batch) == [sample_at(*at, 37, 3) for at in places]
                assert batch.targets[0].tolist() == [float(number) for number in numbers(batch)]
                seen.update((at[0], number) for at, number in zip(places, numbers(batch), strict=True))
    assert all(seen[data_epoch, number] == 1 for data_epoch in range(3) for number in range(37))


def test_validation_goes_round_in_its_order() -> None:
    data = bound(indexed(Rows(10), Rows(5), FACTS, seed=0), JOB)
    assert [numbers(data.validation(index, 4)) for index in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_draws_belong_to_the_sample_and_its_pass() -> None:
    data = bound(indexed(Rows(24, noise=True), Rows(5), FACTS, seed=0, draws=True), JOB)

    def drawn(step: int) -> dict[int, float]:
        batches = [data.microbatch(step, pipeline, each, 4) for pipeline in range(2) for each in range(3)]
        return {int(row[0]): float(row[1]) for batch in batches for row in batch.inputs[0]}

    first = drawn(0)
    torch.manual_seed(99)
    random.seed(99)
    assert drawn(0) == first
    assert len(set(first.values())) == 24
    again = drawn(1)  # the second pass
    assert again.keys() == first.keys()
    assert all(again[number] != first[number] for number in first)


def test_a_set_that_draws_without_a_word_is_not_pure() -> None:
    data = bound(indexed(Rows(24, noise=True), Rows(5), FACTS, seed=0), JOB)
    first, second = (data.microbatch(0, 0, 0, 4).inputs[0] for _ in range(2))
    assert not torch.equal(first, second)  # the trial of the data before training refuses it


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (lambda samples: Batch((torch.zeros(len(samples), 2),), (torch.zeros(len(samples)),)), None),
        (lambda samples: torch.zeros(2), "a mapping of columns or a Batch, found Tensor"),
        (lambda samples: ([torch.zeros(1), "x"], torch.zeros(1)), "expected tensors in the inputs, found str"),
        (lambda samples: {"x": torch.zeros(4)}, "expected a column of targets .* and one of inputs, found x"),
    ],
)
def test_a_collate_of_the_user(collate: Any, expected: str | None) -> None:
    source = indexed(Rows(9), Rows(5), FACTS, seed=0, collate=collate)
    if expected is None:
        assert bound(source, JOB).microbatch(0, 0, 0, 4).inputs[0].shape == (4, 2)
        return
    with pytest.raises(TypeError, match=expected):
        bound(source, JOB)


def test_an_empty_set_is_refused() -> None:
    for training, validation, name in ((Rows(0), Rows(1), "training"), (Rows(1), Rows(0), "validation")):
        with pytest.raises(UserError, match=f"at least one sample in the {name} set"):
            indexed(training, validation, FACTS, seed=0)


def token_file(folder: Path, count: int, dtype: torch.dtype = torch.uint16) -> str:
    path = folder / "tokens.bin"
    path.write_bytes((torch.arange(count) % 50).to(dtype).view(torch.uint8).numpy().tobytes())
    return str(path)


@pytest.mark.parametrize(("dtype", "token_bytes"), [(torch.uint16, 2), (torch.int32, 4)])
def test_a_file_of_tokens_is_mapped_and_read_once_in_a_pass(
    tmp_path: Path, dtype: torch.dtype, token_bytes: int
) -> None:
    path = token_file(tmp_path, 8 * 100 + 1, dtype)
    args: Args = {"vocabulary": 50, "sequence": 8, "token_bytes": token_bytes}
    data = open_data(Job(model="gpt", data=path, data_args=args, microbatch_size=3, microbatches=5))
    assert (data.facts.vocabulary, data.facts.sequence, num_samples(data)) == (50, 8, 90)
    batches = [data.microbatch(step, 0, microbatch, 3) for step in range(6) for microbatch in range(5)]
    rows = torch.cat([torch.cat((batch.inputs[0], batch.targets[0][:, -1:]), 1) for batch in batches])
    windows = [(torch.arange(start * 8, start * 8 + 9) % 50).tolist() for start in range(90)]
    assert sorted(rows.tolist()) == sorted(windows)
    assert batches[0].inputs[0].dtype == batches[0].targets[0].dtype == torch.int64
    assert data.validation(0, 1).inputs[0].tolist() == [(torch.arange(720, 728) % 50).tolist()]


@pytest.mark.parametrize(
    ("content", "args", "expected"),
    [
        (b"\0" * 401, {}, "a file of whole tokens (data_args.token_bytes 2)"),
        (b"\0" * 40, {}, "at least 65 tokens (2 x sequence + 1)"),
        (b"", {}, "at least 65 tokens (2 x sequence + 1)"),
        (b"\0" * 400, {"token_bytes": 3}, "2 or 4"),
        (b"\0" * 400, {"vocabulary": 0}, "a whole number >= 1"),
        (b"\xff" * 400, {}, "tokens below data_args.vocabulary 50257"),
    ],
)
def test_a_wrong_file_of_tokens_is_named(tmp_path: Path, content: bytes, args: Args, expected: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_data(Job(model="gpt", data=str(path), data_args=args)).microbatch(0, 0, 0, 4)
    assert caught.value.problems[0].expected == expected
