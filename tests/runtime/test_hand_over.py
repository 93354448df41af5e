"""A worker that hands over inside a step, in whole runs of threads: real accumulators and buffers, the same bits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.core.action import FORWARD_OPS, Action, Op
from engine.core.checks.trajectory import trajectory_hash
from engine.core.program.remaining_tasks import work_of
from engine.core.protocol import coordinator
from engine.core.protocol.plan_orders import with_ships
from engine.core.protocol.rebalancing import LeaveStrategy
from engine.core.protocol.worker_inputs import NoticeReceived
from engine.runtime.stage import residuals
from engine.runtime.stage.gradient_log import GradientStreams
from engine.runtime.stage.residuals import CannotTravelError
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.training import Training, WorkerProtocol
from tests.runtime.small_jobs import NORMED, STATEFUL, TIED_GPT, small_job
from tests.runtime.thread_runs import run_in_threads

JOBS: dict[str, dict[str, Any]] = {
    "normed": NORMED,
    "normed, two pipelines": NORMED | {"pipelines": 2, "redundancy": "reroute"},
    "tied gpt, recomputed": TIED_GPT | {"activation_checkpoint": 2},
    "stateful, streamed": STATEFUL | {"log_every": 2},
}
_ANSWER_S = 0.4
_PLACES = ("1B0", "1SEND_B2", "1B3")
_UNDISTURBED: dict[str, str] = {}


def trajectory(values: dict[str, Any]) -> str:
    ending = run_in_threads(small_job(**{"steps": 3, "check_pure": False, **values}))
    assert (ending.outcome, ending.error) == ("finished", None)
    return trajectory_hash(ending.view.run_state.rows)


def undisturbed(name: str) -> str:
    if name not in _UNDISTURBED:
        _UNDISTURBED[name] = trajectory(JOBS[name])
    return _UNDISTURBED[name]


class Hands:
    """Gives notice for worker 1 behind an action of step 1, and counts the accumulators and the backwards of it."""

    def __init__(self, place: str, patch: pytest.MonkeyPatch):
        self.place = place
        self.handed = 0
        self.backwards: list[tuple[int, str]] = []
        self.forwards: list[tuple[int, Action]] = []
        self.shipped = 0
        self.protocol: WorkerProtocol | None = None
        run, streamed, made = Executor._run, GradientStreams.run, Training.__init__

        def note(training: Training, context: Any, *words: Any, **named: Any) -> None:
            made(training, context, *words, **named)
            if context.worker == 1:
                self.protocol = training._protocol

        def count(executor: Executor, action: Action, text: str, method: Any) -> None:
            run(executor, action, text, method)
            self.backwards += [(executor.step, text)] if action.op in ("B", "I") else []
            self.forwards += [(executor.step, work_of(action))] if action.op in FORWARD_OPS else []
            self.shipped += action.op is Op.SHIP and executor.context.worker != 1
            if (executor.context.worker, executor.step, text) == (1, 1, self.place) and self.protocol is not None:
                protocol, self.protocol = self.protocol, None
                protocol.feed_aside(NoticeReceived())
                time.sleep(_ANSWER_S)  # else a busy machine answers when all of the step is logged

        def hand(streams: GradientStreams, action: Action, step: int) -> None:
            self.handed += action.op == "HAND"
            streamed(streams, action, step)

        patch.setattr(Training, "__init__", note)
        patch.setattr(Executor, "_run", count)
        patch.setattr(GradientStreams, "run", hand)
        patch.setattr(coordinator, "way_out", lambda *known: LeaveStrategy.INSIDE)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if place == _PLACES[nth % 3] or nth == 0 else pytest.mark.soak)
        for nth, name in enumerate(JOBS)
        for place in _PLACES
    ],
)
def test_a_hand_over_inside_a_step_changes_no_bit(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(name)
    seen = Hands(place, monkeypatch)
    assert trajectory(JOBS[name]) == expected
    assert seen.protocol is None, "the notice was given"
    if place == "1B0" and name != "stateful, streamed":  # else it may be logged, or have come by a stream
        assert seen.handed
    assert len(seen.backwards) == len(set(seen.backwards)), "no backward is run again"


HOSTED = {"schedule": "gpipe", "offload": "host", "offload_time": 0.1}
SHARDED = {"pipelines": 2, "fsdp": 1, "stages": 2, "schedule": "gpipe"}
SHIPPED: dict[str, dict[str, Any]] = {
    "normed": NORMED,
    "normed, float16": NORMED | {"dtype": "float16"},
    "tied gpt": TIED_GPT | {"schedule": "gpipe"},
    "tied gpt, recomputed": TIED_GPT | {"activation_checkpoint": 2},
    "normed, in shards": NORMED | SHARDED,
    "tied gpt, in shards": TIED_GPT | SHARDED,
    "normed, on the host": NORMED | HOSTED,
    "tied gpt, recomputed, on the host": TIED_GPT | HOSTED | {"activation_checkpoint": 2},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_no_forward_is_run_again_if_residuals_are_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trajectory(SHIPPED[name] | {"offload": "none"})
    seen = Hands("1B0", monkeypatch)
    assert trajectory(SHIPPED[name] | {"residuals": "ship"}) == expected
    assert seen.protocol is None, "the notice was given"
    assert seen.handed and seen.shipped
    assert len(seen.forwards) == len(set(seen.forwards)), "no forward is run again"
    assert len(seen.backwards) == len(set(seen.backwards)), "no backward is run again"


def test_residuals_that_were_read_on_the_host_in_order_to_send_them_are_used_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a second worker dies before the first has left: it says again what it can send, or stays."""
    expected = trajectory(NORMED | {"schedule": "gpipe"})
    run, moments = Executor._run, list[int]()

    def tell(executor: Executor, action: Action, text: str, method: Any) -> None:
        run(executor, action, text, method)
        if (executor.context.worker, executor.step, text) == (1, 1, "1F3"):
            moments.append(len(executor.offloads.stashes()[1]))
            for _ in range(2):
                executor.inventory(10**11)
            moments.append(len(executor.offloads.stashes()[1]))

    monkeypatch.setattr(Executor, "_run", tell)
    assert trajectory(NORMED | HOSTED | {"residuals": "ship"}) == expected
    before, after = moments
    assert before > after == 0


