"""Kills in and around the writing of checkpoints and resuming: the job that goes on must be the one that was stopped.

    python -m tests.e2e.resume_soak --kills 60 --launchers 10 --seed 1

A round runs a job that keeps every step, and kills some of its workers or its launcher at random moments. Each launch
after the first is a `bamboo run --resume latest`; the round ends with the last step.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.core.errors import ExitCode
from engine.core.job.job import Job
from tests.e2e.launcher import Launcher
from tests.runtime.thread_runs import run_in_threads

JOB = Job(model="mlp", stages=4, steps=30, microbatches=4, validate_every=0)
_FLAGS = ("--model", "mlp", "--stages", "4", "--steps", "30", "--microbatches", "4", "--validate-every", "0")
_MOST_LAUNCHES = 12  # of one round


class Round:
    """One job, started and killed until it is over; `results` has all its runs."""

    def __init__(self, folder: Path, seed: int, rows: dict[tuple[str, str], list[str]]):
        self.folder, self.results, self.random, self._rows = folder, folder / "results", random.Random(seed), rows  # noqa: S311
        self.kills = self.launchers = 0

    def run(self, hits_launcher: bool) -> list[str]:
        """Returns the rules that broke."""
        problems: list[str] = []
        for number in range(_MOST_LAUNCHES):
            begun = ("--resume", "latest") if self._has_checkpoint() else _FLAGS
            keeping = ("--checkpoint-every", "1", "--results", str(self.results))
            launcher = Launcher(self.folder / str(number), ("run", *begun, *keeping), {})
            try:
                code = self._strike(launcher, hits_launcher and number == 0)
                problems += [f"left: {each}" for each in launcher.leftovers()]
            finally:
                launcher.kill_all()
            if code == ExitCode.OK:
                return problems + self._differences()
            if code not in (-signal.SIGKILL, ExitCode.STOPPED_RESUMABLE, ExitCode.STATE_LOST, ExitCode.NOT_RECOVERED):
                problems.append(f"launch {number} ended with {code}: {launcher.stderr()[-2000:]}")
        return [*problems, "it did not end"]

    def _has_checkpoint(self) -> bool:
        return any(self.results.glob("2*/checkpoints/step-*/manifest-*"))

    def _num_commits(self) -> int:
        """Returns the commits in the newest run."""
        with suppress(OSError):
            return (self.results / "latest" / "events.jsonl").read_bytes().count(b'{"event":"commit"')
        return 0

    def _strike(self, launcher: Launcher, hits_launcher: bool) -> int:
        """Kills at random moments; returns the exit code of the launcher."""
        for _ in range(self.random.randint(1, 3)):
            wanted = self.random.randint(0, 12)
            until_s = time.monotonic() + 20
            while self._num_commits() < wanted and launcher.process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.005)
            time.sleep(self.random.random() * 0.05)
            if launcher.process.poll() is not None:
                break
            if hits_launcher:
                os.kill(launcher.process.pid, signal.SIGKILL)
                self.launchers += 1
                break
            workers = [pid for name, pid in launcher.processes().items() if name.startswith("bamboo-")]
            for pid in self.random.sample(workers, min(len(workers), self.random.randint(1, 3))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1
        return launcher.wait().code

    def _differences(self) -> list[str]:
        found = list(self._found())
        wrong = [key for key, row in found if self._rows[key] != row]
        last = {key for key, _ in found if key[0] == str(JOB.steps - 1)}
        return [f"other weights in {wrong[:3]}"] * bool(wrong) + ["no hashes of the last step"] * (not last)

    def _found(self) -> Iterator[tuple[tuple[str, str], list[str]]]:
        for each in self.results.glob("2*/trajectory.csv"):
            with open(each) as file:
                yield from (((row[0], row[1]), row[2:]) for row in list(csv.reader(file))[1:])


def kill_all(kills: int, launchers: int, seed: int) -> int:
    """Makes rounds until so many processes were killed; returns the number of rounds in which a rule broke."""
    whole = run_in_threads(JOB).view.run_state.rows
    rows = {(str(row.step), str(row.layer)): list(row.texts())[2:] for row in whole}
    broken = done = of_launchers = 0
    while done < kills or of_launchers < launchers:
        with tempfile.TemporaryDirectory() as name:
            each = Round(Path(name), seed, rows)
            problems = each.run(of_launchers < launchers)
        done, of_launchers = done + each.kills + each.launchers, of_launchers + each.launchers
        broken += bool(problems)
        print(f"seed {seed}: {done} kills, {of_launchers} of launchers", *problems, sep="\n  ", flush=True)
        seed += 1
    return broken


def main() -> int:
    """Returns 0 if every resumed job is the job, 1 if one is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.resume_soak")
    parser.add_argument("--kills", type=int, default=60, metavar="N")
    parser.add_argument("--launchers", type=int, default=10, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    given = parser.parse_args()
    return int(bool(kill_all(given.kills, given.launchers, given.seed)))


if __name__ == "__main__":
    sys.exit(main())
