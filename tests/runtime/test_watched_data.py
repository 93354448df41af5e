"""A watched source: when it may load ahead, and what it tells meanwhile."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product

import numpy
import pytest
import torch

from engine.core.action import Action, Op
from engine.core.checks.trajectory import first_difference
from engine.core.history.process_records import DataRetryRecord
from engine.core.job.job import Job
from engine.core.protocol.events import Loading
from engine.core.transient_errors import RetryLimits
from engine.models.data import DataFacts
from engine.models.layers import Batch
from engine.runtime.process.progress_board import LoaderStatus, ProgressBoard
from engine.runtime.worker import microbatches
from engine.runtime.worker.microbatches import DataRetries, MicrobatchLoader, WatchedData
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

SLOW_S = 0.01


@pytest.fixture
def board() -> Iterator[ProgressBoard]:
    made = ProgressBoard.create(1)
    yield made
    made.close()


class Source:
    """A source that takes `seconds`, and calls `draw` each time."""

    facts = DataFacts(task="regress", features=1, outputs=1)

    def __init__(self, board: ProgressBoard, seconds: float = SLOW_S, draw: Callable[[], object] = lambda: None):
        self.board, self.seconds, self.draw = board, seconds, draw
        self.calls: list[tuple[int, int, str, int]] = []
        self.width = 1

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        place = self.board.place_of(0)
        self.calls.append((step, microbatch, threading.current_thread().name, place.loading if place else 0))
        self.draw()
        time.sleep(self.seconds)
        value = 100.0 * step + microbatch + torch.arange(self.width) / 8 + torch.zeros(size, 1)
        return Batch((value,), (value,))

    def validation(self, index: int, size: int) -> Batch:
        return self.microbatch(-1, 0, index, size)


def two_steps(source: Source, load_ahead: int = 1) -> list[float]:
    """Returns the values that a worker loads in two steps of three microbatches, two of them already known to it."""
    data = WatchedData(source, LoaderStatus(source.board, 0))
    loader = MicrobatchLoader(Job(stages=1, steps=2, microbatch_size=1, audit=0, load_ahead=load_ahead), data)
    forwards = [Action(0, Op.F, microbatch) for microbatch in range(3)]
    loader.enter(forwards)
    data.microbatch(0, 0, 0, 1)
    data.validation(0, 1)
    values = []
    for step in range(2):
        for action in forwards:
            values.append(loader.load(step, action).inputs[0].item())
        loader.forget_step()
    return values


@pytest.mark.parametrize(
    ("seconds", "draw", "is_ahead"),
    [
        (SLOW_S, lambda: None, True),
        (0.0, lambda: None, False),
        (SLOW_S, random.random, False),
        (SLOW_S, numpy.random.rand, False),
        (SLOW_S, lambda: torch.rand(1), False),
        (SLOW_S, lambda: torch.rand(1, generator=torch.Generator().manual_seed(1)), True),
    ],
    ids=["slow", "quick", "python", "numpy", "torch", "own generator"],
)
def test_a_slow_source_that_draws_nothing_loads_ahead(
    board: ProgressBoard,
    seconds: float,
    draw: Callable[[], object],
    is_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not seconds:
        monkeypatch.setattr(microbatches, "_SLOW_S", 10.0)  # a busy machine makes each source slow for a while
    source = Source(board, seconds, draw)
    assert two_steps(source) == [0.0, 1.0, 2.0, 100.0, 101.0, 102.0]
    threads = [thread.partition("_")[0] for _, _, thread, _ in source.calls[3:]]
    assert threads == ["loading" if is_ahead else "MainThread"] * 5
    assert [(step, microbatch) for step, microbatch, _, _ in source.calls[2:]] == [
        (step, microbatch) for step in range(2) for microbatch in range(3)
    ], "nothing is loaded twice, and nothing behind the last step"
    assert {loading for *_, loading in source.calls} <= {Loading.MAIN, Loading.AHEAD}


@pytest.mark.parametrize(("load_ahead", "most_at_once"), [(0, 1), (3, 3), (9, 5)])
def test_as_many_are_loaded_at_once_as_the_job_says(board: ProgressBoard, load_ahead: int, most_at_once: int) -> None:
    source, counted = Source(board, 0.03), threading.Lock()
    now, most = 0, 0
    load = source.microbatch

    def microbatch(step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        nonlocal now, most
        with counted:
            now, most = now + 1, max(most, now + 1)
        try:
            return load(step, pipeline, microbatch, size)
        finally:
            with counted:
                now -= 1

    source.microbatch = microbatch  # type: ignore[method-assign]
    assert two_steps(source, load_ahead) == [0.0, 1.0, 2.0, 100.0, 101.0, 102.0]
    assert most == most_at_once
    loaded = sorted((step, microbatch) for step, microbatch, _, _ in source.calls[2:])
    assert loaded == [(step, microbatch) for step in range(2) for microbatch in range(3)]


@pytest.mark.parametrize("load_ahead", [0, 1, 3])
def test_a_microbatch_is_loaded_once_for_all_its_slices(board: ProgressBoard, load_ahead: int) -> None:
    """In a worker with the first and the last stage, one of whose forwards is prepared in a wait."""
    source = Source(board)
    source.width = 4
    data = WatchedData(source, LoaderStatus(board, 0))
    job = Job(stages=2, steps=2, microbatch_size=1, microbatches=3, slices=2, audit=1, load_ahead=load_ahead)
    loader = MicrobatchLoader(job, data)
    forwards = [Action(stage, Op.F, each) for first in (0, 2, 4) for stage in (0, 1) for each in (first, first + 1)]
    loader.enter(forwards)
    for step in range(2):
        loader.prepare(step, forwards[1])
        for action in forwards:
            (cut,) = loader.load(step, action).inputs
            number, half = divmod(action.microbatch, 2)
            assert cut.tolist() == [[100.0 * step + number + each / 8 for each in (2 * half, 2 * half + 1)]]
        loader.forget_step()
    assert sorted((step, microbatch) for step, microbatch, _, _ in source.calls) == list(product(range(2), range(3)))


def test_an_error_of_a_load_ahead_is_raised_where_the_data_is_needed(board: ProgressBoard) -> None:
    source = Source(board)

    def fail() -> None:
        if source.calls[-1][:2] == (1, 1):
            raise ValueError("no such file")

    source.draw = fail
    with pytest.raises(ValueError, match="no such file"):
        two_steps(source)
    assert source.calls[-1][:2] == (1, 1)


def flaky(board: ProgressBoard, monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[Source, list[int]]:
    """Returns a source of which each second call fails, and what the worker tells while it waits."""
    source, told = Source(board, 0.0), list[int]()

    def fail() -> None:
        if len(source.calls) % 2:
            raise error

    def sleep(seconds: float) -> None:
        if seconds and (place := board.place_of(0)):
            told.append(place.loading)

    source.draw = fail
    monkeypatch.setattr(time, "sleep", sleep)
    return source, told


def test_an_error_that_passes_is_waited_for_as_the_data_are(
    board: ProgressBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cost the worker: who asks again loads data meanwhile, for which nobody is evicted."""
    source, told = flaky(board, monkeypatch, OSError(errno.EIO, "Input/output error"))
    records: list[DataRetryRecord] = []
    data = WatchedData(source, LoaderStatus(board, 0), DataRetries(RetryLimits(1, 1.0), records.append))
    values = [data.microbatch(3, 0, number, 1).inputs[0].item() for number in range(3)]
    values.append(data.microbatch_ahead(3, 0, 3, 1).inputs[0].item())
    assert values == [300.0, 301.0, 302.0, 303.0]
    assert told == [Loading.MAIN] * 3 + [Loading.AHEAD]
    first, *_ = records
    assert (first.call, first.number, first.wait_ms) == ("microbatch(3, 0, 0, 1)", 1, 100.0)
    assert (first.error, len(records)) == ("OSError: [Errno 5] Input/output error", 4)


