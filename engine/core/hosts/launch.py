"""Runs on several hosts that something else places: the line of the agents, and the mistakes in the options.

Rule: the line is the same on every host. Its starter must not end the others when one ends: torchrun does, and is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.core.errors import Problem, nearest
from engine.core.hosts.ends import USUAL_S

PLACES = ("slurm", "k8s", "ray", "ssh")
ObjectKind = Literal["job", "jobset", "trainjob"]  # of Kubernetes, with the agents in its pods
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # also a label of Kubernetes, with a suffix
USUAL_GRACE_S, MOST_GRACE_S = 120, 3600
SBATCH = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])(?:[ =]?[^\x00-\x1f\x7f]+)?")  # an option, and its value
# A file of etcd's certificates -> the variable that names it.
TLS_FILES = {"ca.crt": "BAMBOO_ETCD_CA", "tls.crt": "BAMBOO_ETCD_CERT", "tls.key": "BAMBOO_ETCD_KEY"}
# An option of sbatch that the script sets -> the way to another value.
_OWN = {
    **dict.fromkeys(
        ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node"), "--hosts N has one agent on each of N nodes"
    ),
    **dict.fromkeys(("-a", "--array"), "each run is a job of its own"),
    **dict.fromkeys(("-k", "--no-kill"), "the loss of a node would end the run"),
    **dict.fromkeys(("-J", "--job-name"), "--name names the run and the job"),
    "--requeue": "a run in etcd has one end: submit it again, with another number",
    "--signal": "--grace says how long before the end",
}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A run that is to be started; `hosts` are the names of machines, if given, and `extra` lines for sbatch."""

    name: str
    job_file: str
    num_hosts: int
    etcd: str
    workers: int = 0  # room on each host; 0: an equal part
    trusted: str = ""
    plain_http: bool = False
    trust_code: bool = False
    settings: tuple[str, ...] = ()
    lease_s: int = USUAL_S
    grace_s: int = USUAL_GRACE_S
    image: str = ""
    hosts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    isa: str = ""
    cores: int = 1  # of each host: one for each of its workers
    kind: ObjectKind = "job"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts in the run, without their users."""
        return tuple(each.rpartition("@")[2] for each in self.hosts)

    def words(self, program: str, job_file: str = "") -> list[str]:
        """Returns the words of the line that are the same everywhere, without the run, the node and the address."""
        hosts = ",".join(self.names) or str(self.num_hosts)
        words = [program, "agent", job_file or self.job_file, "--hosts", hosts, "--etcd", self.etcd]
        words += ["--workers", str(self.workers)] if self.workers else []
        words += ["--trusted-network", self.trusted] if self.trusted else []
        words += ["--etcd-plain-http"] if self.plain_http else []
        words += ["--lease", str(self.lease_s)] if self.lease_s != USUAL_S else []
        words += ["--isa", self.isa] if self.isa else []
        words += ["--trust-code"] if self.trust_code else []
        return words + [word for each in self.settings for word in ("--set", each)]

    def asks(self, program: str) -> list[str]:
        """Returns the words that wait for the outcome of a run, and exit with it, without the run."""
        return [program, "status", "--etcd", self.etcd, *(["--etcd-plain-http"] if self.plain_http else []), "--wait"]


def problems_of_plan(place: str, plan: LaunchPlan) -> list[Problem]:
    """Returns every mistake in the options that only a launch has."""
    problems = []
    if place not in PLACES:
        hint = "torchrun ends every process when one ends, so the loss of a host would end the run"
        expected = ", ".join(PLACES[:-1]) + f" or {PLACES[-1]}"
        hint = hint if place == "torchrun" else nearest(place, PLACES)
        problems.append(Problem("PLACE", expected, repr(place), hint))
    if not NAME.fullmatch(plan.name):
        problems.append(Problem("--name", "at most 40 small letters, digits and -", repr(plan.name)))
    if not 1 <= plan.grace_s <= MOST_GRACE_S:
        problems.append(Problem("--grace", f"1 to {MOST_GRACE_S} seconds", str(plan.grace_s)))
    if place == "k8s" and not plan.image:
        hint = "an image with this bamboo, and with the code and the data of the job"
        problems.append(Problem("--image", "the image of the pods", "nothing", hint))
    return [*problems, *_of_other_places(place, plan), *_of_names(place, plan), *_of_sbatch(plan.extra)]


def _of_other_places(place: str, plan: LaunchPlan) -> list[Problem]:
    """Returns the options that this place would leave out."""
    grace = "" if plan.grace_s == USUAL_GRACE_S else str(plan.grace_s)
    options: dict[str, tuple[str, tuple[str, ...]]] = {"--grace": (grace, ("slurm", "k8s"))}
    options |= {"--as": ("" if plan.kind == "job" else plan.kind, ("k8s",))}
    options |= {"--image": (plan.image, ("k8s",)), "--sbatch": (" ".join(plan.extra), ("slurm",))}
    return [
        Problem(name, f"none for {place}", value, f"it is an option for {' and '.join(places)}")
        for name, (value, places) in options.items()
        if value and place in PLACES and place not in places
    ]


def _of_names(place: str, plan: LaunchPlan) -> Iterator[Problem]:
    named = ",".join(plan.hosts)
    if place == "ssh" and not plan.hosts:
        yield Problem("--hosts", "the names of the hosts", str(plan.num_hosts), "ssh needs their names: --hosts a,b,c")
    elif place in ("k8s", "ray") and plan.hosts:
        who = "Kubernetes" if place == "k8s" else "Ray"
        yield Problem("--hosts", "the number of hosts", named, f"{who} chooses the nodes")
    elif place == "slurm" and plan.names != plan.hosts:
        yield Problem("--hosts", "names of nodes without a user", named)


def _of_sbatch(extra: Sequence[str]) -> Iterator[Problem]:
    for text in extra:
        option = SBATCH.fullmatch(text)
        if option is None:
            yield Problem("--sbatch", "one option of sbatch, such as --partition=train", repr(text))
        elif option[1] in _OWN:
            yield Problem("--sbatch", "an option that the script does not set itself", text, _OWN[option[1]])
