"""The driver of the worker machine: it carries out every output, and drops those behind one that fails."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import TransferFailedError
from engine.core.protocol import worker_inputs as inputs
from engine.core.protocol import worker_state as state
from engine.runtime.process.control import Fenced, Stopped
from engine.runtime.worker.training import Training

END = state.End


def bare() -> Any:
    return object.__new__(Training)


def test_every_output_but_the_end_has_a_method() -> None:
    classes = [each for each in vars(state).values() if isinstance(each, type)]
    kinds = {each for each in classes if issubclass(each, state.Output)} - {state.Output}
    assert set(bare()._table()) == kinds - {END}


@pytest.mark.parametrize(
    ("raised", "answer"),
    [
        (None, inputs.ProgramEnded()),
        (Fenced(), None),
        (Stopped(), None),
        (TransferFailedError("it broke", 2), inputs.TransferFailed("it broke", 2)),
    ],
)
def test_what_interrupts_or_fails_drops_the_outputs_behind_it(
    raised: Exception | None, answer: inputs.Input | None
) -> None:
    training = bare()
    done: list[state.Output] = []

    def drop(output: state.Drop) -> None:
        done.append(output)
        if raised is not None:
            raise raised

    def run(output: state.Run) -> inputs.Input:
        done.append(output)
        return inputs.ProgramEnded()

    training._methods = {state.Drop: drop, state.Run: run}
    found = (state.Drop(()), state.Run("usual"))
    assert training._carry_out(found) == answer
    assert done == list(found[:1] if raised else found)
