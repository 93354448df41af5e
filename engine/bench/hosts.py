"""The benchmark of several hosts: losses of workers and hosts, and runs without faults, on hosts of namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

from engine.bench.figures import (
    BenchRow,
    Cases,
    at_most,
    clock_widths_ms,
    commits_ns,
    fenced_s,
    gap_s,
    in_turns,
    limit_row,
    paired_row,
    row,
    usual_ns,
)
from engine.bench.runs import job_fields
from engine.core.checks.recoveries import recoveries
from engine.core.errors import EnvironmentLacksError, WorkerFailedError, ensure, required
from engine.core.history.run_records import (
    ActionRecord,
    CommitRecord,
    EpochRecord,
    FaultRecord,
    JobRecord,
    Record,
    StampedRecord,
)
from engine.core.hosts.ends import USUAL_S
from engine.core.job.job import Job
from engine.files.atomic_write import open_to_append, write_atomically
from engine.files.events_file import GrowingEvents, read_history, recorded
from engine.files.run_folder import run_names
from engine.harness.testbed import NETWORK, BedEtcd, BedHost, HostBed
from engine.runtime.process import subprocesses

# A run on the hosts of a bed, or on one of them, whose records grow and whose processes are killed.
#
# Rules: the processes are local, so a kill is one call, at a time on a clock that all hosts share. Each host has its
# own results folder. Neither the caller's job files nor the variables ``BAMBOO_*`` are read.

_LONGEST_S = 120.0  # for a condition
_LOOK_S = 0.004
_END_S = 5.0
_NAME = "bamboo-"  # of a worker's process, before its number
AnyRecord = TypeVar("AnyRecord", bound=Record)


class BedRun:
    """The agents of one run, one on each host; without etcd the run of one host. A context: its end kills all."""

    def __init__(self, hosts: Sequence[BedHost], etcd: BedEtcd | None, folder: Path, job: Job):
        self._hosts = {host.name: host for host in hosts}
        self._folder, self._etcd = folder, etcd
        self._followed: dict[str, GrowingEvents] = {}
        self._records: dict[str, list[Record]] = {name: [] for name in self._hosts}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        write_atomically(folder / "job.yaml", json.dumps(job_fields(job)))

    def __enter__(self) -> BedRun:
        for host in self._hosts.values():
            with open(open_to_append(self._folder / f"{host.name}.log"), "ab") as log:
                self._agents[host.name] = host.start(*self._line(host), environment=self._variables, log=log)
        return self

    def __exit__(self, *_: object) -> None:
        for name, agent in self._agents.items():
            for _comm, pid in self._processes(name):
                kill(pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_END_S)

    @property
    def _variables(self) -> Mapping[str, str]:
        own = {"PYTHONPATH": subprocesses.python_path(), "XDG_CONFIG_HOME": str(self._folder)}
        return own | ({} if self._etcd is None else self._etcd.variables)

    def _line(self, host: BedHost) -> list[str]:
        others = [
            f"--unset={name}" for name in os.environ if name.startswith("BAMBOO_") and name not in self._variables
        ]
        line = ["env", *others, sys.executable, "-P", "-m", "bamboo_cli"]
        results = ["--results", str(self._folder / host.name)]
        if self._etcd is None:
            return [*line, "run", str(self._folder / "job.yaml"), *results]
        place = ["--node", host.name, "--address", host.address, "--trusted-network", NETWORK]
        several = ["--run", self._folder.name, "--hosts", str(len(self._hosts)), *place]
        return [*line, "agent", str(self._folder / "job.yaml"), *several, *results]

    def look(self) -> None:
        """Reads the new records."""
        for name in self._hosts:
            results = self._folder / name
            if name not in self._followed and (names := run_names(results)):
                self._followed[name] = GrowingEvents(results / names[-1] / "events.jsonl")
            if name in self._followed:
                self._records[name] += self._followed[name].news()

    def until(self, is_so: Callable[[], bool], *lost: str) -> None:
        """Waits for a condition on the records; raises WorkerFailedError if another agent than of `lost` hosts ends."""
        until_s = time.monotonic() + _LONGEST_S
        while True:
            self.look()
            if is_so():
                return
            for name, agent in self._agents.items():
                if name not in lost and (code := agent.poll()) is not None:
                    raise WorkerFailedError(f"the agent of host {name} has ended with {code}: {self._log_of(name)}")
            if time.monotonic() > until_s:
                logs = "; ".join(f"{name}: {self._log_of(name)}" for name in self._hosts)
                raise WorkerFailedError(f"the run stands still: {logs}")
            time.sleep(_LOOK_S)

    def ended(self) -> dict[str, int]:
        """Waits for the ends of all agents; returns their exit codes."""
        codes = {name: agent.wait(_LONGEST_S) for name, agent in self._agents.items()}
        self.look()
        return codes

    def _log_of(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace").strip()[-1000:]

    def _of_hosts(self, kind: type[AnyRecord]) -> Iterator[tuple[str, AnyRecord]]:
        for name, records in self._records.items():
            yield from ((name, record) for record in records if isinstance(record, kind))

    def num_commits(self) -> int:
        """Returns the number of commits so far."""
        return len({record.step for _, record in self._of_hosts(CommitRecord)})

    def until_commits(self, more: int, *lost: str) -> None:
        """Waits for that many more commits."""
        self.look()
        target = self.num_commits() + more
        self.until(lambda: self.num_commits() >= target, *lost)

    def coordinator(self) -> str:
        """Returns the host that made the last epoch."""
        return max((record.epoch, name) for name, record in self._of_hosts(EpochRecord))[1]

    def workers_on(self, name: str) -> dict[int, int]:
        """Returns the live workers of a host, each with its pid."""
        named = ((comm.removeprefix(_NAME), pid) for comm, pid in self._processes(name))
        return {int(number): pid for number, pid in named if number.isdecimal()}

    def agent_on(self, name: str) -> int:
        """Returns the pid of the agent of a host."""
        return next(self._processes(name))[1]

    def pid_of(self, worker: int) -> int:
        """Returns the pid of a worker, once training has begun."""
        self.until_commits(1)
        return {worker: pid for name in self._hosts for worker, pid in self.workers_on(name).items()}[worker]

    def _processes(self, name: str) -> Iterator[tuple[str, int]]:
        """Yields the names and pids of the run's live processes on a host, first that of the agent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._agents[name].pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    yield process.name(), process.pid

    def records(self) -> Mapping[str, Sequence[Record]]:
        """Returns the records of each host so far, without actions."""
        self.look()
        return self._records

    def all_records(self, more: Sequence[StampedRecord] = ()) -> Iterator[Record]:
        """Yields the records of all hosts with actions, and some `more`, in the order of the shared clock."""
        timed: list[tuple[int, Record]] = [(record.at_ns, record) for record in more]
        first: JobRecord | None = None
        for events in self._followed.values():
            actions = read_history(events.path, every_action=True).of(ActionRecord)
            timed += [(action.end_ns, action) for action in actions]
            for record in recorded(events.path):
                if isinstance(record, JobRecord):
                    first = first or record
                elif isinstance(record, StampedRecord):
                    timed.append((record.at_ns, record))
        yield required(first, "a run has a job")
        yield from (record for _, record in sorted(timed, key=itemgetter(0)))


