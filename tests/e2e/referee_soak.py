"""``python -m tests.e2e.referee_soak``: the stalls that the referee tells, beside those that an observer has seen.

The jobs of `bamboo bench referee` are struck four times each. The observer is another process, which only looks at the
sizes of the files of reports, with its own clock. A stall must be told within 50 ms or 2 %. Beside each job run foreign
processes: a second job with the same ranks, and one that gets the process number of a rank that was killed. None of
them may ever stop or end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from engine.bench.referee import SYSTEMS
from engine.core.checks.external_report import ExternalRun, StrikeMade
from engine.core.checks.recoveries import USUAL
from engine.core.faults.external import ExternalFault, ExternalMoment, ExternalScenario, ExternalTarget
from engine.core.faults.launchers import LAUNCHERS
from engine.external.kinds import external_kinds
from engine.external.referee import Referee
from engine.runtime.faults.registry import kinds
from engine.runtime.process.interrupts import holding

_SYSTEMS = ("torchrun", "accelerate", "bamboo")
_KINDS = ("pause", "kill", "pause", "pause")  # of the strikes of a run
_BETWEEN, _MORE = 45, 12  # steps from one strike to the next, and at random beyond that
_STEPS = (_BETWEEN + _MORE) * (len(_KINDS) + 1)
_FEW = 4  # steps behind a kill
_FAR_NS, _FAR = 50_000_000, 0.02
_TIMEOUT_NS = 240 * 10**9
_OBSERVER = """
import os, sys, time
folder, sizes = sys.argv[1], {}
while True:
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        size = entry.stat().st_size
        if entry.name.count(".") == 1 and size > sizes.get(entry.name, 0):
            sizes[entry.name] = size
            print(time.monotonic_ns(), entry.name, flush=True)
    time.sleep(0.002)
"""


class Growth(NamedTuple):
    """A file of reports was longer than at the last look."""

    at_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class Case:
    """One strike: the stall as told, and as observed; None if there was none."""

    system: str
    kind: str
    told_ns: int | None
    seen_ns: int | None

    @property
    def is_true(self) -> bool:
        """Whether both are the same within the limit."""
        if self.told_ns is None or self.seen_ns is None:  # training did not go on
            return self.told_ns == self.seen_ns
        return abs(self.told_ns - self.seen_ns) <= max(_FAR_NS, _FAR * self.seen_ns)


class Beside:
    """Foreign processes beside a job, with the ranks of its own in their environment."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.num_reused = 0
        for rank in (0, 1):
            self._start(rank)

    def _start(self, rank: int) -> int:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        self.all.append(subprocess.Popen(["/bin/sleep", "900"], env=ranks))
        return self.all[-1].pid

    def follow(self, events: Path, is_over: threading.Event) -> None:
        """Starts a process with the number of each rank that ends, if nobody is faster; needs root."""
        taken = set[int]()
        while not is_over.wait(0.005):
            for line in events.read_text().splitlines() if events.exists() else ():
                event = json.loads(line) if '"RankEnded"' in line and line.endswith("}") else {}
                if (pid := event.get("pid", 0)) and pid not in taken:
                    taken.add(pid)
                    while os.path.exists(f"/proc/{pid}") and not is_over.wait(0.001):
                        pass  # its launcher has not taken its exit code yet
                    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
                    self.num_reused += self._start(event["rank"]) == pid

    def struck(self) -> int:
        """Returns how many have ended, or have ever been stopped."""
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        return sum(os.waitpid(each.pid, flags) != (0, 0) for each in self.all)

    def close(self) -> None:
        """Ends them."""
        for each in self.all:
            each.kill()
            each.wait()


def plan_of(seed: int) -> list[ExternalFault]:
    """Returns the faults of a run, the kill on rank 1: in bamboo, nobody has this number behind it."""
    draw, step, faults = random.Random(seed), 0, []  # noqa: S311 - which moments are struck
    for number, kind in enumerate(_KINDS):
        step += _BETWEEN + draw.randrange(_MORE)
        rank = draw.randrange(2) if not number else int(kind == "kill")
        parameters = {"for_ns": draw.randrange(200, 2500) * 10**6} if kind == "pause" else {}
        moment = ExternalMoment(step=step, delay_ns=draw.randrange(40) * 10**6)
        faults.append(ExternalFault(f"{kind}-{number}", moment, ExternalTarget(rank), kind, parameters))
    return faults


