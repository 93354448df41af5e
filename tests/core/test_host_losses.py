"""The checks of a run whose hosts were struck: each of them fails on a run that lacks what it checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core.checks.expectations import HostStrike, host_checks
from engine.core.exclusion import Cause, Exclusion
from engine.core.faults.fault import HostFault
from engine.core.history.process_records import RestartRecord, StartedRecord
from engine.core.history.run_history import history_of
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord, Record

S = 1_000_000_000
FAULT = HostFault("lost", "power-off", 3)
STRIKE = HostStrike(FAULT, "h1", 3, 100 * S, (1, 2), ended_ns=5_000_000)
CODES = {"h0": 0, "h1": -9, "h2": 0}
STARTED = [StartedRecord(of=of, child=10 + of, slots=(), node=f"h{of // 2}") for of in range(4)]


def epoch(number: int, *out: int, cause: Cause = Cause.NODE_LOST) -> EpochRecord:
    verdict = tuple(Exclusion(each, "is out", cause) for each in out)
    more = {"members": (), "reason": "", "planned": False, "owners": (), "shadows": ()}
    return EpochRecord(epoch=number, verdict=verdict, **more)  # type: ignore[arg-type]


def results(
    records: Sequence[Record], strikes: Sequence[HostStrike] = (STRIKE,), codes: dict[str, int] | None = None
) -> dict[str, str]:
    """Returns the result of each check but those that passed."""
    found = host_checks([FAULT], strikes, CODES if codes is None else codes, history_of(records), 5 * S)
    return {each.name: each.result for each in found if each.result != "passed"}


GOOD = [*STARTED, epoch(1), epoch(2, 1, 2)]


def test_a_run_that_loses_a_host_in_one_epoch_passes() -> None:
    assert results(GOOD) == {}
    assert results([*GOOD, epoch(3)]) == {}  # a take-over puts nobody out
    assert results([*GOOD, epoch(3, 0, cause=Cause.FINISHED)]) == {}


@pytest.mark.parametrize(
    ("records", "check"),
    [
        ([*STARTED, epoch(1)], "epochs"),
        ([*STARTED, epoch(1, 1), epoch(2, 2)], "epochs"),
        ([*GOOD, epoch(3, 3)], "epochs"),
        ([*GOOD, epoch(3, 1, 2)], "epochs"),
        ([*GOOD, StartedRecord(of=3, child=99, slots=(), node="h1")], "processes"),
        ([*GOOD, StartedRecord(of=3, child=13, slots=(), node="h2")], "processes"),
        ([*GOOD, RestartRecord(number=1, reason="x")], "processes"),
    ],
)
def test_a_loss_that_is_told_otherwise_fails(records: Sequence[Record], check: str) -> None:
    assert results(records) == {check: "failed"}


def test_agents_end_as_they_have_to() -> None:
    assert results(GOOD, codes=CODES | {"h2": 69}) == {"agents": "failed"}
    assert results(GOOD, codes=CODES | {"h1": 85}) == {"agents": "failed"}
    cut = replace(STRIKE, fault=replace(FAULT, do="cut-host"), ended_ns=4 * S, spare_ns=S // 2)
    assert results(GOOD, [cut], CODES | {"h1": 85}) == {}
    led = replace(cut, ended_ns=6 * S)  # its member of etcd led, and answered one more renewal
    assert results(GOOD, [led], CODES | {"h1": 85}) == {}
    assert results(GOOD, [cut]) == {"agents": "failed"}
    for late in (replace(cut, spare_ns=-1), replace(cut, ended_ns=8 * S), replace(cut, spare_ns=None)):
        assert results(GOOD, [late], CODES | {"h1": 85}) == {"lease": "failed"}


def test_a_fault_that_proved_nothing_makes_the_case_invalid() -> None:
    assert results([*STARTED, epoch(1)], [], CODES | {"h1": 0}) == {"faults": "invalid"}
    assert results(GOOD, [replace(STRIKE, ended_ns=None)]) == {"faults": "invalid"}


def test_who_is_lost_and_what_is_recorded() -> None:
    worker = HostStrike(HostFault("w", "kill-worker", 3, worker=2), "h1", 3, 7, (1, 2), 5)
    leader = replace(STRIKE, fault=replace(FAULT, do="kill-etcd-leader"))
    assert (STRIKE.lost, worker.lost, leader.lost) == ((1, 2), (2,), ())
    first, second, last = STRIKE.records()
    assert isinstance(first, FaultRecord) and isinstance(second, FaultRecord) and isinstance(last, ConfirmedRecord)
    assert (first.of, second.of, first.at_ns, last.at_ns) == (1, 2, 100 * S, 100 * S + 5_000_000)
    assert results([*STARTED, epoch(1), epoch(2, 2)], [replace(worker, fault=replace(worker.fault, id="lost"))]) == {
        "agents": "failed"  # h1 has ended
    }
