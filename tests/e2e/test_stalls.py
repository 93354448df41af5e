"""How long training stood, held against an observer in another process with another clock.

One failure of each kind from outside; the soak has those that are injected too. A busy machine delays stamps, so only
`make soak-stalls`, which makes hundreds of failures, holds the report to 5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd
import pytest

from engine.core.checks.recoveries import recoveries
from engine.files.events_file import read_events
from engine.report.tables import stalls_of
from tests.e2e.launcher import ROOT
from tests.e2e.stall_observer import SILENCE_S, Case, Runs
from tests.e2e.stall_soak import STAGES, kind_of, plan_of, steps_of, told_by

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BUSY_MS = 100.0
STILL_MS = SILENCE_S * 500  # the last sign of life may be a heartbeat, or the step before, old


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with Runs(tmp_path_factory.mktemp("stalls")) as runs:
            yield runs


def check(cases: Sequence[Case]) -> None:
    for case in cases:
        assert abs(case.difference_ms) <= BUSY_MS, told_by(case)


def test_failures_from_outside(runs: Runs) -> None:
    """A worker that SIGSTOP froze for seconds, or whose layer looped, was "recovered in 0.03 s", with detect 0."""
    faults, strikes = plan_of(1)
    cases = runs.cases({"stages": STAGES, "steps": steps_of(1)}, faults, strikes)
    check(cases)
    found = {kind_of(case, faults, strikes): case.row for case in cases}
    assert found.keys() == {f"{kind} from outside" for kind in ("kill", "stop", "hang", "notice", "raise")}
    said = {each.step: str(each) for each in recoveries(read_events(runs.events))}
    for kind in ("stop", "hang"):
        row = found[f"{kind} from outside"]
        assert min(row["detect_ms"], row["stall_ms"], row["pause_ms"]) > STILL_MS
        (stall,) = stalls_of(pd.DataFrame([row]))
        assert f"; training stalled for {stall}, 0 steps lost" in said[row["step"]]
    assert math.isnan(found["kill from outside"]["detect_ms"])  # not 0: the moment of death is not known


@pytest.mark.soak
def test_injected_failures(runs: Runs) -> None:
    faults, strikes = plan_of(0)
    cases = runs.cases({"stages": STAGES, "steps": steps_of(0)}, faults, strikes)
    check(cases)
    assert {kind_of(case, faults, strikes) for case in cases} == {f"{fault.do} injected" for fault in faults}
    detect_ms = {kind_of(case, faults, strikes): case.row["detect_ms"] for case in cases}
    assert not any(math.isnan(detect_ms[f"{kind} injected"]) for kind in ("kill", "stop", "hang", "raise"))