def run_of(system: str, faults: Sequence[ExternalFault], folder: Path, beside: Beside) -> list[Case]:
    """Runs a job with its strikes, its observer and the processes beside it; returns what was told and seen."""
    of, seen = SYSTEMS[system], folder / "seen"
    command = ("env", f"STEPS={_STEPS}", *of.command)
    scenario = ExternalScenario("soak", "", command, LAUNCHERS[of.launcher], tuple(faults), timeout_ns=_TIMEOUT_NS)
    (folder / "logs").mkdir(parents=True)
    is_over = threading.Event()
    follower = threading.Thread(target=beside.follow, args=(folder / "events.jsonl", is_over))
    with seen.open("wb") as file, holding() as interrupts:
        observer = subprocess.Popen([sys.executable, "-c", _OBSERVER, str(folder / "progress")], stdout=file)
        follower.start()
        try:
            run = Referee(scenario, external_kinds(kinds()), folder, str).run(interrupts)
        finally:
            is_over.set()
            follower.join()
            observer.kill()
            observer.wait()
    if interrupts.first is not None:
        sys.exit(128 + interrupts.first)
    lines = (line.split() for line in seen.read_text().splitlines())
    return cases_of(system, run, faults, [Growth(int(at_ns), name) for at_ns, name in lines])


def cases_of(system: str, run: ExternalRun, faults: Sequence[ExternalFault], growths: Sequence[Growth]) -> list[Case]:
    """Returns the strikes of a run with the stalls that were told and seen."""
    told = {name: each for each in run.recoveries() for name in each.faults}
    strikes: dict[str, StrikeMade] = {each.fault: each for each in run.of(StrikeMade)}
    cases = []
    for fault in (each for each in faults if each.id in strikes):
        stall = told[fault.id].stall if fault.id in told else None
        told_ns = stall.least_ns if stall and told[fault.id].resume_ns else None
        seen_ns = seen_stall(fault, strikes[fault.id].at_ns, growths)
        cases.append(Case(system, fault.do, told_ns, seen_ns))
    return cases


def seen_stall(fault: ExternalFault, struck_ns: int, growths: Sequence[Growth]) -> int | None:
    """Returns the longest time without growth until the victim reports again, less a usual step.

    A rank that was killed reports in another file. The files of a job whose launcher reports have no rank: the first
    report behind a kill may be of a step that had ended, so the longest time of a few steps counts.
    """
    before = [each for each in growths if each.at_ns <= struck_ns]
    old = {each.name for each in before}
    resumed_ns = struck_ns + int(fault.parameters.get("for_ns", 0))
    own = [each for each in growths if each.at_ns > resumed_ns and each.name.startswith(f"{fault.target.rank}-")]
    if not any(each.name.startswith(("0-", "1-")) for each in growths):
        own = [each for each in growths if each.at_ns > resumed_ns][(_FEW - 1) * (fault.do == "kill") :]
    elif fault.do == "kill":
        own = [each for each in own if each.name not in old]
    if not own or not before:
        return None
    steps = {name: [each.at_ns for each in before if each.name == name][1:][-USUAL:] for name in old}
    usual_ns = median(later - earlier for times in steps.values() for earlier, later in pairwise(times))
    times = [before[-1].at_ns, *(each.at_ns for each in growths if struck_ns < each.at_ns <= own[0].at_ns)]
    return max(0, max(later - earlier for earlier, later in pairwise(times)) - int(usual_ns))


def main() -> int:
    """Returns 0 if every stall was told as it was seen, and no foreign process was struck; else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.referee_soak")
    parser.add_argument("--strikes", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first run's; each one has its own")
    given = parser.parse_args()
    cases: list[Case] = []
    num_beside = num_reused = num_struck = 0
    with tempfile.TemporaryDirectory(prefix="referee-soak-") as place:
        for seed, system in enumerate(cycle(_SYSTEMS), given.seed):
            beside = Beside()
            try:
                new = run_of(system, plan_of(seed), Path(place) / str(seed), beside)
                num_beside, num_reused = num_beside + len(beside.all), num_reused + beside.num_reused
                num_struck += beside.struck()
            finally:
                beside.close()
            cases += new
            for each in new:
                word = "true" if each.is_true else "WRONG"
                told, seen = (None if ns is None else round(ns / 1e6, 1) for ns in (each.told_ns, each.seen_ns))
                print(f"{word}: {each.system} {each.kind}: told {told} ms, seen {seen} ms (seed {seed})", flush=True)
            if len(cases) >= given.strikes:
                break
    wrong = sum(not each.is_true for each in cases)
    apart = [
        abs(each.told_ns - each.seen_ns) / 1e6
        for each in cases
        if each.told_ns is not None and each.seen_ns is not None
    ]
    print(f"{len(cases)} strikes, {wrong} told wrongly; apart by {median(apart):.1f} ms, at most {max(apart):.1f} ms")
    print(f"{num_beside} foreign processes, {num_reused} with the number of a dead rank: {num_struck} struck")
    return int(wrong > 0 or num_struck > 0)


if __name__ == "__main__":
    sys.exit(main())
