"""Measures the coordinator's store through bamboo's client beside the bare client of the etcd3 package.

Rules: both talk to one private etcd, and take turns call by call; who goes first changes too. The bare client has a
timeout, as anyone would give it, and none of the rest. A quantile is the median of those of blocks of calls: a burst of
whatever else the machine does falls into one block, and there on one side more than on the other.
"""

from __future__ import annotations

import queue
import select
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

from engine.bench.figures.rows import Row
from engine.core.store.kv import Put, Txn, equal
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_calls import ATTEMPT_S, etcd3
from engine.runtime.store.etcd_kv import EtcdKV

GOAL = 1.2
_ROOT = "/bamboo/bench/"
_VALUE = b"v" * 64
_NUM_WARM_UPS = 50
_BLOCK = 500

# A call to measure, by the number of its turn; returns its duration in seconds.
Call = Callable[[int], float]


def bench_kv(num_pairs: int, folder: Path) -> list[Row]:
    """Returns p50 and p99 of put, get, transaction and watch delivery, of `num_pairs` each; leaves `folder` empty."""
    with tempfile.TemporaryDirectory(dir=folder) as own, EmbeddedEtcd(Path(own)) as server:
        settings = server.settings()
        (endpoint,) = settings.endpoints
        kv = EtcdKV(settings, _ROOT)
        bare = etcd3.client(endpoint.host, endpoint.port, timeout=ATTEMPT_S)
        rows = _calls(kv, bare, num_pairs) + _deliveries(kv, bare, num_pairs)
        kv.close()
        _end(bare)
    return rows


def _end(bare: Any) -> None:
    """Closes the bare client, whose thread for watches would else end with a traceback, or not at all."""

    def leave(*_arguments: Any, **_options: Any) -> NoReturn:
        raise SystemExit

    bare.watcher._watch_stub.Watch = leave
    bare.close()
    bare.watcher._callback_thread.join()


def _calls(kv: EtcdKV, bare: Any, num_pairs: int) -> list[Row]:
    theirs = _ROOT + "theirs"
    steps = bare.transactions

    def our_swap(turn: int) -> None:
        old, new = (f"{number:064}".encode() for number in (turn, turn + 1))
        assert kv.transact(Txn((equal("swap", old),), (Put("swap", new),))).succeeded

    def their_swap(turn: int) -> None:
        old, new = (f"{number:064}" for number in (turn, turn + 1))
        assert bare.transaction([steps.value(theirs) == old], [steps.put(theirs, new)], [])[0]

    rows = _compare(
        "put", _timed(lambda _: kv.put("ours", _VALUE)), _timed(lambda _: bare.put(theirs, _VALUE)), num_pairs
    )
    rows += _compare("get", _timed(lambda _: kv.get("ours")), _timed(lambda _: bare.get(theirs)), num_pairs)
    for write, key in ((kv.put, "swap"), (bare.put, theirs)):
        write(key, f"{0:064}".encode())
    return rows + _compare("transaction", _timed(our_swap), _timed(their_swap), num_pairs)


def _deliveries(kv: EtcdKV, bare: Any, num_pairs: int) -> list[Row]:
    """Measures from just before a put, in another thread, to the event in the hands of the one who waits for it."""
    orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    started: queue.SimpleQueue[float] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def write() -> None:
        while (key := orders.get()) is not None:
            started.put(time.perf_counter())
            bare.put(key, _VALUE)

    watch = kv.watch("seen", kv.read_prefix("").revision + 1)
    watch_id = bare.add_watch_callback(_ROOT + "theirs", arrived.put)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()

    def ours(turn: int) -> float:
        orders.put(_ROOT + "seen")
        while not watch.take():
            select.select([watch], [], [])
        return time.perf_counter() - started.get()

    def peer(turn: int) -> float:
        orders.put(_ROOT + "theirs")
        arrived.get()
        return time.perf_counter() - started.get()

    rows = _compare("watch delivery", ours, peer, num_pairs)
    orders.put(None)
    writer.join()
    bare.cancel_watch(watch_id)
    return rows


def _timed(call: Callable[[int], object]) -> Call:
    def timed(turn: int) -> float:
        started_s = time.perf_counter()
        call(turn)
        return time.perf_counter() - started_s

    return timed


def _compare(case: str, ours: Call, peer: Call, num_pairs: int) -> list[Row]:
    taken: dict[Call, list[float]] = {ours: [], peer: []}
    for turn in range(_NUM_WARM_UPS + num_pairs):
        for call in (ours, peer) if turn % 2 else (peer, ours):
            taken[call].append(call(turn))
    return _rows(case, taken[ours][_NUM_WARM_UPS:], taken[peer][_NUM_WARM_UPS:])


def _quantile(taken_s: Sequence[float], percent: int) -> float:
    blocks = [taken_s[first : first + _BLOCK] for first in range(0, len(taken_s), _BLOCK)]
    return median(quantiles(block, n=100, method="inclusive")[percent - 1] for block in blocks)


def _rows(case: str, ours_s: Sequence[float], peer_s: Sequence[float]) -> list[Row]:
    rows = []
    for percent in (50, 99):
        ours_ms, peer_ms = (_quantile(side, percent) * 1e3 for side in (ours_s, peer_s))
        ratio = ours_ms / peer_ms
        rows.append(Row(case, f"p{percent} ms", ours_ms, peer_ms, ratio, GOAL, ratio <= GOAL, len(ours_s)))
    return rows
