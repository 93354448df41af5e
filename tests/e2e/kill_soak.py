"""``python -m tests.e2e.kill_soak``: real kills without end, each run against its fault-free twin.

Each run is drawn from a seed, with the settings in turn. ``--kills N`` stops after N kills. The first failed run is
printed with the command that repeats it, ``--seed S --only SETTING``, and its folder is kept. ``--among PATTERN`` takes
the settings whose names match, in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

from engine.core.faults.fault import PHASES, After, Fault, Worker
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_forecast import SORTS, Kill, bystanders, plan_kills
from tests.e2e.kill_runs import SETTINGS, Runs, job_of
from tests.e2e.launcher import ROOT
from tests.e2e.test_schedule_kills import job_of as scheduled_job

_BETWEEN_LINES_S = 10.0
_LATEST_NS = 20_000_000  # the latest second death after the first, or after a phase of its recovery
_BLOCKS = ("mlp-eager", "mlp-lazy-2", "gpt-lazy", "resnet18-eager", "gpt-lazy-x2", "mlp-reroute-x2", "kinds-none-x2")
_GPT = {"model": "gpt", "model_args": {"width": 16, "heads": 2, "depth": 8}}
# The settings of the tests, one under every schedule, and some with two blocks in each stage, slices, or offload.
_JOBS: dict[str, Job] = {name: job_of(name) for name in SETTINGS}
_JOBS |= {f"schedule-{name}": replace(scheduled_job(name, number), steps=18) for number, name in enumerate(SCHEDULES)}
_JOBS |= {
    f"slices-{name}": replace(scheduled_job(name, number, _GPT), steps=18, slices=2, microbatches=4)
    for number, name in enumerate(("1f1b", "zb1p", "v-half"))
}
_JOBS |= {
    f"offload-{name}": replace(scheduled_job(name, number), steps=18, offload="host", offload_time=0.1)
    for number, name in enumerate(("gpipe", "zb1p", "v-half"))
}
_JOBS |= {f"blocks-{name}": replace(_JOBS[name], stages=3, blocks=2) for name in _BLOCKS}


def main() -> int:
    """Returns 0 if every run survived its kills, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kill_soak")
    parser.add_argument("--kills", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first run's; each one has its own")
    parser.add_argument("--among", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--only", choices=_JOBS, help="one run of one setting")
    parser.add_argument("--buffers", type=int, metavar="BYTES", help="of the sockets of links, which get no rings then")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # each job runs in its own folder
    folder = Path(tempfile.mkdtemp(prefix="kill-soak-"))
    with ForkServer() as server, _small_buffers(given.buffers) if given.buffers else nullcontext():
        runs = Runs(folder, server)
        failed = _one(runs, given.only, given.seed) if given.only else _many(runs, given.seed, given.kills, given.among)
    if failed:
        print(f"its events and logs are in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return int(failed)


@contextmanager
def _small_buffers(size: int) -> Iterator[None]:
    """Makes links whose bodies wait for their reader every few kilobytes."""

    def pair(*options: Any) -> tuple[socket.socket, socket.socket]:
        ends = socketpair(*options)
        if not options:  # that of a link; control messages need room for a whole one
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        return ends

    socketpair = socket.socketpair
    with patch("socket.socketpair", pair), patch("engine.runtime.process.link.new_ring", side_effect=OSError):
        yield


def _many(runs: Runs, first_seed: int, wanted: int, among: Sequence[str]) -> bool:
    """Makes runs until there were enough kills and prints progress; returns whether one failed."""
    begun = told = monotonic()
    kills, settings = 0, [name for name in _JOBS if any(fnmatch(name, pattern) for pattern in among)]
    for seed in count(first_seed):
        setting = settings[seed % len(settings)]
        planned, second = plan_of(setting, seed)
        kills += len(planned) + (second is not None)
        if _one(runs, setting, seed):
            return True
        enough = kills >= wanted
        if enough or monotonic() - told > _BETWEEN_LINES_S:
            told = monotonic()
            print(
                f"{seed - first_seed + 1:,} runs, {kills:,} kills in {told - begun:,.0f} s: all as their twins",
                flush=True,
            )
        if enough:
            return False
    raise AssertionError("seeds do not end")


def _one(runs: Runs, setting: str, seed: int) -> bool:
    """Makes one run; prints its deviations and returns whether there are any."""
    job, (kills, second) = _JOBS[setting], plan_of(setting, seed)
    problems = runs.strike(job, kills, second)
    if problems:
        print(
            "\n".join((f"{setting}:", *(f"  --kill {kill.text}" for kill in kills), f"  {second}", *problems)),
            flush=True,
        )
        print(f"python -m tests.e2e.kill_soak --only {setting} --seed {seed}", flush=True)
    return bool(problems)


def plan_of(setting: str, seed: int) -> tuple[tuple[Kill, ...], Fault | None]:
    """Returns the kills of a run, and perhaps one in the recovery from the last kill or soon after it."""
    job, dice = _JOBS[setting], random.Random(seed)  # noqa: S311 - the same seed makes the same run
    wanted = dice.sample(SORTS, len(SORTS))  # the first ones surely occur
    kills = plan_kills(job, wanted, seed, most=dice.randint(1, 5))
    if not (also := bystanders(job, kills)):
        return kills, None
    phase = dice.choice([*PHASES, *[None] * len(PHASES)])
    delay_ns = 0 if phase and dice.random() < 0.5 else dice.randint(0, _LATEST_NS)
    return kills, Fault("second", After(kills[-1].text, phase, delay_ns), (Worker(dice.choice(also)),))


if __name__ == "__main__":
    sys.exit(main())
