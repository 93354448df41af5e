"""``python -m tests.e2e.detection_soak``: the time from a hang to its verdict, and healthy workers that seem to hang.

    hangs    a layer sleeps, waits for a lock, keeps Python's lock, or runs for ever    out in time, identical bits
    loads    60 s of a tokenizer that keeps Python's lock, 60 s of slow storage         no worker is out
    pauses   SIGSTOP and, after half of the deadline, SIGCONT                           no worker is out

A worker that runs for ever is judged after five times the deadline of the others, because the kernel's account of it is
that of honest work: a compilation, a decomposition every hundredth step, a core that the host took away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from engine.core.checks.recoveries import recoveries
from engine.core.job.job import Job
from engine.files.events_file import read_events
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.hang_models import HANGS
from tests.e2e.kill_runs import Event, outcome_of
from tests.e2e.recorded import events_of
from tests.e2e.striker import Strike, Striker, committed

DEADLINE_S = 1.5  # from the last action to the verdict
RUNNING = ("spin", "spin with GIL")
RUNNING_S = 6.0  # the same, of a worker that runs, with the usual --hang-after
SILENT_S = 5.0  # the usual deadline of a silent worker
STAGES = 4
SMALL: dict[str, Any] = {"stages": STAGES, "microbatches": 4, "microbatch_size": 2, "validate_every": 0}
_STEPS = 12
_POLL_S = 0.002
_BETWEEN_LINES_S = 60.0
_NO_SIGNAL: Any = 0


class Order:
    """Orders the layer of worker 1 to hang, after a commit."""

    def __init__(self, folder: Path, how: str):
        self.folder, self.how = folder, how
        self.pid = 0

    def moment(self, event: Event) -> bool:
        """Returns whether it is the moment; the order is given by then."""
        if event["event"] == "started" and event["of"] == 1:
            self.pid = event["child"]
        is_now = committed(_STEPS // 2)(event)
        if is_now:
            hidden = self.folder / f".{self.pid}"
            hidden.write_text(self.how)
            hidden.rename(self.folder / str(self.pid))
        return is_now


class Pauses(threading.Thread):
    """Stops one to three workers at a time and lets them go on; `made` counts each of them."""

    def __init__(self, events: Path, num_pauses: int, seed: int):
        super().__init__()
        self.events, self.num_pauses = events, num_pauses
        self.dice = random.Random(seed)  # noqa: S311 - the same seed makes the same run
        self.made = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.events.exists():
            time.sleep(_POLL_S)
        pids: list[int] = []
        told_s = time.monotonic()
        with self.events.open("rb") as file:
            while self.made < self.num_pauses and not self.is_over.wait(_POLL_S):
                if b'{"event":"commit"' not in file.read():
                    continue
                pids = pids or [each["child"] for each in events_of(self.events) if each["event"] == "started"]
                time.sleep(self.dice.random() * 0.03)
                self._pause(self.dice.sample(pids, min(self.dice.randint(1, 3), self.num_pauses - self.made)))
                if time.monotonic() - told_s > _BETWEEN_LINES_S:
                    told_s = time.monotonic()
                    print(f"{self.made} pauses", flush=True)

    def _pause(self, pids: list[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(SILENT_S / 2)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            self.made += len(pids)


def hangs(folder: Path, server: ForkServer) -> Iterator[str]:
    """Yields the deviations of runs in which a layer never returns."""
    usual, _ = _hang(folder / "none", server, "", "1s")
    for how, after in (*product(HANGS, ["1s"]), *product(RUNNING, ["250ms"])):
        found, events = _hang(folder / f"{how} {after}", server, how, after)
        recovered = recoveries(read_events(events))
        taken_s = max((each.phases_ns["detect"] / 1e9 for each in recovered), default=float("inf"))
        allowed_s = RUNNING_S if how in RUNNING and after == "1s" else DEADLINE_S
        print(f"hang, {how}: verdict after {taken_s:.2f} s with --hang-after {after}", flush=True)
        if [out.worker for each in recovered for out in each.verdict] != [1] or found != usual:
            yield f"{how}: {events} has {len(recovered)} recoveries, or other bits"
        elif taken_s > allowed_s:
            yield f"{how}: the verdict came after {taken_s:.2f} s"


def _hang(folder: Path, server: ForkServer, how: str, after: str) -> tuple[object, Path]:
    """Runs a job one of whose layers hangs, or none; returns its outcome and its events."""
    orders, events = folder / "orders", folder / "events.jsonl"
    orders.mkdir(parents=True)
    job = Job(
        model="tests.e2e.hang_models:hanging",
        model_args={"layers": STAGES, "orders": str(orders)},
        steps=_STEPS,
        audit=0,
        hang_after=after,
        **SMALL,
    )
    with Striker(events, [Strike(Order(orders, how).moment, 1, _NO_SIGNAL)] if how else []):
        ending = run_session(job, events, folder, server=server)
    return outcome_of(ending.view.run_state), events


def loads(folder: Path, server: ForkServer, seconds: float) -> Iterator[str]:
    """Yields the deviations of runs whose data take long to load."""
    for how, ahead in product(("tokenizer", "storage"), (False, True)):
        where = "ahead in a thread" if ahead else "in the main thread"
        path = folder / f"{how} {where}"
        path.mkdir()
        job = Job(
            model="tests.e2e.user_batches:flat",
            data="tests.e2e.hang_models:LongLoad",
            data_args={"how": how, "seconds": seconds, "ahead": ahead},
            steps=6,
            **SMALL,
        )
        begun_s = time.monotonic()
        ending = run_session(job, path / "events.jsonl", path, server=server)
        deaths = _deaths(path / "events.jsonl")
        taken_s = time.monotonic() - begun_s
        print(f"{seconds:.0f} s of {how} {where}: {len(deaths)} deaths, a run of {taken_s:.0f} s", flush=True)
        if deaths or ending.error or taken_s < seconds / 2:
            yield f"{how} {where}: {ending.error or deaths}"


def pauses(folder: Path, server: ForkServer, num_pauses: int, seed: int) -> Iterator[str]:
    """Yields the deviations of a run whose workers are stopped for half of the deadline, again and again."""
    path = folder / "pauses"
    path.mkdir()
    stopper = Pauses(path / "events.jsonl", num_pauses, seed)
    job = Job(
        model="timed",
        model_args={"forward_ms": 1, "backward_ms": 2},
        steps=20 + 6 * num_pauses,
        audit=0,
        silent_after=f"{SILENT_S}s",
        **SMALL,
    )
    stopper.start()
    ending = run_session(job, path / "events.jsonl", path, server=server)
    stopper.is_over.set()
    stopper.join()
    deaths = _deaths(path / "events.jsonl")
    print(f"{stopper.made} pauses of {SILENT_S / 2:.1f} s: {len(deaths)} deaths", flush=True)
    if deaths or ending.error or stopper.made < num_pauses:
        yield f"pauses: {stopper.made} made, {ending.error or deaths}"


def _deaths(events: Path) -> list[str]:
    return [event["reason"] for event in events_of(events) if event["event"] == "epoch" and event["verdict"]]


def main() -> int:
    """Returns 0 if each hang was seen in time and no healthy worker was out, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.detection_soak")
    parser.add_argument("--pauses", type=int, default=300, metavar="N")
    parser.add_argument("--load", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with ForkServer() as server, tempfile.TemporaryDirectory(prefix="detection-soak-") as name:
        folder = Path(name)
        problems = [*hangs(folder, server), *loads(folder, server, given.load)]
        problems += pauses(folder, server, given.pauses, given.seed)
    print("\n".join(problems) or "no deviation")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
