"""Strikes hosts of a bed from outside, in the steps that a scenario names, and sees the struck processes end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine.core.checks.host_losses import HostStrike
from engine.core.errors import EnvironmentLacksError
from engine.core.faults.host_fault import LEADER, HostFault, chosen_host
from engine.harness.bed.bed_etcd import BedEtcd
from engine.harness.bed.host_bed import BedHost
from engine.harness.breaking.bed_agents import BedAgents
from engine.runtime.process.interrupts import breakable
from engine.runtime.process.subprocesses import is_readable

_WORKER = "bamboo-"  # the names of the processes of workers begin so, and their numbers follow
_NONE_LEADS_S = 20.0  # for etcd to have a leader
_LOOK_S = 0.5
_ENDS_S = 10.0  # from the end of all agents to that of all struck processes


class _Blow:
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
        for each in self._pidfds:
            while not is_readable(each, _LOOK_S):
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

    def __init__(self, faults: Sequence[HostFault], agents: BedAgents, etcd: BedEtcd, say: Callable[[str], None]):
        self._waiting = list(faults)
        self._agents, self._etcd, self._say = agents, etcd, say
        self._reached_ns: dict[int, int] = {}  # step -> when it was seen to begin
        self._blows: list[_Blow] = []
        self._open: list[_Blow] = []  # those that are not closed
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
        return [each.strike for each in self._blows]

    def look(self) -> None:
        """Strikes at each moment that has come."""
        now_ns = time.monotonic_ns()
        for fault in [*self._waiting]:
            if self._agents.committed >= fault.step - 1:
                since_ns = self._reached_ns.setdefault(fault.step, now_ns)
                if now_ns >= since_ns + fault.delay_ns:
                    self._waiting.remove(fault)
                    self._strike(fault)

    def _strike(self, fault: HostFault) -> None:
        left = {name: each.host for name, each in self._agents.by_host.items() if name not in self._lost}
        if fault.do == "kill-etcd-leader" or fault.host == LEADER:
            self._leads = self._etcd.leader(first=self._leads)
        leads = self._leads.name if self._leads else ""
        if fault.do == "kill-worker":
            chosen = next((name for name, host in left.items() if fault.worker in workers_of(host)), None)
        else:
            chosen = chosen_host(fault, [*left], self._agents.coordinates, leads)
        workers = {} if chosen is None else workers_of(left[chosen])
        pids = [] if chosen is None else self._struck_pids(fault, left[chosen], workers)
        if chosen is None or not (pids or fault.do == "noop"):
            self._say(f"{fault.id} finds nothing to strike: {fault}")
            return
        host = left[chosen]
        pidfds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
        at_ns = time.monotonic_ns()
        self._act(fault, host, pidfds)
        made = HostStrike(fault, chosen, self._agents.committed + 1, at_ns, tuple(sorted(workers)))
        self._blows.append(_Blow(made, pidfds))
        self._open.append(self._blows[-1])
        self._lost |= {chosen} if made.loses_host else set()
        is_chief = ", which coordinates" if chosen == self._agents.coordinates else ""
        self._say(f"step {made.step}: {fault.do} {chosen}{is_chief}")
        if fault.do == "kill-etcd-leader":
            self._say(f"another member of etcd leads: that of {self._next_leader(host).name}")

    def _struck_pids(self, fault: HostFault, host: BedHost, workers: Mapping[int, int]) -> list[int]:
        """Returns the processes whose end confirms the effect of a fault."""
        match fault.do:
            case "noop":
                return []
            case "kill-etcd-leader":
                member = self._etcd.member_pid(host)
                return [] if member is None else [member]
            case "kill-worker":
                return [pid for worker, pid in workers.items() if worker == fault.worker]
            case "cut-host":
                return [*workers.values()]
            case "power-off":
                return [host.pid, *workers.values()]
        agent = self._agents.by_host[host.name].pid
        return [] if agent is None else [agent, *workers.values()]

    def _act(self, fault: HostFault, host: BedHost, pidfds: Sequence[int]) -> None:
        match fault.do:
            case "noop":
                pass
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


def workers_of(host: BedHost) -> dict[int, int]:
    """Returns the workers on a host, each with its pid."""
    names = {pid: name.removeprefix(_WORKER) for pid, name in host.processes().items() if name.startswith(_WORKER)}
    return {int(name): pid for pid, name in names.items() if name.isdecimal()}
