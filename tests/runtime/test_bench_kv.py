"""The benchmark of the store measures what it says, and leaves nothing but a log."""

from __future__ import annotations

from pathlib import Path

from engine.bench.kv import GOAL, bench_kv


def test_rows_of_a_short_measurement(tmp_path: Path) -> None:
    rows = bench_kv(10, tmp_path)
    calls = ("put", "get", "transaction")
    assert [(row.case, row.metric) for row in rows] == [
        (case, f"p{percent} ms") for case in calls for percent in (50, 99)
    ]
    for row in rows:
        assert 0.02 < row.ours < 1000 and 0.02 < row.peer < 1000
        assert (row.ratio, row.goal, row.n) == (row.ours / row.peer, GOAL, 10)
        assert row.met == (row.ratio <= GOAL)
    for low, high in zip(rows[::2], rows[1::2], strict=True):
        assert low.ours <= high.ours and low.peer <= high.peer
    assert list(tmp_path.iterdir()) == []
