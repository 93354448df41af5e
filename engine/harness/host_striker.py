"""Strikes hosts of a bed from outside, in the steps that a scenario names, and sees the struck processes end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.codec.records import encoded
from engine.core.checks.expectations import HostStrike
from engine.core.errors import EnvironmentLacksError
from engine.core.faults.fault import LEADER, STRIKES_NO_PROCESS, Fault, Host, InStep, Worker, chosen_host
from engine.core.history.evidence import linked_lines
from engine.core.history.process_records import EndedRecord, on_clock
from engine.core.history.run_records import CommitRecord, JobRecord, Record, StampedRecord
from engine.core.history.step_files import FOLDER, moved_entries, step_file
from engine.files.atomic_write import open_to_append, write_atomically
from engine.files.events_file import GrowingEvents, events_of, recorded
from engine.files.host_folders import collect
from engine.files.run_folder import RunFolder, run_names
from engine.harness.testbed import NETWORK, BedEtcd, BedHost, HostBed, started_pid
from engine.runtime.process import subprocesses
from engine.runtime.process.interrupts import breakable
from engine.runtime.process.subprocesses import is_readable

# The agents of one run on the hosts of a bed: the same line on each, and their events as they are written.


BED = "bed"  # the folder of the folders of results of the hosts, in that of the run
_OF_FIELDS = "BAMBOO_"  # variables that begin so are for the commands of the user, and change no scenario


@dataclass(frozen=True, slots=True)
class BedPlan:
    """A run on hosts of a bed: its folder, the file of its job, its name in the store, the time of a lease."""

    folder: RunFolder
    job_file: Path
    lease_s: int

    @property
    def run_id(self) -> str:
        """The name of the run in the store: that of its folder."""
        return self.folder.path.name

    def line(self, host: BedHost, number: int) -> list[str]:
        """Returns the command line of the agent of a host: the same on each but for its name and address."""
        words = ["agent", str(self.job_file), "--run", self.run_id, "--hosts", str(number), "--node", host.name]
        words += ["--address", host.address, "--trusted-network", NETWORK, "--lease", str(self.lease_s)]
        return subprocesses.module("bamboo_cli", *words, "--results", str(self.results(host)), "--trust-code")

    def results(self, host: BedHost) -> Path:
        """Returns the folder of results of a host."""
        return self.folder.path / BED / host.name

    def log(self, host: str) -> Path:
        """Returns the file with the output of the agent of a host."""
        return self.folder.logs / f"{host}.log"


@dataclass(slots=True)
class BedAgent:
    """The agent of a host; `entered` is the program that entered the host for it, and ends with its exit code."""

    host: BedHost
    results: Path
    entered: subprocess.Popen[bytes]
    _growing: dict[str, GrowingEvents] = field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        """The process of the agent, as this machine numbers it; None if it has ended."""
        return started_pid(self.entered)

    @property
    def folders(self) -> list[RunFolder]:
        """The run folders of this host that have events."""
        folders = [RunFolder(self.results / name) for name in run_names(self.results)]
        return [folder for folder in folders if folder.events.is_file()]

    def news(self) -> Iterator[Record]:
        """Yields the records that this host has written since the last call."""
        if not self._growing:
            self._growing = {each.path.name: GrowingEvents(each.events) for each in self.folders}
        for each in self._growing.values():
            yield from each.news()


class BedAgents:
    """All agents of a run, by the names of their hosts; `committed` and `coordinates` are as their events tell."""

    def __init__(self, run: BedPlan, bed: HostBed, etcd: BedEtcd):
        self.committed, self.coordinates = -1, ""
        self.num_records = 0
        strange = [name for name in os.environ if name.startswith(_OF_FIELDS) and name not in etcd.variables]
        unset = [word for name in strange for word in ("-u", name)]
        self.by_host: dict[str, BedAgent] = {}
        for host in bed.hosts:
            line = ["env", "-C", os.getcwd(), *unset, *run.line(host, len(bed.hosts))]
            with open(open_to_append(run.log(host.name)), "ab") as log:
                entered = host.start(*line, environment=etcd.variables, log=log)
            self.by_host[host.name] = BedAgent(host, run.results(host), entered)

    def look(self) -> None:
        """Reads the new records of all hosts."""
        for name, agent in self.by_host.items():
            for record in agent.news():
                self.num_records += 1
                if isinstance(record, CommitRecord) and record.step > self.committed:
                    self.committed, self.coordinates = record.step, name

    @property
    def have_ended(self) -> bool:
        """Whether all agents have ended."""
        return all(each.entered.poll() is not None for each in self.by_host.values())

    @property
    def codes(self) -> dict[str, int]:
        """The exit codes of the agents that have ended, negative for a signal, by host."""
        codes = {name: each.entered.poll() for name, each in self.by_host.items()}
        return {name: code for name, code in codes.items() if code is not None}

    @property
    def folders(self) -> list[RunFolder]:
        """The run folders of all hosts, that of the host that coordinated last first."""
        names = sorted(self.by_host, key=lambda name: name != self.coordinates)
        return [folder for name in names for folder in self.by_host[name].folders]


# The history of a run on a bed: the folders of its hosts, merged, on the clock of this machine and with the strikes.
#
# Rule: the clock of each host of a bed is ahead of this machine's by a known time, so strikes are told exactly.


def write_history(
    folder: RunFolder, folders: Sequence[RunFolder], ahead_ns: Mapping[str, int], strikes: Sequence[HostStrike]
) -> dict[str, Any]:
    """Writes the history of a run into its folder, from the `folders` of its hosts; returns the parts of it as values.

    Raises:
        StorageError: a line is damaged, or the folder cannot be written.
    """
    collect_result = collect(folders, folder.path)
    back_ns = ahead_ns[collect_result["reference"]]
    merged = [*recorded(folder.events)]
    write_atomically(folder.events, linked_lines(map(encoded, _with_strikes(merged, back_ns, strikes))))
    for path in sorted((folder.path / FOLDER).iterdir()):
        if (named := step_file(path.name)) is None:
            continue
        data = path.read_bytes()
        if named.worker is not None:
            write_atomically(path, moved_entries(data, lambda at_ns: at_ns - back_ns))
        else:
            lines = events_of(b"\n" + data, path, -1)
            moved = (_back(each, back_ns) for each in lines if isinstance(each, StampedRecord))
            write_atomically(path, linked_lines(map(encoded, moved)))
    return collect_result


def _with_strikes(merged: Sequence[Record], back_ns: int, strikes: Sequence[HostStrike]) -> Iterator[Record]:
    """Yields the records of the run with those of the strikes, without the end of the agents' command."""
    added = sorted((record for each in strikes for record in each.records()), key=lambda record: record.at_ns)
    for record in merged:
        if isinstance(record, EndedRecord):
            continue
        if not isinstance(record, StampedRecord):
            yield record
            continue
        moved = _back(record, back_ns)
        while added and added[0].at_ns <= moved.at_ns and not isinstance(record, JobRecord):
            yield added.pop(0)
        yield moved
    yield from added


