"""How pairs are run: through the handler that was registered, each action once, else one after the other."""

from __future__ import annotations

import pytest

from engine.core.errors import InvariantError
from engine.runtime.worker import overlap
from engine.runtime.worker.overlap import Call, Entry, register, run_in_order
from tests.core.drawing import program_of


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_handlers", {})


def ran(drawing: str) -> str:
    """Returns what was run, in order; a check is a dot."""
    done: list[str] = []

    def run(action: object, text: str, method: object) -> None:
        done.append(text)

    entries: list[Entry] = [(action, str(action), lambda action, step: None) for action in program_of(drawing)[0]]
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


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of OVERLAP_F_B, OVERLAP_B_F, found 'OVERLAP'"):
        register("OVERLAP", lambda first, second: None)  # type: ignore[arg-type]
