"""A day on spot machines: SIGTERMs and SIGKILLs of launchers and workers, each end followed by the same line.

    python -m tests.e2e.spot_soak --kills 20 --seed 1

The job must end with the bits of the undisturbed run. After SIGTERM no committed step is trained again; after SIGKILL
of a launcher at most an interval of them, and those that were trained while a checkpoint was being written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ExitCode
from tests.e2e.kept_models import SLEEP_S
from tests.e2e.launcher import ROOT, Done, Launcher
from tests.e2e.recorded import events_of

EVERY = 8  # steps between checkpoints
_WORKERS = 4
_BETWEEN = (2, 12)  # commits between two strikes
_STEPS_PER_STRIKE = 14
_MOST_LAUNCHES = 60
_ENDS = (
    *(ExitCode.TERMINATED, -signal.SIGKILL),
    *(ExitCode.STOPPED_RESUMABLE, ExitCode.STATE_LOST, ExitCode.NOT_RECOVERED),  # several workers at once
)


class Strike(NamedTuple):
    """A signal to the launcher or to a worker."""

    whom: str
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.number.name} of the {self.whom}"


KINDS = tuple(Strike(whom, number) for whom in ("launcher", "worker") for number in (signal.SIGTERM, signal.SIGKILL))


def strikes_of(seed: int, kills: int) -> list[Strike]:
    """Returns so many strikes, each kind as often as the others, in a random order."""
    strikes = [KINDS[number % len(KINDS)] for number in range(kills)]
    random.Random(seed).shuffle(strikes)  # noqa: S311
    return strikes


def line_of(results: Path, steps: int) -> list[str]:
    """Returns the one line that begins the job, resumes it, and says that it is complete."""
    models = "tests.e2e.kept_models"
    job = ["--model", f"{models}:normed", "--data", f"{models}:samples", "--trust-code", "--no-check-pure"]
    job += ["--stages", str(_WORKERS)]
    job += ["--steps", str(steps), "--microbatches", "4", "--microbatch-size", "4", "--validate-every", "20"]
    return ["run", *job, "--checkpoint-every", str(EVERY), "--results", str(results), "--resume", "auto"]


class Day:
    """One job, struck and started again until it is complete; `results` has all its runs."""

    def __init__(self, folder: Path, strikes: Sequence[Strike], seed: int):
        self.folder, self.results, self._left = folder, folder / "results", list(strikes)
        self.steps = _STEPS_PER_STRIKE * len(strikes) + 10
        self._random = random.Random(seed)  # noqa: S311
        self.problems: list[str] = []
        self.launches = self.struck = 0
        self._ended_by = ""

    def pass_by(self) -> None:
        """Starts the line until it says that the job is complete."""
        while self.launches < _MOST_LAUNCHES:
            before = self._newest()
            launcher = Launcher(self.folder / str(self.launches), line_of(self.results, self.steps), {SLEEP_S: "0.005"})
            self.launches += 1
            try:
                done = self._strike(launcher, before)
                self.problems += [f"left: {each}" for each in launcher.leftovers()]
            finally:
                launcher.kill_all()
            if done.code == ExitCode.OK:
                break
            if done.code not in _ENDS:
                self.problems.append(f"launch {self.launches} ended with {done.code}: {done.stderr[-2000:]}")
                return
        if self._left:
            self.problems.append(f"the job was over before {', '.join(map(str, self._left))}")
        last = Launcher(self.folder / "last", line_of(self.results, self.steps), {})
        done = last.wait()
        last.kill_all()
        if done.code or not done.stdout.startswith(f"complete: all {self.steps} steps"):
            self.problems.append(f"the line after the end: {done}")

    def _newest(self) -> Path:
        return (self.results / "latest").resolve()

    def _num_commits(self, before: Path) -> int:
        """Returns the commits in the newest run; none while that is still the one before."""
        with suppress(OSError):
            if (newest := self._newest()) != before:
                return (newest / "events.jsonl").read_bytes().count(b'{"event":"commit"')
        return 0

    def _strike(self, launcher: Launcher, before: Path) -> Done:
        """Strikes at random moments until the launcher has ended; returns its end."""
        num_commits = 0
        while self._left:
            strike, wanted = self._left[0], num_commits + self._random.randint(*_BETWEEN)
            until_s = time.monotonic() + 120
            while (num_commits := self._num_commits(before)) < wanted and time.monotonic() < until_s:
                if launcher.process.poll() is not None:
                    return launcher.wait()
                time.sleep(0.01)
            time.sleep(self._random.random() * 0.1)
            workers = [pid for name, pid in launcher.processes().items() if name.removeprefix("bamboo-").isdigit()]
            pid = launcher.process.pid if strike.whom == "launcher" else self._random.choice(workers or [0])
            if launcher.process.poll() is not None or not pid:
                return launcher.wait()
            os.kill(pid, strike.number)
            self._left.pop(0)
            self.struck += 1
            print(f"{self.struck:>3}  {strike} after {num_commits} commits of launch {self.launches}", flush=True)
            if strike.whom == "launcher":
                break
        return launcher.wait()


class Repeated(NamedTuple):
    """Steps that were trained again after one end, and how many may be."""

    run: str
    steps: int
    allowed: int


def repeated_steps(results: Path) -> list[Repeated]:
    """Returns the steps that each run trained again, and each resume within a run."""
    found: list[Repeated] = []
    committed, outcome = -1, ""
    for run in sorted(results.glob("2*")):
        for event in events_of(run / "events.jsonl"):
            if event["event"] == "resumed":
                found.append(_repeated(run.name, committed, event["step"], outcome))
            elif event["event"] == "training_ended":
                outcome = event["outcome"]
            elif event["event"] == "commit":
                committed, outcome = event["step"], ""
    return found


def _repeated(run: str, committed: int, begun: int, outcome: str) -> Repeated:
    due = (committed + 1) // EVERY * EVERY - 1  # the newest step that was to be kept
    late = committed - due if begun < due else 0  # trained while that one was being written
    return Repeated(run, committed - begun, 0 if outcome == "interrupted" else EVERY + late)


def losses_of(results: Path) -> dict[int, set[str]]:
    """Returns the losses of each committed step, of all runs; one that was trained again must have one loss."""
    losses: dict[int, set[str]] = {}
    for run in results.glob("2*"):
        for event in events_of(run / "events.jsonl"):
            if event["event"] == "commit":
                losses.setdefault(event["step"], set()).add(repr(event["loss"]))
    return losses


def live_through(strikes: Sequence[Strike], seed: int, folder: Path) -> list[str]:
    """Lets a day pass, and the same job undisturbed; returns the rules that broke."""
    day = Day(folder / "day", strikes, seed)
    day.pass_by()
    calm = Launcher(folder / "calm", line_of(folder / "calm" / "results", day.steps), {})
    done = calm.wait(600)
    calm.kill_all()
    problems = [*day.problems, *([f"undisturbed: {done}"] if done.code else [])]
    again = repeated_steps(day.results)
    problems += [
        f"{each.steps} steps again in {each.run}, {each.allowed} allowed" for each in again if each.steps > each.allowed
    ]
    problems += [] if (losses := losses_of(day.results)) == losses_of(folder / "calm" / "results") else ["other losses"]
    equal = compared(day.results / "latest", folder / "calm" / "results" / "latest")
    problems += [] if equal["equal"] else [f"other weights: {equal}"]
    rows, total = equal["rows"], sum(each.steps for each in again)
    most = max((each.steps for each in again), default=0)
    print(f"{day.struck} strikes, {day.launches} launches, {len(losses)} steps")
    print(f"{total} steps trained again, at most {most} at once; the interval is {EVERY}")
    print(f"{rows['equal']} of {rows['rows']} rows equal to those of the undisturbed run, up to step {rows['last']}")
    print(f"weights {' and '.join(each[:12] for each in rows['hashes'])}", *problems, sep="\n  ", flush=True)
    return problems


def compared(a: Path, b: Path) -> dict[str, Any]:
    """Returns what `bamboo compare --weights` says of two runs."""
    command = [sys.executable, "-m", "bamboo_cli", "compare", "--weights", "--json", str(a.resolve()), str(b.resolve())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Returns 0 if the job ends with the bits of the undisturbed run, 1 if a rule broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.spot_soak")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return int(bool(live_through(strikes_of(given.seed, given.kills), given.seed, Path(name))))


if __name__ == "__main__":
    sys.exit(main())
