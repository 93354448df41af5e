"""``python -m tests.e2e.time_soak``: the tables of time and tensors beside what is known from outside of them.

wall clock    20 runs of all kinds: a worker's times sum to the time from the first commit to the last, of the launcher
memory        the tensors of each slot at the peak of a step are those that the memory model predicts
dry run       on stages that sleep for known times, a worker waits as long as in the dry run with these times
sampler       the time that a worker's main thread ran, or waited for a core, in its computations: /proc/PID/schedstat
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from engine.core.action import COMPUTE_OPS, Op
from engine.core.history.process_records import StartedRecord
from engine.core.history.step_files import CHORES, Chore
from engine.core.ownership import Ownership
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.files.events_file import GrowingEvents, read_history
from engine.report.load import RunTables, load
from engine.report.time_table import TIMES, WAITS

_MLP = ("--model", "mlp", "--set", "model_args.width=256", "--microbatch-size", "64", "--steps", "40")
_NO_SHADOWS = ("--redundancy", "none")
RUNS: tuple[tuple[str, ...], ...] = (
    ("--steps", "12"),
    ("--steps", "12", "--kill", "5:1"),
    ("--steps", "12", "--kill", "5:2:B:3", "--kill", "8:0"),
    (*_MLP, "--stages", "2"),
    (*_MLP, "--stages", "2", "--kill", "4:1"),
    (*_MLP, "--stages", "3", "--redundancy", "eager"),
    (*_MLP, "--stages", "2", "--schedule", "gpipe"),
    (*_MLP, "--stages", "2", "--schedule", "zb1p", *_NO_SHADOWS),
    (*_MLP, "--stages", "4", "--stages-per-worker", "2", "--schedule", "interleaved"),
    (*_MLP, "--stages", "4", "--stages-per-worker", "2", "--schedule", "zbv", *_NO_SHADOWS),
    (*_MLP, "--stages", "4", "--stages-per-worker", "2", "--schedule", "dualpipev", *_NO_SHADOWS),
    (*_MLP, "--stages", "2", "--pipelines", "2"),
    (*_MLP, "--stages", "2", "--pipelines", "2", "--kill", "5:1"),
    (*_MLP, "--stages", "2", "--pipelines", "2", "--fsdp", "1", *_NO_SHADOWS),
    (*_MLP, "--stages", "2", "--blocks", "2"),
    (*_MLP, "--stages", "2", "--log-every", "2"),
    (*_MLP, "--stages", "2", "--checkpoint-every", "3"),
    (*_MLP, "--stages", "2", "--validate-every", "3", "--audit", "0"),
    (*_MLP, "--stages", "1"),
    ("--model", "timed", "--stages", "3", "--steps", "6", "--microbatches", "4", "--validate-every", "0"),
)
# The waits beyond the bubbles are real: for a busy machine, and for what lies between two actions of others.
LIMITS = {"wall clock": 0.01, "memory": 0.05, "bubbles": 0.03, "waits": 0.06, "sampler": 0.03}
_TIMED = (
    *("--model", "timed", "--steps", "6", "--microbatches", "4", "--validate-every", "0", "--audit", "0"),
    *("--redundancy", "none", "--checkpoint-every", "0"),
)
# The milliseconds of a forward, of which a backward takes twice as many, and the flags.
TIMED = (
    (100.0, ("--stages", "4", "--set", "model_args.layers=4")),
    (100.0, ("--stages", "3", "--set", "model_args.layers=3", "--schedule", "gpipe")),
    (100.0, ("--stages", "2", "--set", "model_args.layers=2", "--pipelines", "2")),
    (20.0, ("--stages", "4", "--set", "model_args.layers=4", "--microbatches", "8")),
)
SAMPLED = (
    *("--model", "mlp", "--set", "model_args.width=1024", "--microbatch-size", "512", "--steps", "12"),
    *("--stages", "2", "--validate-every", "0"),
)
_LOOK_S = 0.002
_LONG_MS = 100.0


def trained(folder: Path, flags: Sequence[str]) -> tuple[RunTables, Path]:
    """Runs a job and returns its tables and its folder; raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "bamboo_cli", "run", *flags, "--no-twin", "--results", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    events = (folder / "latest").resolve() / "events.jsonl"
    return load(read_history(events), most_actions=None), events


def off_the_clock(run: RunTables, events: Path) -> float:
    """Returns by which share the times of a worker that lived on differ from the first commit to the last."""
    commits = read_history(events).commits
    whole_ms = (commits.at_ns[-1] - commits.at_ns[0]) / 1e6
    is_later, kinds = run.time["step"] > commits.steps[0], [f"{kind}_ms" for kind in TIMES]
    behind = [f"{chore}_ms" for chore in CHORES if chore is not Chore.DATA]  # of the first step, behind its commit
    sums = run.time[is_later].groupby("worker")[kinds].sum().sum(axis="columns")
    sums += run.time[~is_later].groupby("worker")[behind].sum().sum(axis="columns")
    finished = run.workers["worker"][run.workers["state"] == "finished"]
    return float((sums[sums.index.isin(finished)] / whole_ms - 1).abs().max())


