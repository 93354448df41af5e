"""The times of a loss on several hosts, from records on one clock."""

from __future__ import annotations

import pytest

from engine.bench.figures import clock_widths_ms, commits_ns, gap_s, known_s, usual_ns
from engine.core.errors import InvariantError
from engine.core.history.process_records import ClockRecord, KnownRecord
from engine.core.history.run_records import CommitRecord, Record

S = 1_000_000_000


def known(worker: int, of: int, at_s: float) -> Record:
    return KnownRecord(worker=worker, of=of, at_ns=round(at_s * S))


def commit(step: int, at_s: float) -> Record:
    return CommitRecord(step=step, at_ns=round(at_s * S), loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False)


def test_a_loss_is_known_when_the_last_worker_of_the_last_host_was_told_of_it_first() -> None:
    hosts = {
        "a": [known(0, 2, 1.0), known(0, 4, 7.01), known(1, 4, 7.02), known(1, 5, 7.5)],
        "b": [known(2, 5, 7.04), known(2, 4, 7.3)],
        "c": [],
    }
    assert known_s(hosts, [4, 5], 7 * S, {"c"}) == pytest.approx(0.04)
    assert known_s(hosts, [4], 7 * S, {"c"}) == pytest.approx(0.3)
    with pytest.raises(InvariantError, match="host c"):
        known_s(hosts, [4], 7 * S)
    with pytest.raises(InvariantError, match="host b"):
        known_s(hosts, [2], 0, {"c"})


def test_a_gap_is_the_time_beyond_a_usual_step() -> None:
    hosts = {
        "a": [commit(0, 1.0), commit(1, 1.1), commit(2, 1.2), commit(3, 1.3)],
        "b": [commit(3, 1.4), commit(4, 2.0), commit(5, 2.1)],
    }
    found = commits_ns(hosts)
    assert [each / S for each in found] == [1.0, 1.1, 1.2, 1.3, 2.0, 2.1]
    assert usual_ns(found) == pytest.approx(0.1 * S)
    assert gap_s(found, round(1.35 * S)) == pytest.approx(0.6)
    with pytest.raises(InvariantError, match="after it"):
        gap_s(found, 3 * S)


def test_a_bound_that_lacks_the_offset_is_counted() -> None:
    def bound(of: str, least_ns: int, most_ns: int) -> Record:
        return ClockRecord(of=of, least_ns=least_ns, most_ns=most_ns)

    hosts = {
        "a": [],
        "b": [bound("a", -7_000_000, -5_000_000), bound("a", -6_000_000, -6_000_000), bound("a", 5_000_000, 7_000_000)],
        "c": [bound("b", 4_999_999, 5_000_001), bound("b", 5_000_001, 6_000_001)],
    }
    widths, outside = clock_widths_ms(hosts, {"a": 0, "b": 6_000_000, "c": 1_000_000})
    assert widths == pytest.approx([2.0, 0.0, 2.0, 0.000002, 1.0])
    assert outside == 2
