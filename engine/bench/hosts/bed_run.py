"""A run on the hosts of a bed, or on one of them, as a benchmark sees it: its records grow, its processes are killed.

Rules: the processes are those of this machine, so a kill is one call, at a time of a clock that all hosts share. Each
host has a results folder of its own. Nothing of the caller's job files or of the variables ``BAMBOO_*`` is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.core.config.job import Job
from engine.core.errors import WorkerFailedError, required
from engine.core.history.record import Record, StampedRecord
from engine.core.history.run_records import ActionRecord, CommitRecord, EpochRecord, JobRecord
from engine.files.atomic_write import open_to_append, write_atomically
from engine.files.events_file import read_history, recorded
from engine.files.growing_events import GrowingEvents
from engine.files.run_folder import run_names
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import NETWORK, BedHost
from engine.runtime.process import subprocesses

_ROOT = Path(__file__).parents[3]
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
