"""Faults of hosts: they strike agents, links, the power or etcd from outside of the hosts, on a bed of hosts to break.

Rules: a fault of a host has a moment that is seen from outside: so long after the step before it is committed. The
host is known at that moment only, unless it is named. A fault that surely ends the run, because etcd loses its majority
or no host is left, is refused before the run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from engine.core.config.job import Job
from engine.core.duration import duration_text
from engine.core.errors import Problem

HostFaultName = Literal[
    "kill-agent", "power-off", "cut-host", "kill-coordinator", "kill-etcd-leader", "kill-worker", "noop"
]
ABOUT: Mapping[HostFaultName, str] = MappingProxyType(
    {
        "kill-agent": "SIGKILL to the agent of a host, with which its workers end",
        "power-off": "the link of a host is cut, then all its processes end, so no word of them leaves it",
        "cut-host": "the link of a host is cut, and the host goes on: it ends its workers before its lease can expire",
        "kill-coordinator": "SIGKILL to the agent of the host that coordinates",
        "kill-etcd-leader": "SIGKILL to the member of etcd that leads; no host is lost",
        "kill-worker": "SIGKILL to one worker, from outside of its host",
        "noop": "nothing: the run of several hosts is compared with that of one",
    }
)
HOST_FAULTS: tuple[HostFaultName, ...] = get_args(HostFaultName)
OF_A_HOST = frozenset({"kill-agent", "power-off", "cut-host"})  # which take `host`
LOSES_A_HOST = OF_A_HOST | {"kill-coordinator"}
LOSES_A_MEMBER = frozenset({"power-off", "cut-host", "kill-etcd-leader"})  # of etcd, where one is on that host

COORDINATOR, LEADER, OTHER = "coordinator", "etcd-leader", "other"  # hosts that are known at the moment only
HOST_PATTERN = rf"h[0-9]{{1,2}}|{COORDINATOR}|{LEADER}|{OTHER}"
LEAST_HOSTS, MOST_HOSTS = 3, 16
MEMBERS = 3  # of etcd, on the first hosts


@dataclass(frozen=True, slots=True)
class HostFault:
    """A fault of a host: `delay_ns` after the step before `step` is committed; `host` is a name or stands for one.

    ``other`` is a host that does not coordinate; ``kill-worker`` strikes `worker`, on the host that it has.
    """

    id: str
    do: HostFaultName
    step: int
    delay_ns: int = 0
    host: str = OTHER
    worker: int | None = None

    def __str__(self) -> str:
        whom = f" {self.host}" if self.do in OF_A_HOST else f" {self.worker}" if self.worker is not None else ""
        delay = f", {duration_text(self.delay_ns)} after its begin" if self.delay_ns else ""
        return f"{self.do}{whom} in step {self.step}{delay}"


@dataclass(frozen=True, slots=True)
class OnHosts:
    """Where a scenario is to run: on so many hosts; None if that is not known, 0 for one host without a bed."""

    number: int | None = 0


ONE_HOST, ANY_HOSTS = OnHosts(), OnHosts(None)


def host_fault_problems(
    faults: Mapping[int, HostFault], on: OnHosts, job: Job | None, taken: Collection[str] = (), *, of_workers: bool
) -> list[Problem]:
    """Returns the problems of faults of hosts, by number; faults of workers have the ids `taken`, if there are any."""
    problems = [*_place(bool(faults), on, of_workers=of_workers)]
    seen: dict[str, str] = dict.fromkeys(taken, "a fault of a worker")
    for number, fault in faults.items():
        place = f"host_faults.{number}"
        if fault.id in seen:
            problems.append(Problem(f"{place}.id", "an id of its own", repr(fault.id), f"{seen[fault.id]} has it"))
        seen.setdefault(fault.id, place)
        problems += _one(place, fault, on, job)
    return [*problems, *_together(faults, on)]


def _place(there: bool, on: OnHosts, *, of_workers: bool) -> Iterator[Problem]:
    if there and on.number == 0:
        hint = "hosts to break are made by: bamboo inject SCENARIO --hosts 3"
        yield Problem("host_faults", "no faults of hosts in a run on one host", "some", hint)
    if of_workers and (there or on.number):
        hint = "on several hosts a worker is struck from outside: host_faults, do: kill-worker"
        yield Problem("faults", "no faults of workers beside hosts to break", "some", hint)


def _one(place: str, fault: HostFault, on: OnHosts, job: Job | None) -> Iterator[Problem]:
    if job is not None and (fault.step < 1 or (job.has_steps and fault.step >= job.steps)):
        last = job.steps - 1 if job.has_steps else "the last"
        hint = "" if fault.step else "a run that is struck before its first commit does not go on"
        yield Problem(f"{place}.at.step", f"a step from 1 to {last}", str(fault.step), hint)
    if fault.do not in OF_A_HOST and fault.host != OTHER:
        yield Problem(f"{place}.host", f"no host beside {fault.do}", repr(fault.host))
    elif on.number and (number := number_of(fault.host)) is not None and number >= on.number:
        yield Problem(f"{place}.host", f"a host from h0 to h{on.number - 1}", repr(fault.host))
    if (fault.worker is None) == (fault.do == "kill-worker"):
        expected = "the number of a worker" if fault.worker is None else f"no worker beside {fault.do}"
        yield Problem(f"{place}.worker", expected, "nothing" if fault.worker is None else str(fault.worker))
    elif fault.worker is not None and job is not None and fault.worker >= job.num_workers:
        yield Problem(f"{place}.worker", f"a worker from 0 to {job.num_workers - 1}", str(fault.worker))


def _together(faults: Mapping[int, HostFault], on: OnHosts) -> Iterator[Problem]:
    """Yields the problems of faults of which each alone would leave enough hosts and members."""
    named: dict[str, int] = {}
    lost = members = 0
    for number, fault in faults.items():
        place = f"host_faults.{number}"
        if (known := number_of(fault.host)) is not None and fault.do in OF_A_HOST:
            if fault.host in named:
                hint = f"host_faults.{named[fault.host]} strikes it already"
                yield Problem(f"{place}.host", "another host", repr(fault.host), hint)
            named.setdefault(fault.host, number)
        lost += fault.do in LOSES_A_HOST
        if on.number and fault.do in LOSES_A_HOST and lost == on.number:
            yield Problem(f"{place}.do", "a host that is left", repr(fault.do), f"there are {on.number}")
        members += fault.do in LOSES_A_MEMBER and (known is None or known < MEMBERS)
        if fault.do in LOSES_A_MEMBER and (known is None or known < MEMBERS) and members == 2:
            hint = f"etcd has {MEMBERS} members, on h0 to h{MEMBERS - 1}: strike h{MEMBERS}, or an agent"
            yield Problem(f"{place}.do", "a second fault that leaves etcd its majority", repr(fault.do), hint)


def number_of(host: str) -> int | None:
    """Returns the number of a host that is named, such as 2 for ``h2``; None for a word that stands for one."""
    return int(host[1:]) if re.fullmatch(r"h[0-9]+", host) else None


def chosen_host(fault: HostFault, hosts: Sequence[str], coordinates: str, leads: str) -> str | None:
    """Returns the host to strike, of the `hosts` that are left; None if the one that is meant is not left."""
    if fault.do == "kill-coordinator" or fault.host == COORDINATOR:
        wanted = coordinates
    elif fault.do == "kill-etcd-leader" or fault.host == LEADER:
        wanted = leads
    elif fault.host == OTHER:
        wanted = next((each for each in hosts if each != coordinates), "")
    else:
        wanted = fault.host
    return wanted if wanted in hosts else None
