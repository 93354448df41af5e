"""The benchmark of several hosts: losses of workers and hosts on hosts of namespaces, and quiet runs."""

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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from engine.bench.figures import (
    BenchRow,
    Cases,
    at_most,
    clock_widths_ms,
    commits_ns,
    gap_s,
    in_turns,
    known_s,
    limit_row,
    paired_row,
    row,
    usual_ns,
)
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

# A run on the hosts of a bed, or on one of them, as a benchmark sees it: its records grow, its processes are killed.
#
# Rules: the processes are those of this machine, so a kill is one call, at a time of a clock that all hosts share. Each
# host has a results folder of its own. Nothing of the caller's job files or of the variables ``BAMBOO_*`` is read.


_ROOT = Path(__file__).parents[2]
_LONGEST_S = 120.0  # for a condition
_LOOK_S = 0.004
_END_S = 5.0
_NAME = "bamboo-"  # of a worker's process, before its number


class BedRun:
    """The agents of one run, one on each host; without etcd the run of one host. A context: its end kills all."""

    def __init__(self, hosts: Sequence[BedHost], etcd: BedEtcd | None, folder: Path, job: Job):
        self._hosts = {each.name: each for each in hosts}
        self._folder, self._etcd = folder, etcd
        self._followed: dict[str, GrowingEvents] = {}
        self._records: dict[str, list[Record]] = {name: [] for name in self._hosts}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        fields = {key: value for key, value in asdict(job).items() if key not in ("results", "name")}
        write_atomically(folder / "job.yaml", json.dumps(fields))

    def __enter__(self) -> BedRun:
        for host in self._hosts.values():
            with open(open_to_append(self._folder / f"{host.name}.log"), "ab") as log:
                self._agents[host.name] = host.start(*self._line(host), environment=self._variables, log=log)
        return self

    def __exit__(self, *_: object) -> None:
        for name, each in self._agents.items():
            for process in self._processes(name):
                killed(process[1])
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(_END_S)

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
        """Reads the records that are new."""
        for name in self._hosts:
            results = self._folder / name
            if name not in self._followed and (names := run_names(results)):
                self._followed[name] = GrowingEvents(results / names[-1] / "events.jsonl")
            if name in self._followed:
                self._records[name] += self._followed[name].news()

    def until(self, is_so: Callable[[], bool], *lost: str) -> None:
        """Waits for a condition on the records; raises WorkerFailedError if an agent ends before that is not `lost`."""
        until_s = time.monotonic() + _LONGEST_S
        while True:
            self.look()
            if is_so():
                return
            for name, each in self._agents.items():
                if name not in lost and each.poll() is not None:
                    raise WorkerFailedError(
                        f"the agent of host {name} has ended with {each.poll()}: {self._said(name)}"
                    )
            if time.monotonic() > until_s:
                said = "; ".join(f"{name}: {self._said(name)}" for name in self._hosts)
                raise WorkerFailedError(f"the run stands still: {said}")
            time.sleep(_LOOK_S)

    def ended(self) -> dict[str, int]:
        """Waits for the ends of all agents; returns their exit codes."""
        codes = {name: each.wait(_LONGEST_S) for name, each in self._agents.items()}
        self.look()
        return codes

    def _said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace").strip()[-1000:]

    def num_commits(self) -> int:
        """Returns how many commits there are."""
        return len(
            {each.step for name in self._hosts for each in self._records[name] if isinstance(each, CommitRecord)}
        )

    def until_commits(self, more: int, *lost: str) -> None:
        """Waits for so many more commits."""
        self.look()
        wanted = self.num_commits() + more
        self.until(lambda: self.num_commits() >= wanted, *lost)

    def coordinator(self) -> str:
        """Returns the host that made the last epoch."""
        made = [
            (each.epoch, name) for name in self._hosts for each in self._records[name] if isinstance(each, EpochRecord)
        ]
        return max(made)[1]

    def workers_on(self, name: str) -> dict[int, int]:
        """Returns the workers of a host that live, each with its pid."""
        named = ((comm.removeprefix(_NAME), pid) for comm, pid in self._processes(name))
        return {int(number): pid for number, pid in named if number.isdecimal()}

    def agent_on(self, name: str) -> int:
        """Returns the pid of the agent of a host."""
        return next(self._processes(name))[1]

    def pid_of(self, worker: int) -> int:
        """Returns the pid of a worker, once training has begun."""
        self.until_commits(1)
        return next(found[worker] for each in self._hosts if worker in (found := self.workers_on(each)))

    def _processes(self, name: str) -> Iterator[tuple[str, int]]:
        """Yields the live processes of the run on a host, with their names; the first one is the agent."""
        by_parent, to_do = _by_parent(), [self._agents[name].pid]
        while to_do:
            for comm, pid in by_parent.get(to_do.pop(), ()):
                yield comm, pid
                to_do.append(pid)

    def records(self) -> Mapping[str, Sequence[Record]]:
        """Returns the records of each host so far, without actions."""
        self.look()
        return self._records

    def all_records(self, more: Sequence[StampedRecord] = ()) -> Iterator[Record]:
        """Yields the records of all hosts with actions, and some `more`, in the order of the clock that they share."""
        found: list[StampedRecord | ActionRecord] = [*more]
        first: JobRecord | None = None
        for each in self._followed.values():
            found += read_history(each.path, every_action=True).of(ActionRecord)
            for record in recorded(each.path):
                first = first or (record if isinstance(record, JobRecord) else None)
                if isinstance(record, StampedRecord) and not isinstance(record, JobRecord):
                    found.append(record)
        yield required(first, "a run has a job")
        yield from sorted(found, key=_time_of)