def test_a_step_without_a_notice_does_nothing_for_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trajectory(NORMED)
    for name in ("residual_offers", "send_parcel", "take_parcel", "keep_parcel"):
        monkeypatch.setattr(f"engine.runtime.worker.executor.{name}", None)
    for name in ("load_graph_making", "parcel_of", "KernelFree", "_form_of"):
        monkeypatch.setattr(residuals, name, None)
    assert trajectory(NORMED | {"residuals": "auto"}) == expected


def test_a_forward_whose_graph_is_another_at_the_successor_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trajectory(NORMED)
    seen, redone = Hands("1B0", monkeypatch), list[str]()

    def fill(*given: Any) -> None:
        raise CannotTravelError("another graph")

    monkeypatch.setattr(residuals, "_fill", fill)
    monkeypatch.setattr(Executor, "_tell_of_redone", lambda self, action, why: redone.append(f"{action}: {why}"))
    assert trajectory(NORMED | {"residuals": "ship"}) == expected
    assert seen.shipped == len(redone) > 0, redone


def test_a_forward_that_looks_at_values_is_run_again_and_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, told = trajectory(STATEFUL), list[str]()
    seen = Hands("1B0", monkeypatch)

    def noted(*given: Any) -> Any:
        document, outputs = with_ships(*given)
        told.extend(str(each) for each in outputs)
        return document, outputs

    monkeypatch.setattr("engine.core.protocol.orders.with_ships", noted)
    assert trajectory(STATEFUL | {"residuals": "ship"}) == expected
    assert (seen.protocol, seen.shipped) == (None, 0)
    assert any("sends no residual; other forwards are run again: stage 1: its forward cannot run" in t for t in told)
