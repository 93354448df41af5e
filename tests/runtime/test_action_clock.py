"""The times of actions on a GPU: its own, told late and in order, without a wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import Action, parse_action
from engine.core.job.job import Job
from engine.runtime.agent import session
from engine.runtime.device import action_clock
from engine.runtime.device.action_clock import ActionClock, GpuClock, placed
from engine.runtime.worker.executor import Executor
from tests.doubles.fake_gpu import PLACE, FakeGpu, fake_gpu
from tests.runtime.thread_runs import run_in_threads

_MS = 1_000_000
Told = list[tuple[str, int, int]]


class MadeTime:
    """The time of host and device, which passes as a test says."""

    def __init__(self) -> None:
        self.now_ns = 5 * _MS

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, ns: int) -> None:
        """Lets time pass."""
        self.now_ns += ns


@pytest.fixture
def at() -> MadeTime:
    return MadeTime()


@pytest.fixture
def gpu(at: MadeTime, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setattr(action_clock, "monotonic_ns", at)
    with fake_gpu() as gpu:
        gpu.streams.now_ns, gpu.streams.sleep_ns = at, at.passes
        yield gpu


def compute(action: Action, step: int) -> None:
    torch.ones(3, device=PLACE).add_(1)


def run(clock: ActionClock, at: MadeTime, text: str, *, computes: bool = True) -> tuple[int, int]:
    """Runs an action as the executor does, in a millisecond; returns its begin and end on the host."""
    action, start_ns = parse_action(text), at()
    if computes:
        clock.timed(compute)(action, 0)
    at.passes(_MS)
    clock.ended(action, text, 0, 1, start_ns, at())
    return start_ns, at()


def told_by(clock_of: type[ActionClock]) -> tuple[ActionClock, Told]:
    told: Told = []
    return clock_of(lambda action, text, step, epoch, *times: told.append((text, *times))), told


def test_actions_have_the_times_of_the_gpu_and_are_told_late_in_their_order(gpu: FakeGpu, at: MadeTime) -> None:
    """An action has two operations of 10 ms; the second one is launched long before the first is over."""
    gpu.streams.op_ns = 10 * _MS
    clock, told = told_by(GpuClock)
    run(clock, at, "0F0")
    sent = run(clock, at, "0SEND_F0", computes=False)
    run(clock, at, "0F1")
    assert not told
    at.passes(100 * _MS)
    clock.look()
    assert told == [("0F0", 5 * _MS, 25 * _MS), ("0SEND_F0", *sent), ("0F1", 25 * _MS, 45 * _MS)]
    assert not gpu.streams.waits
    run(clock, at, "0B0")
    at.passes(100 * _MS)
    clock.look()
    assert told[-1] == ("0B0", 108 * _MS, 128 * _MS)  # behind its launch, after a wait


def test_the_end_waits_for_the_last_actions_only(gpu: FakeGpu, at: MadeTime) -> None:
    gpu.streams.op_ns = 10 * _MS
    clock, told = told_by(GpuClock)
    run(clock, at, "0F0")
    clock.finish()
    assert told == [("0F0", 5 * _MS, 25 * _MS)]
    assert [what for what, _ in gpu.streams.waits] == ["event"]


def test_an_action_that_raises_leaves_no_time_to_the_next_one(gpu: FakeGpu, at: MadeTime) -> None:
    def raising(action: Action, step: int) -> None:
        raise ValueError("a layer")

    clock, told = told_by(GpuClock)
    with pytest.raises(ValueError, match="a layer"):
        clock.timed(raising)(parse_action("0F0"), 0)
    run(clock, at, "0SEND_F0", computes=False)
    assert [text for text, *_ in told] == ["0SEND_F0"]


def test_on_the_host_an_action_is_told_at_once_by_its_own_method(at: MadeTime) -> None:
    clock, told = told_by(ActionClock)
    assert clock.timed(compute) is compute
    times = run(clock, at, "0F0", computes=False)
    assert told == [("0F0", *times)]


_NS = st.integers(0, 10**12)


@given(_NS, _NS, _NS, _NS, _NS)
def test_an_action_lies_behind_the_one_before_and_is_as_long_as_measured(
    launch_ns: int, last_ns: int, gap_ns: int, length_ns: int, wait_ns: int
) -> None:
    seen_ns = max(launch_ns, last_ns) + length_ns + wait_ns  # none is seen before it can be over
    begin_ns, end_ns = placed(launch_ns, last_ns, gap_ns, length_ns, seen_ns)
    assert end_ns - begin_ns == length_ns
    assert max(launch_ns, last_ns) <= begin_ns and end_ns <= seen_ns


def test_votes_and_records_have_the_times_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's GPU takes 2 ms for an operation; the host only asks for it."""
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    votes: list[tuple[int, int]] = []
    late: list[bool] = []  # whether the host was told of an action when it was over
    vote, tell = Executor._vote, Executor._tell

    def watched(self: Executor, action: Action, step: int) -> None:
        self._clock.look()
        votes.append(self._times.of((action.pipeline, action.stage)))
        vote(self, action, step)

    def told(self: Executor, action: Action, text: str, step: int, epoch: int, start_ns: int, end_ns: int) -> None:
        late.append(time.monotonic_ns() >= end_ns)
        tell(self, action, text, step, epoch, start_ns, end_ns)

    monkeypatch.setattr(Executor, "_vote", watched)
    monkeypatch.setattr(Executor, "_tell", told)
    with fake_gpu() as gpu:
        gpu.streams.op_ns = 2 * _MS
        job: dict[str, Any] = {"model": "mlp", "stages": 2, "microbatches": 2, "steps": 2, "redundancy": "none"}
        job |= {"check_pure": False, "audit": 0, "validate_every": 0}
        assert run_in_threads(Job(**job, device="cuda", share_gpu=True)).outcome == "finished"
    assert len(votes) == 4 and all(min(each) > 10 * _MS for each in votes), votes
    assert all(late)
