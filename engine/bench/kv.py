"""Measures the coordinator's store through bamboo's client beside the bare client of the etcd3 package.

Rules: both clients call the same private etcd and take turns call by call; the side that begins changes each time. The
bare client has a timeout and no other safeguard. A quantile is the median over the quantiles of blocks of calls,
because a burst of other work on the machine disturbs one block, and in it one side more than the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from engine.bench.figures import BenchRow, Cases, in_turns, ratio_row
from engine.core.deadlines import ATTEMPT
from engine.core.errors import ensure
from engine.core.kv import Put, Txn, equal
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import EndpointClient, EtcdKV

GOAL = 1.2
_ROOT = "/bamboo/bench/"
_VALUE = b"v" * 64
_NUM_WARM_UPS = 50
_BLOCK = 500

TimedCall = Callable[[], float]  # returns the seconds that the call took


def kv_cases(quick: bool) -> Cases:
    """Returns the only case of `bamboo bench kv`."""
    return {"kv": partial(bench_kv, 50 if quick else 10_000)}


def bench_kv(num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns p50 and p99 of put, get and transaction, each from `num_pairs` calls per side; leaves `folder` empty."""
    with tempfile.TemporaryDirectory(dir=folder) as own, EmbeddedEtcd(Path(own)) as server:
        settings = server.settings()
        (endpoint,) = settings.endpoints
        kv = EtcdKV(settings, _ROOT)
        bare = EndpointClient(endpoint, timeout=ATTEMPT.usual_ns / 1e9)
        rows = _calls(kv, bare, num_pairs)
        kv.close()
        bare.close()
    return rows


def _calls(kv: EtcdKV, bare: Any, num_pairs: int) -> list[BenchRow]:
    theirs = _ROOT + "theirs"
    steps = bare.transactions

    ours_turn, their_turn = count(), count()

    def our_swap() -> None:
        turn = next(ours_turn)
        outcome = kv.transact(Txn((equal("swap", _number(turn)),), (Put("swap", _number(turn + 1)),)))
        ensure(outcome.succeeded, "a swap of ours fits")

    def their_swap() -> None:
        turn = next(their_turn)
        changes = [steps.put(theirs, _number(turn + 1).decode())]
        succeeded, _ = bare.transaction([steps.value(theirs) == _number(turn).decode()], changes, [])
        ensure(succeeded, "a swap of the peer fits")

    rows = _compare("put", _timed(lambda: kv.put("ours", _VALUE)), _timed(lambda: bare.put(theirs, _VALUE)), num_pairs)
    rows += _compare("get", _timed(lambda: kv.get("ours")), _timed(lambda: bare.get(theirs)), num_pairs)
    for write, key in ((kv.put, "swap"), (bare.put, theirs)):
        write(key, _number(0))
    return rows + _compare("transaction", _timed(our_swap), _timed(their_swap), num_pairs)


def _number(turn: int) -> bytes:
    return f"{turn:064}".encode()


def _timed(call: Callable[[], object]) -> TimedCall:
    def timed() -> float:
        started_s = time.perf_counter()
        call()
        return time.perf_counter() - started_s

    return timed


def _compare(case: str, ours: TimedCall, peer: TimedCall, num_pairs: int) -> list[BenchRow]:
    results = in_turns({"ours": ours, "peer": peer}, _NUM_WARM_UPS + num_pairs)
    ours_s, peer_s = (each[_NUM_WARM_UPS:] for each in results.values())
    return [
        ratio_row(case, f"p{part} ms", _quantile(ours_s, part) * 1e3, _quantile(peer_s, part) * 1e3, num_pairs, GOAL)
        for part in (50, 99)
    ]


def _quantile(taken_s: Sequence[float], percent: int) -> float:
    blocks = [taken_s[first : first + _BLOCK] for first in range(0, len(taken_s), _BLOCK)]
    return median(quantiles(block, n=100, method="inclusive")[percent - 1] for block in blocks)
