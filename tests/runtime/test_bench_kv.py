"""The benchmark of the store measures what it says, and leaves nothing but a log."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.bench.kv import GOAL, bench_kv


def test_rows_of_a_short_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda end: ends.append(end.exc_type))
    rows = bench_kv(10, tmp_path)
    assert ends == [SystemExit]  # which Python does not print
    calls = ("put", "get", "transaction", "watch delivery")
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
    assert not [thread.name for thread in threading.enumerate() if "watch" in thread.name and thread.is_alive()]
