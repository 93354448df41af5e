"""Handlers: a pair or an op runs through its registered handler, each action once, else through the executor alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.core.action import Op
from engine.core.errors import InvariantError
from engine.runtime.worker import executor
from engine.runtime.worker.executor import Call, QueuedAction, register, run_in_order
from tests.core.drawing import program_of


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_handlers", {})


def ran(drawing: str) -> str:
    """Returns what was run, in order; a check is a dot."""
    done: list[str] = []

    def run(action: object, text: str, method: object) -> None:
        done.append(text)

    entries: list[QueuedAction] = [
        (action, str(action), lambda action, step: None) for action in program_of(drawing)[0]
    ]
    run_in_order(entries, lambda: done.append("."), run)
    return " ".join(done)


def test_without_a_handler_they_run_one_after_the_other() -> None:
    assert ran("0: 0F1 3B0 0SEND_F1 0F2 0F3 3B2") == ". 0F1 . 3B0 . 0SEND_F1 . 0F2 . 0F3 . 3B2"


def test_a_handler_runs_its_kind_of_pair() -> None:
    def backwards(first: Call, second: Call) -> None:
        second()
        first()

    register("OVERLAP_F_B", backwards)
    assert ran("0: 0F1 3B0 0SEND_F1 0F2 0F3 3B2 0LOG 3B3 0F4") == (
        ". 3B0 0F1 . 0SEND_F1 . 0F2 . 3B2 0F3 . 0LOG . 3B3 . 0F4"
    )


def test_what_an_action_raises_comes_out_and_the_rest_stays() -> None:
    def broken(first: Call, second: Call) -> None:
        first()
        raise RuntimeError("no stream left")

    register("OVERLAP_F_B", broken)
    with pytest.raises(RuntimeError, match="no stream left"):
        ran("0: 0F1 3B0")


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_handler_that_does_not_run_each_once_is_an_error(num_calls: int) -> None:
    def wrong(first: Call, second: Call) -> None:
        for _ in range(num_calls):
            first()

    register("OVERLAP_F_B", wrong)
    with pytest.raises(InvariantError, match="not each of"):
        ran("0: 0F1 3B0")


def test_a_handler_runs_its_op_and_knows_the_action() -> None:
    seen: list[str] = []

    def noted(call: Call) -> None:
        seen.append(f"before {call.action}")
        call()
        seen.append("after")

    register(Op.SEND_F, noted)
    assert ran("0: 0F1 0SEND_F1 3B0") == ". 0F1 . 0SEND_F1 . 3B0"
    assert seen == ["before 0SEND_F1", "after"]


def test_inside_a_pair_each_action_goes_through_the_handler_of_its_op() -> None:
    forwards: list[str] = []

    def noted(call: Call) -> None:
        forwards.append(str(call.action))
        call()

    def backward_first(forward: Call, backward: Call) -> None:
        backward()
        forward()

    register("OVERLAP_F_B", backward_first)
    register(Op.F, noted)
    assert ran("0: 0F1 3B0 0F2") == ". 3B0 0F1 . 0F2"
    assert forwards == ["0F1", "0F2"]


@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_handler_that_does_not_run_its_action_once_is_an_error(num_calls: int) -> None:
    def wrong(call: Call) -> None:
        for _ in range(num_calls):
            call()

    register(Op.F, wrong)
    with pytest.raises(InvariantError, match="not each of"):
        ran("0: 0F1")


def test_the_example_of_the_documents_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "optimizers-and-schedules.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    found: dict[str, list[str]] = {}
    exec(compile(example, page.name, "exec"), found)  # noqa: S102 - a page of ours
    assert ran("0: 0F1 3B0 0SEND_F1 0F2") == ". 3B0 0F1 . 0SEND_F1 . 0F2"
    assert found["forwards"] == ["0F1", "0F2"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an op .* one of OVERLAP_F_B, OVERLAP_B_F, found 'OVERLAP'"):
        register("OVERLAP", lambda first, second: None)  # type: ignore[arg-type]
