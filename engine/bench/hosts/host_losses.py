"""Losses of agents and of hosts whose power goes, also of the one that coordinates, and with etcd's leader on it.

Rules: a run loses one host, at a random moment of a step. Runs whose agents are killed share a bed; a host whose power
is gone is gone with its bed. etcd's leader is moved to the host, or away from it, before the run begins. A gap is the
time from the last commit before the loss to the next one, less that of a usual step.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.bench.figures.host_times import commits_ns, gap_s, known_s
from engine.bench.figures.rows import BenchRow, at_most, row
from engine.bench.hosts.bed_run import BedRun, killed
from engine.bench.hosts.worker_deaths import BETWEEN, JOB, STEP_S
from engine.core.errors import EnvironmentLacksError
from engine.core.hosts.host_lease import USUAL_S
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import HostBed

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
        *_rows(known_case, "SIGKILL to known on all hosts s", taken[False], _AGENT_KNOWN_S),
        *_rows(gap_case, "next commit s, beyond a usual step", taken[True], _AGENT_GAP_S),
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
        rows += _rows(case, metric, taken[coordinates, leads], goal_s)
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


def _rows(case: str, metric: str, taken: Sequence[float], goal_s: float) -> list[BenchRow]:
    """Returns the rows of the median, and of nearly all; both have to meet the goal."""
    return [
        row(case, f"{metric}, {name}; peer: limit", at_most(taken, part), goal_s, len(taken), goal_s)
        for name, part in _PARTS
    ]
