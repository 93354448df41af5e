"""The links benchmark: the time of one hop between two workers that wait, beside Gloo's and torch's, quiet and busy.

Rules: each hop begins with both ends asleep, as in a pipeline, and ends when the receiver has the tensor. The four
ways take turns in the same two processes. A bare socket, whose reader only waits and reads, is the floor: it shows what
our own code takes, and has no goal.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from engine.bench.figures import (
    GLOO,
    LINKS,
    SOCKET,
    TORCH,
    BenchRow,
    Cases,
    Hops,
    HopTimes,
    at_most,
    limit_row,
    ratio_row,
)
from engine.bench.session import bench_workers, served
from engine.core.messages import LinkMessage
from engine.core.ownership import Grid, fresh

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "512 KiB": 512 << 10, "4 MiB": 4 << 20}
_PEERS = ((GLOO, 0.5), (TORCH, 1.0), (SOCKET, None))  # with the goals of our time beside theirs
_OF_MEDIAN = 2.0  # p90
_HOP_S = {"quiet, 64 KiB": 45e-6}
_Times = dict[tuple[str, int], tuple[int, ...]]


def link_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench links`."""
    hops = 20 if quick else 200
    return {"quiet": partial(_bench, "quiet", hops), "busy": partial(_bench, "busy", hops)}


def _bench(case: str, hops: int, folder: Path) -> list[BenchRow]:
    with _busy(case == "busy"):
        times = _measured(hops, folder)
    rows = []
    for name, size in SIZES.items():
        ours = [time_ns / 1e9 for time_ns in times[LINKS, size]]
        at = f"{case}, {name}"
        if at in _HOP_S:
            rows.append(limit_row(at, "hop s, median", ours, 0.5, _HOP_S[at]))
        for peer, goal in _PEERS:
            theirs = [time_ns / 1e9 for time_ns in times[peer, size]]
            for figure, part in (("median", 0.5), ("p90", 0.9)):
                figures = at_most(ours, part), at_most(theirs, part)
                rows.append(ratio_row(at, f"hop s, {figure}, beside {peer}", *figures, hops, goal))
        figures = at_most(ours, 0.9), at_most(ours, 0.5)
        rows.append(ratio_row(at, "hop s, p90, beside its median", *figures, hops, _OF_MEDIAN))
    return rows


@contextlib.contextmanager
def _busy(is_busy: bool) -> Iterator[None]:
    """Runs an endless loop in another process during the block, at normal priority."""
    if not is_busy:
        yield
        return
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def _measured(hops: int, folder: Path) -> _Times:
    """Returns the nanoseconds of each hop by way and size."""
    times: _Times = {}
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        bench_workers(fresh(Grid(2, 1)), Path(own), "bench-links") as members,
    ):
        for (worker, member), end in zip(members.items(), socket.socketpair(), strict=True):
            with end:
                member.link.send(LinkMessage(1 - worker, 0), (end.fileno(),))
            member.link.send(Hops(worker, hops, tuple(SIZES.values())))
        messages = served(members)
        while len(times) < (1 + len(_PEERS)) * len(SIZES):
            _, message = next(messages)
            if isinstance(message, HopTimes):
                times[message.way, message.size] = message.took_ns
    return times