def kill(pid: int) -> int:
    """Kills a process with SIGKILL; returns the time."""
    at_ns = time.monotonic_ns()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return at_ns


@contextlib.contextmanager
def _bed(folder: Path, apart_s: int = 0) -> Iterator[tuple[HostBed, BedEtcd, Path]]:
    """Yields three hosts, their etcd, and a folder for the block."""
    with (
        HostBed(3, apart_s) as bed,
        tempfile.TemporaryDirectory(dir=folder) as own,
        BedEtcd(bed.hosts, Path(own)) as etcd,
    ):
        yield bed, etcd, Path(own)


# Deaths of workers in runs on three hosts, beside the same deaths in runs on one of them.
#
# Rules: both kinds of runs take turns, in the same bed. In a run one worker of each host dies, one after the other, at
# a random moment of a step. The pause is that of `bamboo bench recovery`: from the kill to the catch-up point.

JOB = Job(
    model="timed",
    model_args={"layers": 6, "forward_ms": 4, "backward_ms": 7, "width": 256},
    data_args={"features": 256},
    stages=6,
    microbatches=4,
    steps=100_000,
    warmup_steps=0,
    audit=0,
    validate_every=0,
    checkpoint_every="0",
)
STEP_S = (JOB.microbatches + JOB.stages - 1) * 0.011
VICTIMS = (1, 3, 5)  # one of each host
BETWEEN = 4  # commits, from the start to the first death and from each one to the next
_FENCED_S, _PAUSE_MS = 0.025, 25.0
_CASE = "3 hosts, 6 workers, one is killed"