def _back(record: StampedRecord, back_ns: int) -> StampedRecord:
    return on_clock(record, lambda at_ns: at_ns - back_ns)


_WORKER = "bamboo-"  # the names of the processes of workers begin so, and their numbers follow
_NONE_LEADS_S = 20.0  # for etcd to have a leader
_LOOK_S = 0.5
_ENDS_S = 10.0  # from the end of all agents to that of all struck processes


class _StrikeInProgress:
    """A strike; a thread waits for the ends of the struck processes, so that it sees them when they come."""

    def __init__(self, strike: HostStrike, pidfds: Sequence[int]):
        self._strike, self._pidfds = strike, pidfds
        self._ended_ns: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._see_ends, name="ends", daemon=True)
        self._thread.start()

    @property
    def strike(self) -> HostStrike:
        """The strike, with the time until the end of the last process, if that has come."""
        return replace(self._strike, ended_ns=self._ended_ns)

    def _see_ends(self) -> None:
        for pidfd in self._pidfds:
            while not is_readable(pidfd, _LOOK_S):
                if self._is_over.is_set():
                    return
        self._ended_ns = time.monotonic_ns() - self._strike.at_ns

    def close(self, within_s: float) -> None:
        """Waits for the ends so long at most: of a host that is cut off the agent ends a moment before its workers."""
        self._thread.join(within_s)
        self._is_over.set()
        self._thread.join()
        for each in self._pidfds:
            os.close(each)