def _time_of(record: StampedRecord | ActionRecord) -> int:
    return record.end_ns if isinstance(record, ActionRecord) else record.at_ns


def killed(pid: int) -> int:
    """Kills a process with SIGKILL; returns the time."""
    at_ns = time.monotonic_ns()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return at_ns


def _by_parent() -> dict[int, list[tuple[str, int]]]:
    """Returns the processes of this machine by their parents."""
    found: dict[int, list[tuple[str, int]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                begin, _, rest = (entry / "stat").read_text().rpartition(")")
                found.setdefault(int(rest.split()[1]), []).append((begin.partition("(")[2], int(entry.name)))
    return found


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
_KNOWN_S, _PAUSE_MS = 0.025, 25.0
_CASE = "3 hosts, 6 workers, one is killed"


@dataclass(frozen=True, slots=True)
class Death:
    """The times of a death: until all workers of all hosts were told, and until the work was redone."""

    known_s: float
    pause_ms: float


def bench_deaths(num_deaths: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of so many deaths, or a few more, on each side; raises WorkerFailedError if a run failed."""
    with HostBed(3) as bed, tempfile.TemporaryDirectory(dir=folder) as own, BedEtcd(bed.hosts, Path(own)) as etcd:
        chosen = random.Random(0)  # noqa: S311 - every benchmark chooses the same moments
        orders = [chosen.sample(VICTIMS, min(num_deaths, 3)) for _ in range(-(-num_deaths // 3))]
        to_do = {side: iter(orders) for side in ("several", "one")}

        def run(side: str) -> list[Death]:
            is_one = side == "one"
            with tempfile.TemporaryDirectory(dir=own) as name:
                hosts, store = (bed.hosts[:1], None) if is_one else (bed.hosts, etcd)
                with BedRun(hosts, store, Path(name), JOB) as begun:
                    return _deaths(begun, next(to_do[side]), chosen)

        taken = in_turns({side: partial(run, side) for side in to_do}, len(orders))
    several, one = ([each for found in taken[side] for each in found] for side in to_do)
    return _rows(several, one)


def _deaths(run: BedRun, victims: Sequence[int], chosen: random.Random) -> list[Death]:
    killed_ns = {}
    for victim in victims:
        pid = run.pid_of(victim)
        run.until_commits(BETWEEN)
        time.sleep(chosen.random() * STEP_S)
        killed_ns[victim] = killed(pid)
    run.until_commits(BETWEEN)
    told = {victim: known_s(run.records(), [victim], at_ns) for victim, at_ns in killed_ns.items()}
    faults = [
        FaultRecord(fault=str(victim), do="kill", step=0, of=victim, slot=None, at_ns=at_ns)
        for victim, at_ns in killed_ns.items()
    ]
    found = recoveries(run.all_records(faults))
    ensure(len(found) == len(victims), f"{len(victims)} deaths are as many recoveries, not {len(found)}")
    return [
        Death(told[victim], required(each.pause_ns, "training went on") / 1e6)
        for victim, each in zip(victims, found, strict=True)
    ]


def _rows(several: Sequence[Death], one: Sequence[Death]) -> list[BenchRow]:
    rows = [
        limit_row(
            _CASE,
            f"SIGKILL to known on all hosts, p{100 * part:g} s",
            [each.known_s for each in several],
            part,
            _KNOWN_S,
        )
        for part in (0.5, 0.99)
    ]
    rows[0] = row(_CASE, rows[0].metric, rows[0].ours, median(each.known_s for each in one), len(several))
    for name, part, goal in (("median", 0.5, _PAUSE_MS), ("9 of 10 within", 0.9, None)):
        ours, peer = (at_most([each.pause_ms for each in side], part) for side in (several, one))
        limit = None if goal is None else peer + goal
        rows.append(row(_CASE, f"pause ms, {name}; peer: one host", ours, peer, len(several), limit))
    return rows


# Losses of agents and of hosts whose power goes, also of the one that coordinates, and with etcd's leader on it.
#
# Rules: a run loses one host, at a random moment of a step. Runs whose agents are killed share a bed; a host whose
# power is gone is gone with its bed. etcd's leader is moved to the host, or away from it, before the run begins. A gap
# is the time from the last commit before the loss to the next one, less that of a usual step.

_AGENT_KNOWN_S, _AGENT_GAP_S = 0.6, 1.0
_POWER_KNOWN_S, _POWER_GAP_S, _LEADER_S = USUAL_S + 1.0, USUAL_S + 2.0, 2 * USUAL_S + 3.0
_PARTS = (("median", 0.5), ("p99", 0.99))


def bench_agents(num_losses: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of so many agents killed that do not coordinate, and of as many that do."""
    chosen = random.Random(1)  # noqa: S311 - every benchmark chooses the same moments
    taken: dict[bool, list[float]] = {False: [], True: []}
    with HostBed(3) as bed, tempfile.TemporaryDirectory(dir=folder) as own, BedEtcd(bed.hosts, Path(own)) as etcd:
        for number in range(2 * num_losses):
            coordinates = bool(number % 2)
            taken[coordinates].append(_loss(bed, etcd, Path(own), chosen, coordinates=coordinates))
    known_case, gap_case = "3 hosts, an agent is killed", "3 hosts, the agent that coordinates is killed"
    return [
        *_rows_of_losses(known_case, "SIGKILL to known on all hosts s", taken[False], _AGENT_KNOWN_S),
        *_rows_of_losses(gap_case, "next commit s, beyond a usual step", taken[True], _AGENT_GAP_S),
    ]


def bench_power(num_losses: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of so many losses of power of each kind."""
    chosen = random.Random(2)  # noqa: S311 - every benchmark chooses the same moments
    kinds = [(coordinates, leads) for coordinates in (False, True) for leads in (False, True)]
    taken: dict[tuple[bool, bool], list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_losses):
        for coordinates, leads in kinds:
            with (
                HostBed(3) as bed,
                tempfile.TemporaryDirectory(dir=folder) as own,
                BedEtcd(bed.hosts, Path(own)) as etcd,
            ):
                found = _loss(bed, etcd, Path(own), chosen, coordinates=coordinates, leads=leads)
            taken[coordinates, leads].append(found)
    rows = []
    for coordinates, leads in kinds:
        who = "that coordinates " if coordinates else ""
        case = f"3 hosts, the power of one {who}goes, etcd's leader {'with it' if leads else 'stays'}"
        metric = "next commit s, beyond a usual step" if coordinates else "link cut to known on all hosts s"
        usual_s = _POWER_GAP_S if coordinates else _POWER_KNOWN_S
        goal_s = _LEADER_S if leads else usual_s
        rows += _rows_of_losses(case, metric, taken[coordinates, leads], goal_s)
    return rows


def _loss(
    bed: HostBed, etcd: BedEtcd, own: Path, chosen: random.Random, *, coordinates: bool, leads: bool | None = None
) -> float:
    """Returns the time of one loss: of power if etcd's leader has a place, else of an agent."""
    with tempfile.TemporaryDirectory(dir=own) as name, BedRun(bed.hosts, etcd, Path(name), JOB) as run:
        run.until_commits(BETWEEN)
        lost = next(each for each in bed.hosts if (each.name == run.coordinator()) is coordinates)
        workers, agent = run.workers_on(lost.name), run.agent_on(lost.name)
        if leads is not None:
            other = next(each for each in bed.hosts if each is not lost)
            etcd.lead(lost if leads else other)
            if (etcd.leader() is lost) is not leads:
                raise EnvironmentLacksError("etcd's leader does not stay where it was moved to")
        run.until_commits(BETWEEN)
        time.sleep(chosen.random() * STEP_S)
        if leads is None:
            at_ns = killed(agent)
        else:
            at_ns = time.monotonic_ns()
            lost.power_off()
        run.until_commits(BETWEEN, lost.name)
        if coordinates:
            return gap_s(commits_ns(run.records()), at_ns)
        return known_s(run.records(), workers, at_ns, {lost.name})


def _rows_of_losses(case: str, metric: str, taken: Sequence[float], goal_s: float) -> list[BenchRow]:
    """Returns the rows of the median, and of nearly all; both have to meet the goal."""
    return [
        row(case, f"{metric}, {name}; peer: limit", at_most(taken, part), goal_s, len(taken), goal_s)
        for name, part in _PARTS
    ]


# Runs on three hosts without a fault: the time of a step, beside that on one host; and what is known of the clocks.
#
# Rules: both kinds of runs take turns, in the same bed. A step takes 100 ms, of which its stages sleep nearly all.
# There is one worker per host, as all hosts share the cores of this machine. For the clocks each bed has other offsets,
# which are drawn; the records of all hosts count.

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
    with HostBed(3) as bed, tempfile.TemporaryDirectory(dir=folder) as own, BedEtcd(bed.hosts, Path(own)) as etcd:

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
        with HostBed(3, apart_s) as bed, tempfile.TemporaryDirectory(dir=folder) as own:
            ahead_ns = {each.name: number * apart_s * 1_000_000_000 for number, each in enumerate(bed.hosts)}
            with BedEtcd(bed.hosts, Path(own)) as etcd, BedRun(bed.hosts, etcd, Path(own), JOB) as run:
                run.until_commits(_CLOCK_STEPS)
                widths, outside = clock_widths_ms(run.records(), ahead_ns)
        widths_ms += widths
        num_outside += outside
    case, number = f"{2 * num_beds} drawn offsets of clocks", len(widths_ms)
    return [
        row(
            case,
            "width of the bounds ms, median; peer: limit",
            median(widths_ms),
            _WIDTH_GOAL_MS,
            number,
            _WIDTH_GOAL_MS,
        ),
        row(case, "bounds that lack the offset; peer: all", num_outside, number, number, 0.0),
    ]


# The cases of `bamboo bench hosts`: losses on three hosts of namespaces, with an etcd of three members over TLS.
USUAL = 20  # deaths of each kind; what takes longer is measured a quarter as often
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
