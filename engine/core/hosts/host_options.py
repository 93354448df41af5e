"""The options of an agent on one of several hosts, and the mistakes in them: all at once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.checkpoint_rules import keeps_any
from engine.core.errors import Problem
from engine.core.hosts.ends import LEAST_S, MOST_S, USUAL_S
from engine.core.job.bit_fields import different_facts
from engine.core.job.job import Job
from engine.core.units import whole_number

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_HOSTS = 256
CLEAR, TLS = "clear text", "TLS"  # how tensors travel between hosts


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options as they were given. `hosts` is a number, or the names; `address` is empty for the usual one."""

    run_id: str
    hosts: str
    node: str
    address: str
    etcd: tuple[str, ...]  # the hosts of its endpoints; empty without a kept one
    workers: int = 0  # on this host, at most; 0: an equal part
    trusted: str = ""  # a network in which clear text is allowed
    lease_s: int = USUAL_S
    faults: str = ""  # in words: any host may have to strike them

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts, empty if only their number was given."""
        return () if whole_number(self.hosts) is not None else tuple(each.strip() for each in self.hosts.split(","))

    @property
    def number(self) -> int:
        """The number of hosts."""
        number = whole_number(self.hosts)
        return len(self.names) if number is None else number

    @property
    def transfers(self) -> str:
        """How tensors travel: in clear text only in a network that is trusted."""
        return CLEAR if self.trusted else TLS


def problems_of(options: HostOptions, job: Job | None, is_own: Callable[[str], bool]) -> list[Problem]:
    """Returns every mistake, as far as the job is known; `is_own` tells whether an address is one of this host."""
    problems = [*_of_run(options), *_of_hosts(options), *_of_address(options, is_own)]
    return problems if job is None else [*problems, *_of_job(options, job)]


def _of_run(options: HostOptions) -> Iterator[Problem]:
    if not options.etcd:
        hint = "the hosts of a run meet in a kept etcd, which outlives each of them"
        yield Problem("--hosts", "--etcd with it", "nothing", hint)
    if not RUN_ID.fullmatch(options.run_id):
        hint = "the same on every host, such as the number that a scheduler gives"
        yield Problem("--run", "at most 100 letters, digits and . _ -", repr(options.run_id), hint)
    if not LEAST_S <= options.lease_s <= MOST_S:
        yield Problem("--lease", f"{LEAST_S} to {MOST_S} seconds", str(options.lease_s))


def _of_hosts(options: HostOptions) -> Iterator[Problem]:
    names = options.names
    if names and options.number > MOST_HOSTS:
        yield Problem("--hosts", f"at most {MOST_HOSTS} names", f"{options.number} of them")
    elif not 1 <= options.number <= MOST_HOSTS:
        yield Problem("--hosts", f"1 to {MOST_HOSTS}, or names with commas between", options.hosts)
    if wrong := [each for each in names if not NAME.fullmatch(each)]:
        yield Problem("--hosts", "names of letters, digits and . _ -", ", ".join(map(repr, wrong)))
    if twice := sorted({each for each in names if names.count(each) > 1}):
        yield Problem("--hosts", "each host once", ", ".join(twice))
    if not NAME.fullmatch(options.node):
        yield Problem("--node", "at most 63 letters, digits and . _ -", repr(options.node))
    elif names and options.node not in names:
        yield Problem("--node", "one of the names in --hosts", options.node, "its default is the host name")


def _of_address(options: HostOptions, is_own: Callable[[str], bool]) -> list[Problem]:
    try:
        address = ipaddress.ip_address(options.address)
    except ValueError:
        return [Problem("--address", "an IP address of this host", repr(options.address))]
    problems = []
    if not is_own(options.address):
        problems.append(Problem("--address", "an address of this host", options.address))
    if address.is_loopback:
        if any(not _is_loopback(each) for each in options.etcd):
            hint = "loopback is for hosts that are processes of one machine, with their etcd"
            problems.append(Problem("--address", "an address that the other hosts reach", options.address, hint))
        return problems
    if not options.trusted:
        return problems
    try:
        network = ipaddress.ip_network(options.trusted)
    except ValueError:
        return [*problems, Problem("--trusted-network", "a network such as 10.0.0.0/8", repr(options.trusted))]
    if address not in network:
        hint = "the tensors between hosts travel in clear text: name the network in which that is allowed"
        problems.append(Problem("--trusted-network", f"a network with {options.address}", options.trusted, hint))
    return problems


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _of_job(options: HostOptions, job: Job) -> Iterator[Problem]:
    count = job.num_workers
    room = options.workers * options.number
    if options.workers < 0 or (options.workers and room < count):
        hint = f"{options.number} hosts with {options.workers} workers each have room for {max(room, 0)}"
        yield Problem("--workers", f"room for the {count} workers of the job", str(options.workers), hint)
    if options.number > count:
        yield Problem("--hosts", f"at most one host for each of the {count} workers", str(options.number))
    if job.backend == "nccl":
        hint = (
            "groups of NCCL have no proof of the run's key, and none has been tried between hosts; links take GPUs too"
        )
        yield Problem("backend", "direct on several hosts", job.backend, hint)
    if job.fsdp:
        hint = "shards have been put together on one host only; more stages divide a model over hosts"
        yield Problem("fsdp", "0 on several hosts", str(job.fsdp), hint)
    if keeps_any(job.checkpoint_every) and not (job.checkpoints or _is_loopback(options.address)):
        hint = "checkpoints=PLACE is a folder that all hosts share, or a URL; checkpoint_every=0 keeps none"
        yield Problem("checkpoints", "a place that all hosts reach", "the folder of the run", hint)


# The hosts of a run as they register, and the facts in which all of them have to agree: job, code, arithmetic.
@dataclass(frozen=True, slots=True)
class RegisteredHost:
    """A host in the store. Names repeat; `incarnation` does not. `lease_id` is the lease that its key hangs on.

    That lease lasts `lease_s`. `facts` are those in which all hosts of a run agree.
    """

    name: str
    incarnation: str
    address: str
    lease_id: int
    facts: Mapping[str, Any]
    lease_s: int = 0


def differences(hosts: Sequence[RegisteredHost]) -> list[str]:
    """Returns a line for each fact in which a host differs from the first one, with both values and both hosts."""
    first, *others = hosts
    return [
        f"{fact.name}: {fact.before!r} on host {first.name}, {fact.now!r} on host {other.name}"
        for other in others
        for fact in different_facts(first.facts, other.facts)
    ]
