"""Streams: items by their places, positions in checkpoints, packing and buckets."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.manifest import DamagedCheckpointError
from engine.core.transient_errors import RetryLimits
from engine.models.data_sources import StreamData, open_data
from engine.models.packing import bucketed, packed, padded
from engine.models.streams import StreamPosition
from engine.runtime.worker.microbatches import DataRetries
from tests.e2e import stream_models
from tests.e2e.stream_models import NUMBER, Stateful, number_of, sequence
from tests.looped import looped

MODELS = "tests.e2e.stream_models:"


def _opened(name: str, **fields: object) -> StreamData:
    given = {"collate": MODELS + "collated", "variable_shapes": True, "microbatch_size": 2, "microbatches": 2}
    stream = open_data(Job(data=MODELS + name, **given | fields)).stream  # type: ignore[attr-defined, arg-type]
    assert isinstance(stream, StreamData)
    return stream


def _numbers(data: StreamData, step: int, microbatches: int = 2, size: int = 2) -> list[int]:
    batches = [data.microbatch(step, 0, each, size) for each in range(microbatches)]
    return [number_of(row) for batch in batches for row in batch.inputs[0]]


@pytest.mark.parametrize("name", ["plain", "Stateful"])
def test_a_stream_has_each_item_once_per_pass_in_any_order_of_calls(name: str) -> None:
    data, other = _opened(name), _opened(name)
    steps = [_numbers(data, step) for step in range(NUMBER)]
    counts = Counter(number for step in steps for number in step)
    assert counts == dict.fromkeys(range(NUMBER), 4)
    assert sorted([*steps[0], *steps[1]][:NUMBER]) == list(range(NUMBER))
    for step in (6, 2, 3, 3, 0):
        assert _numbers(other, step) == steps[step]
        batches = [each.microbatch(step, 0, 1, 2) for each in (data, other)]
        assert all(map(torch.equal, *(each.inputs + each.targets for each in batches)))


@looped("name", ["plain", "Stateful"])
@looped("after", [0, 2, 6])
def test_a_position_goes_on_exactly_there_also_with_other_microbatches(name: str, after: int) -> None:
    data, whole = _opened(name), [each for step in range(12) for each in _numbers(_opened(name), step)]
    for step in range(after + 1):
        _numbers(data, step)
    text, items = data.position_after(after), 4 * (after + 1)
    assert StreamPosition.of_text(text).items == items
    resumed = _opened(name, microbatches=1, microbatch_size=3)
    resumed.begin_at(text)
    rest = [each for step in range(after + 1, after + 5) for each in _numbers(resumed, step, 1, 3)]
    assert rest == whole[items : items + 12]


@pytest.mark.parametrize("name", ["plain", "Stateful"])
def test_a_stream_that_fails_for_a_moment_goes_on_where_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that has raised is at its end: the next try got the items of the next pass."""
    whole = [_numbers(_opened(name), step) for step in range(4)]
    failing, data = iter([False, True, False, False, True, True, *[False] * 99]), _opened(name)

    def read(number: int) -> list[int]:
        if next(failing):
            raise TimeoutError("the store is away")
        return sequence(number)

    monkeypatch.setattr(stream_models, "sequence", read)
    retries, seen = DataRetries(RetryLimits(9, 60.0)), []
    for step in range(4):
        for microbatch in range(2):
            batch = retries.call(data.microbatch, step, 0, microbatch, 2)
            seen += [number_of(row) for row in batch.inputs[0]]
    assert seen == [number for numbers in whole for number in numbers]
    assert next(failing, None) is False, "it has failed three times"


def test_a_state_saves_reading_from_the_beginning() -> None:
    data = _opened("Stateful", data_args={"count": 1000})
    data.follow(200)
    text = data.position_after(200)
    resumed = _opened("Stateful", data_args={"count": 1000})
    resumed.begin_at(text)
    before = Stateful.made
    _numbers(resumed, 201)
    assert Stateful.made - before == 4


def test_a_position_that_no_stream_keeps_is_refused() -> None:
    for text in ("", "[1]", '{"items": 1}', "[0,-1,0,0,null]", "[0,true,0,0,null]"):
        with pytest.raises(DamagedCheckpointError, match="position of a stream"):
            StreamPosition.of_text(text)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"rows": torch.ones(1)}, "found Object of type Tensor is not JSON serializable"),
        ({"place": (1, 2)}, "found a value that JSON changes, such as a tuple or a number as a key"),
        ({"rows": "x" * 9_000}, r"of at most 7992 characters as JSON, found 9012 characters after 1 item"),
    ],
)
def test_a_state_that_no_checkpoint_can_keep_is_refused_at_the_start(
    state: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stateful, "state_dict", lambda self: state)
    with pytest.raises(UserError, match=f"{words} .*without it, as a generator"):
        _opened("Stateful")


def test_a_state_that_grows_too_large_is_refused_at_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stateful, "state_dict", lambda self: {"seen": list(range(self._next))})
    data = _opened("Stateful", data_args={"count": 5000})
    assert StreamPosition.of_text(data.position_after(0)).state == {"seen": [0, 1, 2, 3]}
    with pytest.raises(UserError, match="characters after 4000 items"):
        data.position_after(999)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(UserError, match="at least one item"):
        _opened("plain", data_args={"count": 0})


def test_packed_rows_have_each_token_once() -> None:
    sequences = [sequence(number) for number in range(9)]
    rows = list(packed(sequences, 8, end=99))
    assert {row.shape for pair in rows for row in pair} == {(8,)}
    tokens = [token for each in sequences for token in (*each, 99)]
    targets = torch.cat([targets for _, targets in rows])
    assert targets[targets != -100].tolist() == tokens[1:]
    assert torch.cat([inputs for inputs, _ in rows])[: len(tokens) - 1].tolist() == tokens[:-1]


def test_buckets_have_each_sequence_once_within_their_tokens() -> None:
    batches = list(bucketed(map(sequence, range(50)), 24, window=16, seed=3))
    assert Counter(number_of(row) for each in batches for row in each.inputs[0]) == dict.fromkeys(range(50), 1)
    assert max(each.inputs[0].numel() for each in batches) <= 24
    again, other = (list(bucketed(map(sequence, range(50)), 24, window=16, seed=seed)) for seed in (3, 4))
    assert all(torch.equal(one.inputs[0], two.inputs[0]) for one, two in zip(batches, again, strict=True))
    assert [each.inputs[0].tolist() for each in other] != [each.inputs[0].tolist() for each in batches]
    assert padded([(torch.ones(2), torch.ones(2)), (torch.ones(1), torch.ones(1))]).targets[0].tolist()[1] == [1, -100]
