"""A run on several hosts that something else places: the line of its agents, and the mistakes in its options.

Rule: the line is the same on every host. Its starter must not end the others when one ends: torchrun does, and is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from engine.core.errors import Problem

PLACES = ("slurm", "k8s", "ray", "ssh")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # also a label of Kubernetes, with a suffix
MOST_GRACE_S = 3600


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A run that is to be started; `hosts` are the names of machines for ssh, and `extra` lines of the user's own."""

    name: str
    job_file: str
    num_hosts: int
    etcd: str
    workers: int = 0  # room on each host; 0: an equal part
    trusted: str = ""
    plain_http: bool = False
    trust_code: bool = False
    settings: tuple[str, ...] = ()
    grace_s: int = 120
    image: str = ""
    hosts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    isa: str = ""

    def words(self, job_file: str = "") -> list[str]:
        """Returns the words of the line that are the same everywhere, without the run, the node and the address."""
        found = ["bamboo", "agent", job_file or self.job_file, "--hosts", str(self.num_hosts), "--etcd", self.etcd]
        found += ["--workers", str(self.workers)] if self.workers else []
        found += ["--trusted-network", self.trusted] if self.trusted else []
        found += ["--etcd-plain-http"] if self.plain_http else []
        found += ["--isa", self.isa] if self.isa else []
        found += ["--trust-code"] if self.trust_code else []
        return found + [word for each in self.settings for word in ("--set", each)]

    @property
    def line(self) -> str:
        """The words for a shell."""
        return in_shell(self.words())


def in_shell(words: Sequence[str]) -> str:
    """Returns words as a shell reads them."""
    return " ".join(map(quote, words))


def problems_of_plan(place: str, plan: LaunchPlan) -> list[Problem]:
    """Returns every mistake in the options that only a launch has."""
    found = []
    if place == "torchrun":
        hint = "torchrun ends every process when one ends, so the loss of a host would end the run"
        found.append(Problem("PLACE", ", ".join(PLACES[:-1]) + f" or {PLACES[-1]}", "'torchrun'", hint))
    elif place not in PLACES:
        found.append(Problem("PLACE", ", ".join(PLACES[:-1]) + f" or {PLACES[-1]}", repr(place)))
    if not NAME.fullmatch(plan.name):
        found.append(Problem("--name", "at most 40 small letters, digits and -", repr(plan.name)))
    if not 1 <= plan.grace_s <= MOST_GRACE_S:
        found.append(Problem("--grace", f"1 to {MOST_GRACE_S} seconds", str(plan.grace_s)))
    if place == "k8s" and not plan.image:
        hint = "an image with this bamboo, and with the code and the data of the job"
        found.append(Problem("--image", "the image of the pods", "nothing", hint))
    if place == "ssh" and len(plan.hosts) != plan.num_hosts:
        hint = "ssh is told each host: --hosts a,b,c"
        found.append(Problem("--hosts", "the names of the hosts", f"{plan.num_hosts}", hint))
    return found
