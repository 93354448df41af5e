"""The agents of one run on the hosts of a bed: the same line on each, and their events as they are written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.history.record import Record
from engine.core.history.run_records import CommitRecord
from engine.files.atomic_write import open_to_append
from engine.files.growing_events import GrowingEvents
from engine.files.run_folder import RunFolder, run_names
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import NETWORK, BedHost, HostBed, started_pid
from engine.runtime.process import subprocesses

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
        found = [RunFolder(self.results / name) for name in run_names(self.results)]
        return [each for each in found if each.events.is_file()]

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
        found = {name: each.entered.poll() for name, each in self.by_host.items()}
        return {name: code for name, code in found.items() if code is not None}

    @property
    def folders(self) -> list[RunFolder]:
        """The run folders of all hosts, that of the host that coordinated last first."""
        names = sorted(self.by_host, key=lambda name: name != self.coordinates)
        return [folder for name in names for folder in self.by_host[name].folders]
