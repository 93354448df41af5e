"""The profile of a run for the search of a schedule."""

from __future__ import annotations

import pandas as pd
import pytest

from engine.core.errors import UserError
from engine.core.program.schedule_search import Profile
from engine.report.profile import profile_of


def table(*rows: tuple[int, str, int, int, int, float, float]) -> pd.DataFrame:
    """Returns actions of (step, op, stage, worker, microbatch, start ms, end ms)."""
    columns = ["step", "op", "stage", "worker", "microbatch", "start_ns", "end_ns"]
    frame = pd.DataFrame(rows, columns=columns).assign(pipeline=0, redundant=False, replayed=False)
    return frame.assign(start_ns=frame.start_ns * 1e6, end_ns=frame.end_ns * 1e6)


STEPS = table(
    *((0, op, stage, stage, 0, 0, 999) for op in "FB" for stage in (0, 1)),  # the first step warms up
    (1, "F", 0, 0, 0, 0, 2),
    (1, "SEND_F", 0, 0, 0, 2, 2.1),
    (1, "RECV_F", 1, 1, 0, 0, 2.6),
    (1, "F", 1, 1, 0, 3, 6),
    (1, "I", 1, 1, 0, 6, 7),
    (1, "SEND_B", 1, 1, 0, 7, 7.1),
    (1, "RECV_B", 0, 0, 0, 7.5, 9),  # not waited for: it says nothing
    (1, "W", 1, 1, 0, 7, 9),
    (1, "B", 0, 0, 0, 9, 14),
)


def test_costs_are_medians_and_a_transfer_lasts_until_it_is_there() -> None:
    found = profile_of(STEPS, 2)
    assert found.transfer[0] == pytest.approx(0.5)
    assert found == Profile((2, 3), (2.5, 1), (2.5, 2), found.transfer)
    assert profile_of(STEPS, 2, 0.25) == Profile((2, 3), (2.5, 1), (2.5, 2), found.transfer, 0.25)
    slow = STEPS.assign(end_ns=STEPS.end_ns + 5e6, replayed=True)
    assert profile_of(pd.concat([STEPS, slow]), 2) == found


def test_a_run_that_has_not_done_all_is_refused() -> None:
    with pytest.raises(UserError, match="none of 2"):
        profile_of(STEPS, 3)
