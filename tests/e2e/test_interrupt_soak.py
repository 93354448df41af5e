"""The soak of interrupts: a few of its moments, on a terminal and without one, by their codes and their words.

A busy machine delays an answer and an end, so the seconds are held by `make soak-interrupts` alone. The limit here is
far below those of before: ten seconds for a step, five for a fork server, three for a worker.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.interrupt_soak import MOMENTS, interrupt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_BUSY_END_S = 9.0


@pytest.mark.parametrize(
    ("name", "number", "on_terminal"),
    [
        ("run, the fork server imports", signal.SIGHUP, False),
        ("run, a recovery", signal.SIGINT, True),
        pytest.param("run, a layer that loops, two signals", signal.SIGINT, True, marks=pytest.mark.soak),
        pytest.param("inject, a step of the twin", signal.SIGTERM, False, marks=pytest.mark.soak),
        pytest.param("matrix, a step of a cell", signal.SIGINT, True, marks=pytest.mark.soak),  # test_matrix.py has one
    ],
)
def test_a_signal_is_answered_and_ends_the_command(
    name: str, number: signal.Signals, on_terminal: bool, tmp_path: Path
) -> None:
    """The end of the twin was exit code 6 of `inject`, and the failure of its run, as `make soak-interrupts` sees."""
    outcome = interrupt(MOMENTS[name], tmp_path / "launch", number, on_terminal=on_terminal)
    assert outcome.problems == ()
    assert outcome.end_s < _BUSY_END_S