class HostStriker:
    """Strikes the hosts of a run; a context manager, inside of which the ends of struck processes are seen."""

    def __init__(self, faults: Sequence[Fault], agents: BedAgents, etcd: BedEtcd, say: Callable[[str], None]):
        self._waiting = list(faults)
        self._agents, self._etcd, self._say = agents, etcd, say
        self._reached_ns: dict[int, int] = {}  # step -> when it was seen to begin
        self._strikes: list[_StrikeInProgress] = []
        self._open: list[_StrikeInProgress] = []  # those that are not closed
        self._lost: set[str] = set()
        self._leads: BedHost | None = None

    def __enter__(self) -> HostStriker:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle(0.0)

    def settle(self, within_s: float = _ENDS_S) -> None:
        """Waits for the ends of all struck processes."""
        until_s = time.monotonic() + within_s
        while self._open:
            self._open.pop().close(max(0.0, until_s - time.monotonic()))

    @property
    def strikes(self) -> list[HostStrike]:
        """The strikes so far, in order."""
        return [each.strike for each in self._strikes]

    def look(self) -> None:
        """Strikes at each moment that has come."""
        now_ns = time.monotonic_ns()
        for fault in [*self._waiting]:
            moment = fault.moment
            if isinstance(moment, InStep) and self._agents.committed >= moment.step - 1:
                since_ns = self._reached_ns.setdefault(moment.step, now_ns)
                if now_ns >= since_ns + moment.delay_ns:
                    self._waiting.remove(fault)
                    self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        left = {name: each.host for name, each in self._agents.by_host.items() if name not in self._lost}
        (victim,) = fault.victims
        if victim == Host(LEADER):
            self._leads = self._etcd.leader(first=self._leads)
        leads = self._leads.name if self._leads else ""
        if isinstance(victim, Host):
            chosen = chosen_host(victim.host, [*left], self._agents.coordinates, leads)
        else:
            chosen = next((name for name, host in left.items() if _struck_workers(fault, workers_of(host))), None)
        workers = {} if chosen is None else workers_of(left[chosen])
        pids = [] if chosen is None else self._struck_pids(fault, left[chosen], workers)
        if chosen is None or not (pids or fault.do in STRIKES_NO_PROCESS):
            self._say(f"{fault.id} finds nothing to strike: {fault.in_words('stage')}")
            return
        host = left[chosen]
        pidfds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
        at_ns = time.monotonic_ns()
        self._act(fault, host, pidfds)
        strike = HostStrike(fault, chosen, self._agents.committed + 1, at_ns, tuple(sorted(workers)))
        self._strikes.append(_StrikeInProgress(strike, pidfds))
        self._open.append(self._strikes[-1])
        self._lost |= {chosen} if strike.loses_host else set()
        is_chief = ", which coordinates" if chosen == self._agents.coordinates else ""
        self._say(f"step {strike.step}: {fault.do} {chosen}{is_chief}")
        if fault.do == "kill-etcd-leader":
            self._say(f"another member of etcd leads: that of {self._next_leader(host).name}")

    def _struck_pids(self, fault: Fault, host: BedHost, workers: Mapping[int, int]) -> list[int]:
        """Returns the processes whose end confirms the effect of a fault."""
        match fault.do:
            case "noop-host" | "slow-network":
                return []
            case "kill-etcd-leader":
                member = self._etcd.member_pid(host)
                return [] if member is None else [member]
            case "kill-worker":
                return _struck_workers(fault, workers)
            case "cut-host":
                return [*workers.values()]
            case "power-off":
                return [host.pid, *workers.values()]
        agent = self._agents.by_host[host.name].pid
        return [] if agent is None else [agent, *workers.values()]

    def _act(self, fault: Fault, host: BedHost, pidfds: Sequence[int]) -> None:
        match fault.do:
            case "noop-host":
                pass
            case "slow-network":
                host.slow_network()
            case "power-off":
                host.power_off()
            case "cut-host":
                host.cut()
            case _:  # the workers of an agent end with it
                signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)

    def _next_leader(self, killed: BedHost) -> BedHost:
        """Waits until another member leads; raises EnvironmentLacksError if none does."""
        until_s = time.monotonic() + _NONE_LEADS_S
        while True:
            with breakable(), contextlib.suppress(EnvironmentLacksError):
                return self._etcd.leader(but=killed)
            if time.monotonic() > until_s:
                raise EnvironmentLacksError(
                    f"no other member of etcd leads {_NONE_LEADS_S:g} s after that of {killed.name}"
                )


def _struck_workers(fault: Fault, workers: Mapping[int, int]) -> list[int]:
    return [workers[each.worker] for each in fault.victims if isinstance(each, Worker) and each.worker in workers]


def workers_of(host: BedHost) -> dict[int, int]:
    """Returns the workers on a host, each with its pid."""
    names = {pid: name.removeprefix(_WORKER) for pid, name in host.processes().items() if name.startswith(_WORKER)}
    return {int(name): pid for pid, name in names.items() if name.isdecimal()}
