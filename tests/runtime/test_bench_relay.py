"""The benchmarks of the control plane measure what they say, and leave nothing behind; how fast it is, they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.relay import Events, _marks_ns, _relay_s, bench_etcd_start, bench_forming, bench_relay
from engine.core.errors import WorkerFailedError
from tests.core.made_records import made


def test_the_last_one_to_learn_counts_and_everyone_must() -> None:
    formed: Events = [made("mark", phase="formed")] * 3
    seen = made("exit", expected=False, seen_ns=1_000_000)
    told = [made("mark", phase="told", at_ns=each) for each in (2_000_000, 4_000_000)]
    events: Events = [*formed, seen, *told, made("exit", expected=True, seen_ns=9)]
    assert _relay_s(events, _marks_ns(events, "told")) == 0.003
    with pytest.raises(WorkerFailedError, match="1 of 2 workers have said that they know of the exit"):
        _relay_s(events, [2_000_000])


def test_all_of_them_run_and_leave_their_folder_empty(tmp_path: Path) -> None:
    rows = bench_relay(2, tmp_path) + bench_forming(1, tmp_path) + bench_etcd_start(1, tmp_path)
    assert [row.n for row in rows] == [2, 2, 1, 1, 1]
    assert all(0 < row.ours < 5 for row in rows)
    assert list(tmp_path.iterdir()) == []