@pytest.mark.parametrize(("error", "calls"), [(TimeoutError("late"), 2), (ValueError("wrong"), 1)])
def test_an_error_that_stays_is_raised(
    board: ProgressBoard, monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int
) -> None:
    source, _ = flaky(board, monkeypatch, error)
    data = WatchedData(source, LoaderStatus(board, 0), DataRetries(RetryLimits(calls - 1, 1.0)))
    source.draw = lambda: (_ for _ in ()).throw(error)
    with pytest.raises(type(error), match=str(error)) as raised:
        data.microbatch(0, 0, 0, 1)
    assert len(source.calls) == calls
    assert getattr(raised.value, "__notes__", []) == (["tried 2 times in 0.0 s"] if calls == 2 else [])


class Rows:
    """A data set of which the store is away at each 14th read, for two tries, if it `fails`."""

    def __init__(self, *, fails: bool):
        self._fails, self._reads = fails, count()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fails and next(self._reads) % 15 in (13, 14):
            raise OSError(errno.ESTALE, "Stale file handle")
        return torch.full((8,), float(number)), torch.full((1,), float(number % 3))


def test_a_run_whose_storage_fails_for_a_moment_has_the_same_bits() -> None:
    """Nobody is lost but who is killed, though a worker waits longer in an action than one may hang."""
    job = Job(model="mlp", stages=2, steps=4, microbatches=2, microbatch_size=2, hang_after="100ms")
    job = replace(job, data=f"{__name__}:Rows", loss="mse", validate_every=0)
    whole, failing = (replace(job, data_args={"fails": fails}) for fails in (False, True))
    endings = [run_in_threads(each, parse_kills(["2:0:B:1"], job)) for each in (whole, failing)]
    rows = [each.view.run_state.rows for each in endings]
    assert [each.outcome for each in endings] == ["finished"] * 2
    assert first_difference(*rows) is None
    assert len({row.step for row in rows[1]}) == job.steps
    lost = [out for epoch in endings[1].view.run_state.epochs for out in epoch.verdict]
    assert [out.worker for out in lost] == [0]
