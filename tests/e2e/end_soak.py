"""``python -m tests.e2e.end_soak``: stops, kills and pauses processes of runs; every run must end, and correctly.

Each is a `bamboo run` as a user starts it, judged from outside: its time, its exit code, the trajectory of its
fault-free twin, and no process or file left behind. The first failure is printed with the command that repeats it, and
its folder is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.end_rules import (
    SETTINGS,
    STEPS,
    Blow,
    Moment,
    Plan,
    arguments_of,
    holders,
    plan_of,
    right_codes,
    wrongly_out,
)
from tests.e2e.launcher import Launcher

LIMIT_S = 120.0  # several silences, a recovery from each, the deadlines of etcd, and a busy machine
_POLL_S = 0.002
_BETWEEN_LINES_S = 20.0
_LONG_S = 30.0


class Outcome(NamedTuple):
    """The outcome of a run: its exit code, the blows that landed, and all deviations from the rules."""

    code: int
    landed: tuple[Blow, ...]
    problems: tuple[str, ...]
    seconds: float


class Watch:
    """Watches one run from outside, and strikes at the planned moments."""

    def __init__(self, launcher: Launcher, plan: Plan):
        self.launcher = launcher
        self.landed: list[Blow] = []
        self._started_s = time.monotonic()
        self._waiting = list(plan.blows)
        self._due: list[tuple[float, Blow]] = []
        self._stopped: list[tuple[float, int]] = []
        self._pids: dict[str, int] = {}

    def until_end(self) -> bool:
        """Strikes until the run has ended; returns whether it ended in time."""
        while time.monotonic() - self._started_s < LIMIT_S:
            if self.launcher.process.poll() is not None:
                return True
            self._look()
            time.sleep(_POLL_S)
        return False

    def _look(self) -> None:
        now_s = time.monotonic()
        for blow in [each for each in self._waiting if self._has_come(each.moment)]:
            self._waiting.remove(blow)
            self._due.append((blow.moment.delay_s + (self._started_s if blow.moment.kind == "launch" else now_s), blow))
        for due_s, blow in [each for each in self._due if each[0] <= now_s]:
            self._due.remove((due_s, blow))
            self._strike(blow)
        for due_s, pidfd in [each for each in self._stopped if each[0] <= now_s]:
            self._stopped.remove((due_s, pidfd))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    def _has_come(self, moment: Moment) -> bool:
        if moment.kind == "launch":
            return True
        found = self.launcher.events(moment.kind)
        return len(found) >= moment.number if moment.kind == "finished" else len(found) > moment.number

    def _strike(self, blow: Blow) -> None:
        pid = self._pid(blow.whom)
        if pid is None:
            return  # the process has ended, or has not started yet
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            signal.pidfd_send_signal(pidfd, blow.number)
            self.landed.append(blow)
            if blow.pause_s is not None:
                self._stopped.append((time.monotonic() + blow.pause_s, pidfd))
            else:
                os.close(pidfd)

    def _pid(self, name: str) -> int | None:
        """Returns the pid of a process: from the events, which is fast, or by its name."""
        for event in self.launcher.events("started"):
            self._pids[f"bamboo-{event['of']}"] = event["child"]
        if name not in self._pids or not self.launcher.owns(self._pids[name]):
            found = self.launcher.processes()
            self._pids |= {each.split("-")[0] if each.startswith("etcd-") else each: pid for each, pid in found.items()}
        pid = self._pids.get(name)
        return pid if pid is not None and self.launcher.owns(pid) else None

    def close(self) -> None:
        """Closes its files and descriptors."""
        for _, pidfd in self._stopped:
            os.close(pidfd)


class Twin(NamedTuple):
    """The result of a setting without blows."""

    rows: tuple[str, ...]
    validation: float


def twin_of(folder: Path, setting: str) -> Twin:
    """Runs a setting without blows."""
    launcher = Launcher(folder, arguments_of(setting), {})
    done = launcher.wait(LIMIT_S)
    assert done.code == 0, done
    return Twin(tuple(_rows(launcher)), json.loads(done.stdout)["validation_loss"])


def _rows(launcher: Launcher) -> list[str]:
    return (launcher.run_folder / "trajectory.csv").read_text().splitlines()


def run(seed: int, folder: Path, twin: Twin) -> Outcome:
    """Runs the plan of a seed and judges the run; a failed run keeps its folder."""
    plan = plan_of(seed)
    launcher = Launcher(folder, arguments_of(plan.setting), {})
    with contextlib.closing(Watch(launcher, plan)) as watch:
        ended = watch.until_end()
    seconds = time.monotonic() - watch._started_s
    landed = tuple(watch.landed)
    try:
        if not ended:
            left = ", ".join(launcher.processes())
            return Outcome(-1, landed, (f"it has not ended after {LIMIT_S:g} s; there are still {left}",), seconds)
        code = launcher.process.returncode
        problems = (*_judged(launcher, code, plan, landed, twin), *(f"left: {each}" for each in launcher.leftovers()))
    finally:
        launcher.kill_all()
    if not problems:
        shutil.rmtree(folder)
    return Outcome(code, landed, problems, seconds)


def _judged(launcher: Launcher, code: int, plan: Plan, landed: tuple[Blow, ...], twin: Twin) -> Iterator[str]:
    events = launcher.events()
    kinds = Counter(event["event"] for event in events)
    is_committed = kinds["commit"] == STEPS
    stages = next((event["stages"] for event in events if event["event"] == "job"), 0)
    held_by = list(holders(events, stages))
    right = right_codes(landed, has_begun=kinds["go"] > 0, is_committed=is_committed, held_by=held_by)
    if code not in right:
        yield f"exit code {code}, not one of {sorted(right)}: {(launcher.folder / 'stderr').read_text()[-2000:]}"
    yield from (f"wrong verdict: {each}" for each in wrongly_out(events, landed))
    if code != 0:
        return
    said: dict[str, Any] = json.loads((launcher.folder / "stdout").read_text())
    if not is_committed or said["outcome"] != "finished" or said["steps"] != STEPS:
        yield f"it says {said['outcome']} after {said['steps']} steps"
    rows = _rows(launcher)
    lacks_hashes = any(each.startswith("the hashes") for each in said["missing"])
    expected = [row for row in twin.rows if not (lacks_hashes and row.startswith(f"{STEPS - 1},"))]
    if rows != expected:
        yield f"the trajectory is not that of the twin ({said['missing']})"
    lacks_validation = any(each.startswith("the validation") for each in said["missing"])
    if not lacks_validation and said["validation_loss"] != twin.validation:
        yield f"validation {said['validation_loss']}, not {twin.validation}"
    if said["missing"] and not any(blow.is_fatal or blow.number is signal.SIGTERM for blow in landed):
        yield f"missing without a reason: {said['missing']}"


def soak(seeds: list[int], num_jobs: int, folder: Path) -> bool:
    """Runs seeds side by side and prints progress; returns whether one failed, after which none is started."""
    settings = [name for name in SETTINGS if name in {plan_of(seed).setting for seed in seeds}]
    twins = {name: twin_of(folder / f"twin-{number}", name) for number, name in enumerate(settings)}
    begun_s = told_s = time.monotonic()
    codes, longest_s, failed = Counter[int](), 0.0, False
    with ThreadPoolExecutor(num_jobs) as pool:
        runs = {
            pool.submit(partial(run, seed, folder / f"{seed}", twins[plan_of(seed).setting])): seed for seed in seeds
        }
        for each in as_completed(runs):
            if each.cancelled():
                continue
            outcome, seed = each.result(), runs[each]
            codes[outcome.code] += 1
            longest_s = max(longest_s, outcome.seconds)
            if outcome.seconds > _LONG_S:
                print(f"seed {seed} took {outcome.seconds:.1f} s", flush=True)
            if outcome.problems:
                failed = True
                _tell(seed, outcome)
                for other in runs:
                    other.cancel()
            elif time.monotonic() - told_s > _BETWEEN_LINES_S or sum(codes.values()) == len(seeds):
                told_s = time.monotonic()
                ends = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items()))
                took = f"in {told_s - begun_s:,.0f} s, the longest {longest_s:.1f} s"
                print(f"{sum(codes.values())} of {len(seeds)} runs have ended {took}: {ends}", flush=True)
    return failed


def _tell(seed: int, outcome: Outcome) -> None:
    plan = plan_of(seed)
    lines = [f"seed {seed}, {plan.setting}:"]
    lines += (f"  {'struck' if blow in outcome.landed else 'missed'}: {blow}" for blow in plan.blows)
    lines += (f"  {problem}" for problem in outcome.problems)
    print("\n".join([*lines, f"python -m tests.e2e.end_soak --runs 1 --seed {seed}"]), flush=True)


def main() -> int:
    """Returns 0 if every run ended well, 1 if one did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.end_soak")
    parser.add_argument("--runs", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first run's; each one has its own")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="side by side")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="end-soak-"))
    failed = soak(list(range(given.seed, given.seed + given.runs)), given.jobs, folder)
    if failed:
        print(f"its events and logs are in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