@dataclass(frozen=True, slots=True)
class Death:
    """The times of a death: until all workers of all hosts knew of it, and until the work was redone."""

    fenced_s: float
    pause_ms: float


def bench_deaths(num_deaths: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of that many deaths, or a few more, on each side; raises WorkerFailedError if a run failed."""
    with _bed(folder) as (bed, etcd, own):
        chosen = random.Random(0)  # noqa: S311 - every benchmark chooses the same moments
        orders = [chosen.sample(VICTIMS, min(num_deaths, 3)) for _ in range(-(-num_deaths // 3))]
        to_do = {side: iter(orders) for side in ("several", "one")}

        def run(side: str) -> list[Death]:
            is_one = side == "one"
            with tempfile.TemporaryDirectory(dir=own) as name:
                hosts, store = (bed.hosts[:1], None) if is_one else (bed.hosts, etcd)
                with BedRun(hosts, store, Path(name), JOB) as begun:
                    return _deaths(begun, next(to_do[side]), chosen)

        results = in_turns({side: partial(run, side) for side in to_do}, len(orders))
    several, one = ([death for deaths in results[side] for death in deaths] for side in to_do)
    return _rows(several, one)


def _deaths(run: BedRun, victims: Sequence[int], chosen: random.Random) -> list[Death]:
    killed_ns = {}
    for victim in victims:
        pid = run.pid_of(victim)
        run.until_commits(BETWEEN)
        time.sleep(chosen.random() * STEP_S)
        killed_ns[victim] = kill(pid)
    run.until_commits(BETWEEN)
    times_s = {victim: fenced_s(run.records(), at_ns) for victim, at_ns in killed_ns.items()}
    faults = [
        FaultRecord(fault=str(victim), do="kill", step=0, of=victim, slot=None, at_ns=at_ns)
        for victim, at_ns in killed_ns.items()
    ]
    pauses_ns = [recovery.pause_ns for recovery in recoveries(run.all_records(faults))]
    ensure(len(pauses_ns) == len(victims), f"{len(victims)} deaths are as many recoveries, not {len(pauses_ns)}")
    return [
        Death(times_s[victim], required(pause_ns, "training went on") / 1e6)
        for victim, pause_ns in zip(victims, pauses_ns, strict=True)
    ]


def _rows(several: Sequence[Death], one: Sequence[Death]) -> list[BenchRow]:
    metric, times_s = "SIGKILL to all hosts fenced", [death.fenced_s for death in several]
    usual_s = median(death.fenced_s for death in one)
    rows = [
        row(_CASE, f"{metric}, p50 s", at_most(times_s, 0.5), usual_s, len(several)),
        limit_row(_CASE, f"{metric}, p99 s", times_s, 0.99, _FENCED_S),
    ]
    for name, part, goal in (("median", 0.5, _PAUSE_MS), ("9 of 10 within", 0.9, None)):
        ours, peer = (at_most([death.pause_ms for death in side], part) for side in (several, one))
        limit = None if goal is None else peer + goal
        rows.append(row(_CASE, f"pause ms, {name}; peer: one host", ours, peer, len(several), limit))
    return rows


# Losses of agents and of power, also on the coordinating host, and with etcd's leader on it.
#
# Rules: a run loses one host, at a random moment of a step. Runs whose agents are killed share a bed; a loss of power
# uses it up. etcd's leader is moved to the host, or away from it, before the run begins. A gap is the time from the
# last commit before the loss to the next one, less that of a usual step.

_AGENT_FENCED_S, _AGENT_GAP_S = 0.6, 1.0
_POWER_FENCED_S, _POWER_GAP_S, _LEADER_S = USUAL_S + 1.0, USUAL_S + 2.0, 2 * USUAL_S + 3.0
_PARTS = (("median", 0.5), ("p99", 0.99))


def bench_agents(num_losses: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of that many agents killed that do not coordinate, and of as many that do."""
    chosen = random.Random(1)  # noqa: S311 - every benchmark chooses the same moments
    losses: dict[bool, list[float]] = {False: [], True: []}
    with _bed(folder) as (bed, etcd, own):
        for number in range(2 * num_losses):
            coordinates = bool(number % 2)
            losses[coordinates].append(_loss(bed, etcd, own, chosen, coordinates=coordinates))
    known_case, gap_case = "3 hosts, an agent is killed", "3 hosts, the agent that coordinates is killed"
    return [
        *_rows_of_losses(known_case, "SIGKILL to known on all hosts s", losses[False], _AGENT_FENCED_S),
        *_rows_of_losses(gap_case, "next commit s, beyond a usual step", losses[True], _AGENT_GAP_S),
    ]


def bench_power(num_losses: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of that many losses of power of each kind."""
    chosen = random.Random(2)  # noqa: S311 - every benchmark chooses the same moments
    kinds = [(coordinates, leads) for coordinates in (False, True) for leads in (False, True)]
    losses: dict[tuple[bool, bool], list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_losses):
        for coordinates, leads in kinds:
            with _bed(folder) as (bed, etcd, own):
                loss_s = _loss(bed, etcd, own, chosen, coordinates=coordinates, leads=leads)
            losses[coordinates, leads].append(loss_s)
    rows = []
    for coordinates, leads in kinds:
        who = "that coordinates " if coordinates else ""
        case = f"3 hosts, the power of one {who}goes, etcd's leader {'with it' if leads else 'stays'}"
        metric = "next commit s, beyond a usual step" if coordinates else "link cut to known on all hosts s"
        usual_s = _POWER_GAP_S if coordinates else _POWER_FENCED_S
        goal_s = _LEADER_S if leads else usual_s
        rows += _rows_of_losses(case, metric, losses[coordinates, leads], goal_s)
    return rows


def _loss(
    bed: HostBed, etcd: BedEtcd, own: Path, chosen: random.Random, *, coordinates: bool, leads: bool | None = None
) -> float:
    """Returns the time of one loss: of an agent, or of power if `leads` says whether etcd's leader goes with it."""
    with tempfile.TemporaryDirectory(dir=own) as name, BedRun(bed.hosts, etcd, Path(name), JOB) as run:
        run.until_commits(BETWEEN)
        lost = next(host for host in bed.hosts if (host.name == run.coordinator()) is coordinates)
        agent = run.agent_on(lost.name)
        if leads is not None:
            other = next(host for host in bed.hosts if host is not lost)
            etcd.lead(lost if leads else other)
            if (etcd.leader() is lost) is not leads:
                raise EnvironmentLacksError("etcd's leader does not stay where it was moved to")
        run.until_commits(BETWEEN)
        time.sleep(chosen.random() * STEP_S)
        if leads is None:
            at_ns = kill(agent)
        else:
            at_ns = time.monotonic_ns()
            lost.power_off()
        run.until_commits(BETWEEN, lost.name)
        if coordinates:
            return gap_s(commits_ns(run.records()), at_ns)
        return fenced_s(run.records(), at_ns, {lost.name})


def _rows_of_losses(case: str, metric: str, losses: Sequence[float], goal_s: float) -> list[BenchRow]:
    return [
        row(case, f"{metric}, {name}; peer: limit", at_most(losses, part), goal_s, len(losses), goal_s)
        for name, part in _PARTS
    ]


# Runs on three hosts without faults: the time of a step, beside that on one host; and the bounds of the clocks.
#
# Rules: both kinds of runs take turns, in the same bed. A step takes 100 ms, during most of which its stages sleep.
# There is one worker per host, as all hosts share the cores of this machine. For the clocks each bed has other, random
# offsets; the records of all hosts count.

_STEP_GOAL, _WIDTH_GOAL_MS = 1.03, 1.0
_WARM, _STEPS = 10, 60
_MOST_APART_S = 100_000  # more than a day
_CLOCK_STEPS = 120
_QUIET_CASE = "3 hosts, 3 workers, no fault"
_STEP_JOB = replace(
    JOB, stages=3, model_args={"layers": 3, "forward_ms": 6, "backward_ms": 11, "width": 256}, steps=_STEPS
)


def bench_steps(num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time of a step; raises WorkerFailedError if a run failed."""
    with _bed(folder) as (bed, etcd, own):

        def step_ms(*, is_one: bool) -> float:
            hosts, store = (bed.hosts[:1], None) if is_one else (bed.hosts, etcd)
            with tempfile.TemporaryDirectory(dir=own) as name:
                with BedRun(hosts, store, Path(name), _STEP_JOB) as run:
                    codes = run.ended()
                ensure(not any(codes.values()), f"the runs ended with {codes}")
                return usual_ns(commits_ns(run.records())[_WARM:]) / 1e6

        sides = {is_one: partial(step_ms, is_one=is_one) for is_one in (False, True)}
        several, one = in_turns(sides, num_pairs).values()
    return [paired_row(_QUIET_CASE, "step ms, median; peer: one host", several, one, _STEP_GOAL)]


def bench_clocks(num_beds: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the bounds of clocks; raises WorkerFailedError if a run failed."""
    drawn = random.Random()  # noqa: S311 - other offsets each time
    widths_ms: list[float] = []
    num_outside = 0
    for _ in range(num_beds):
        apart_s = drawn.randint(1, _MOST_APART_S)
        with _bed(folder, apart_s) as (bed, etcd, own), BedRun(bed.hosts, etcd, own, JOB) as run:
            ahead_ns = {host.name: number * apart_s * 1_000_000_000 for number, host in enumerate(bed.hosts)}
            run.until_commits(_CLOCK_STEPS)
            widths, outside = clock_widths_ms(run.records(), ahead_ns)
        widths_ms += widths
        num_outside += outside
    case, number = f"{2 * num_beds} drawn offsets of clocks", len(widths_ms)
    metric = "width of the bounds ms, median; peer: limit"
    return [
        row(case, metric, median(widths_ms), _WIDTH_GOAL_MS, number, _WIDTH_GOAL_MS),
        row(case, "bounds that lack the offset; peer: all", num_outside, number, number, 0.0),
    ]


USUAL = 20  # deaths of each kind; longer measurements are made a quarter as often
_QUARTER = 4


def host_cases(quick: bool, repeats: int = USUAL) -> Cases:
    """Returns the cases of `bamboo bench hosts`."""
    many = 1 if quick else repeats
    few = max(1, many // _QUARTER)
    return {
        "workers": partial(bench_deaths, many),
        "agents": partial(bench_agents, many),
        "power": partial(bench_power, few),
        "steps": partial(bench_steps, few),
        "clocks": partial(bench_clocks, few),
    }
