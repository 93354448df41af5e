"""Times the steps of runs with loggers that raise, block, sleep and compute without end, beside runs without a logger.

    python -m tests.e2e.logger_soak --rounds 5
    python -m tests.e2e.logger_soak --kinds prometheus prometheus:19464 otel

The kinds take turns, so that a change of the machine's load meets all of them. Every trajectory must be the same. The
figures are the medians of all steps of a kind, and their ratio to those without a logger. On a busy machine, noise is
larger than the cost of a logger: then the CPU time per step, of reading it and of the logger, tells more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import train
from engine.observers.observers import LoggerFeed, made_logger
from tests.core.made_records import lines_of
from tests.e2e.launcher import ROOT

LOGGERS = """
import time

class Raises:
    def step(self, done):
        raise RuntimeError("full")

class Blocks:
    def step(self, done):
        time.sleep(3600)

class Sleeps:
    def step(self, done):
        time.sleep(0.05)

class Computes:
    def step(self, done):
        while True:
            pass
"""
KINDS = ("", "csv", "loggers:Raises", "loggers:Blocks", "loggers:Sleeps", "loggers:Computes")
JOBS: dict[str, dict[str, Any]] = {
    "sleeping": {
        "model": "timed",
        "model_args": {"forward_ms": 2.0, "backward_ms": 4.0},
        "stages": 2,
        "microbatches": 4,
    },
    "computing": {"model": "gpt", "stages": 2},
}
_WARM = 10  # steps that are left out
_WITHOUT: dict[str, Any] = {"validate_every": 0, "checkpoint_every": "0", "quiet": True}


def main() -> int:
    """Prints a line for each job and kind after each round; returns 1 if a trajectory differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--jobs", nargs="+", default=list(JOBS), choices=list(JOBS), help="stages that sleep or compute"
    )
    parser.add_argument("--kinds", nargs="+", default=KINDS, metavar="LOGGER", help="beside runs without a logger")
    given = parser.parse_args()
    kinds = ("", *(kind for kind in given.kinds if kind))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    differs = False
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("loggers.py").write_text(LOGGERS)
        for name in given.jobs:
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            trajectories: set[str | None] = set()
            for number in range(given.rounds):
                for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                    run = train(**JOBS[name], **_WITHOUT, steps=given.steps, logger=kind)
                    trajectories.add(run.wait().trajectory)
                    times[kind] += run.table("steps")["duration_ms"].tolist()[_WARM:]
                _tell(f"{name}, round {number + 1}", times, len(trajectories))
            differs |= len(trajectories) != 1
        for kind in kinds if given.kinds is not KINDS else ():
            print(f"{kind or 'no logger'}: {_cpu_us(kind):.0f} us of CPU per step, to read and to log it")
    return int(differs)


def _cpu_us(kind: str, steps: int = 2_000) -> float:
    """Returns the CPU time per step, in us, of reading made-up steps for a logger, after the first ones."""
    events = Path(tempfile.mkdtemp(dir=".")) / "events.jsonl"
    begin = [{"event": "job", "steps": steps}, {"event": "go", "epoch": 1, "at_ns": 1}]
    feed = LoggerFeed(made_logger(kind) if kind else None, events)
    spent_s = 0.0
    for first in range(0, steps, 20):  # as many as a look finds
        commits = [{"event": "commit", "step": step, "at_ns": 10**7 * (step + 2)} for step in range(first, first + 20)]
        with events.open("a") as file:
            file.write(lines_of([*begin, *commits]))
        begin, begun_s = [], time.process_time()
        feed.read_on()
        spent_s += time.process_time() - begun_s if first else 0.0
        time.sleep(0.02)
    return spent_s / (steps - 20) * 1e6


def _tell(name: str, times: Mapping[str, Sequence[float]], num_trajectories: int) -> None:
    usual = statistics.median(times[""])
    for kind, found in times.items():
        median = statistics.median(found)
        print(f"{name}: {kind or 'no logger'}: {median:.2f} ms, {median / usual:.4f}")
    print(f"{name}: {num_trajectories} trajectories", flush=True)


if __name__ == "__main__":
    sys.exit(main())