def off_the_prediction(run: RunTables) -> float:
    """Returns by which share the tensors of a slot at the peak differ from their prediction, in the last step told.

    A plan that a recovery makes is no whole step: of a run with a kill the first epoch counts.
    """
    tensors = run.tensors[run.tensors["predicted_mib"].notna() & (run.tensors["at"] == "peak")]
    tensors = tensors.groupby(["worker", "pipeline", "stage"], as_index=False).first()
    print(
        f"  {len(tensors)} slots: {tensors['total_mib'].sum():.2f} MiB, {tensors['predicted_mib'].sum():.2f} predicted"
    )
    return float((tensors["total_mib"] / tensors["predicted_mib"] - 1).abs().max())


def off_the_dry_run(run: RunTables, forward_ms: float) -> tuple[float, float]:
    """Returns by which share the waits in a step, and the bubbles, differ from those of the dry run."""
    job, epoch = run.job, run.epochs[0]
    ownership = Ownership(job.grid, epoch.owners, epoch.shadows)
    costs: Mapping[Op, float] = {Op.F: forward_ms, Op.B: 2 * forward_ms}
    program = build_program(job.schedule, ownership, job.redundancy)
    walked = dry_run(program, ownership, lambda action: costs.get(action.op, 0.0))
    busy_ms = sum(span.end - span.start for span in walked.spans)
    expected_ms = walked.makespan * len(ownership.workers()) - busy_ms
    usual = run.time[run.time["step"] > 0].groupby("step").sum()
    waits_ms = usual[[f"wait_{cause}_ms" for cause in WAITS]].sum(axis="columns").median()
    return float(waits_ms / expected_ms - 1), float(usual["wait_bubble_ms"].median() / expected_ms - 1)


class Sampler(threading.Thread):
    """Reads the kernel's account of each worker's main thread, until it is stopped."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.seen: dict[
            int, list[tuple[int, int]]
        ] = {}  # by worker: when, and how long it had run or waited for a core
        self.over = threading.Event()
        self._folder = folder

    def run(self) -> None:
        """Looks every few milliseconds."""
        events: GrowingEvents | None = None
        pids: dict[int, int] = {}
        while not self.over.wait(_LOOK_S):
            if events is None and (path := self._folder / "latest" / "events.jsonl").is_file():
                events = GrowingEvents(path)
            if events is not None:
                pids = {each.of: each.child for each in events.read_on().of(StartedRecord)}
            for worker, pid in pids.items():
                try:
                    ran, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
                except OSError:
                    continue
                self.seen.setdefault(worker, []).append((time.monotonic_ns(), int(ran) + int(queued)))


def off_the_sampler(run: RunTables, sampler: Sampler) -> float:
    """Returns the largest share by which a worker's computing differs from the kernel's account inside its actions."""
    computing = run.actions[run.actions["op"].isin((*COMPUTE_OPS, Op.STEP))]
    kinds = ("data", "forward", "backward", "redundant", "replayed", "optimizer")
    worst = 0.0
    for worker, mine in computing.groupby("worker"):
        at_ns, busy_ns = np.array(sampler.seen[worker]).T
        seen_ms = (np.interp(mine["end_ns"], at_ns, busy_ns) - np.interp(mine["start_ns"], at_ns, busy_ns)).sum() / 1e6
        told_ms = run.time[run.time["worker"] == worker][[f"{kind}_ms" for kind in kinds]].sum().sum()
        print(f"  worker {worker}: {told_ms:,.0f} ms in the table, {seen_ms:,.0f} ms by the kernel")
        worst = max(worst, abs(told_ms / seen_ms - 1))
    return worst


def main() -> int:
    """Runs the jobs; returns 1 if a figure is off by more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=len(RUNS), help="how many of the 20 runs")
    limit = parser.parse_args().runs
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for flags in RUNS[:limit]:
            run, events = trained(folder, flags)
            shares = {"wall clock": off_the_clock(run, events), "memory": off_the_prediction(run)}
            worst |= {what: max(worst.get(what, 0.0), share) for what, share in shares.items()}
            told = ", ".join(f"{what} {share:.2%}" for what, share in shares.items())
            print(f"{told}  {' '.join(flags)}", flush=True)
        for forward_ms, flags in TIMED:
            took = ("--set", f"model_args.forward_ms={forward_ms}", "--set", f"model_args.backward_ms={2 * forward_ms}")
            waits, bubble = off_the_dry_run(trained(folder, (*_TIMED, *took, *flags))[0], forward_ms)
            if forward_ms >= _LONG_MS:  # an action and a hop take up to a millisecond, which the dry run has not
                worst["waits"] = max(worst.get("waits", 0.0), abs(waits))
                worst["bubbles"] = max(worst.get("bubbles", 0.0), abs(bubble))
            print(
                f"dry run    waits {waits:+.2%}, bubbles {bubble:+.2%}  {forward_ms:g} ms {' '.join(flags)}", flush=True
            )
        (folder / "latest").unlink()
        sampler = Sampler(folder)
        sampler.start()
        run, _ = trained(folder, SAMPLED)
        sampler.over.set()
        worst["sampler"] = off_the_sampler(run, sampler)
    for what, share in worst.items():
        print(f"{what}: off by at most {share:.2%} (may be {LIMITS[what]:.0%})")
    return int(any(share > LIMITS[what] for what, share in worst.items()))


if __name__ == "__main__":
    sys.exit(main())
