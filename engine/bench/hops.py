"""The links benchmark: the time of one hop between two workers that wait, beside Gloo's and torch's, quiet and busy.

Rules: each hop begins with both ends asleep, as in a pipeline, and ends when the receiver has the tensor. The three
ways take turns in the same two processes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from engine.bench.figures import GLOO, LINKS, TORCH, BenchRow, Cases, Hops, HopTimes, at_most, limit_row, ratio_row
from engine.core.errors import WorkerFailedError
from engine.core.history.record_lines import FOLDER
from engine.core.messages import ByeMessage, KeyMessage, LinkWantedMessage
from engine.core.ownership import Grid, one_slot_each
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, start_workers, tell_all
from engine.runtime.ipc.link import LinkPairs
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import open_events, open_steps
from engine.runtime.process.fork_client import ForkServer

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "512 KiB": 512 << 10, "4 MiB": 4 << 20}
_OF_GLOO = 0.5
_OF_MEDIAN = 2.0  # p90
_HOP_S = {"quiet, 64 KiB": 45e-6}
_Times = dict[tuple[str, int], tuple[int, ...]]


def link_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench links`."""
    hops = 20 if quick else 200
    return {"quiet": partial(_bench, "quiet", hops), "busy": partial(_bench, "busy", hops)}


def _bench(case: str, hops: int, folder: Path) -> list[BenchRow]:
    with _busy(case == "busy"):
        taken = _measured(hops, folder)
    rows = []
    for name, size in SIZES.items():
        ours = [each / 1e9 for each in taken[LINKS, size]]
        at = f"{case}, {name}"
        if at in _HOP_S:
            rows.append(limit_row(at, "hop s, median", ours, 0.5, _HOP_S[at]))
        for peer, goal in ((GLOO, _OF_GLOO), (TORCH, 1.0)):
            theirs = [each / 1e9 for each in taken[peer, size]]
            figures = at_most(ours, 0.5), at_most(theirs, 0.5)
            rows.append(ratio_row(at, f"hop s, median, beside {peer}", *figures, hops, goal))
            figures = at_most(ours, 0.9), at_most(theirs, 0.9)
            rows.append(ratio_row(at, f"hop s, p90, beside {peer}", *figures, hops, goal))
        rows.append(
            ratio_row(at, "hop s, p90, beside its median", at_most(ours, 0.9), at_most(ours, 0.5), hops, _OF_MEDIAN)
        )
    return rows


@contextlib.contextmanager
def _busy(is_busy: bool) -> Iterator[None]:
    """Runs an endless loop in a process beside the block, at the usual priority."""
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
    ownership = one_slot_each(Grid(2, 1))
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        fds = [open_events(own / "events.jsonl"), open_steps(own / FOLDER)]
        for fd in fds:
            stack.callback(os.close, fd)
        server = stack.enter_context(ForkServer())
        board = ProgressBoard.create(2)
        stack.callback(board.close)
        members = start_workers(server, ownership, fds, board, own, role="bench-links")
        stack.callback(close_workers, members)
        for worker, member in members.items():
            member.link.send(Hops(worker, hops, tuple(SIZES.values())))
        taken = _served(members)
        tell_all(members.values(), ByeMessage())
    return taken


def _served(members: dict[int, WorkerHandle]) -> _Times:
    """Serves the workers as the agent would, until the receiver has told all its times."""
    taken: _Times = {}
    pairs = LinkPairs(members.get)
    with selectors.DefaultSelector() as selector:
        for member in members.values():
            selector.register(member.link, selectors.EVENT_READ, member)
        while len(taken) < 3 * len(SIZES):
            for key, _ in selector.select():
                message = key.data.link.receive()
                match message:
                    case None:
                        raise WorkerFailedError(f"a worker of the benchmark ended:\n{key.data.log.read_text()}")
                    case LinkWantedMessage():
                        pairs.link(key.data, message)
                    case KeyMessage():
                        tell_all(members.values(), message)
                    case HopTimes(way=way, size=size, took_ns=took_ns):
                        taken[way, size] = took_ns
    return taken
