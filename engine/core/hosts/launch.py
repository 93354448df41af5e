"""Runs on several hosts that a scheduler places: the line of its agents; files for Slurm, Kubernetes, Ray and ssh."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from engine.core.errors import ExitCode, Problem, nearest
from engine.core.hosts.ends import USUAL_S

# A run on several hosts that something else places: the line of its agents, and the mistakes in its options.
#
# Rule: the line is the same on every host. Its starter must not end the others when one ends: torchrun does, and is
# refused.


PLACES = ("slurm", "k8s", "ray", "ssh")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # also a label of Kubernetes, with a suffix
USUAL_GRACE_S, MOST_GRACE_S = 120, 3600
SBATCH = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])(?:[ =]?[^\x00-\x1f\x7f]+)?")  # an option, and its value
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
    program: str = "bamboo"
    variables: tuple[tuple[str, str], ...] = ()  # of the environment, for a place that does not take it along

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts in the run, without their users."""
        return tuple(each.rpartition("@")[2] for each in self.hosts)

    def words(self, job_file: str = "") -> list[str]:
        """Returns the words of the line that are the same everywhere, without the run, the node and the address."""
        hosts = ",".join(self.names) or str(self.num_hosts)
        found = [self.program, "agent", job_file or self.job_file, "--hosts", hosts, "--etcd", self.etcd]
        found += ["--workers", str(self.workers)] if self.workers else []
        found += ["--trusted-network", self.trusted] if self.trusted else []
        found += ["--etcd-plain-http"] if self.plain_http else []
        found += ["--lease", str(self.lease_s)] if self.lease_s != USUAL_S else []
        found += ["--isa", self.isa] if self.isa else []
        found += ["--trust-code"] if self.trust_code else []
        return found + [word for each in self.settings for word in ("--set", each)]

    def asks(self, run: str) -> str:
        """Returns the line that waits for the outcome of a run, and exits with it; `run` is in the words of a shell."""
        words = [self.program, "status", "--etcd", self.etcd, *(["--etcd-plain-http"] if self.plain_http else [])]
        return f"{in_shell(words)} --wait {run}"

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
    if place not in PLACES:
        hint = "torchrun ends every process when one ends, so the loss of a host would end the run"
        expected = ", ".join(PLACES[:-1]) + f" or {PLACES[-1]}"
        found.append(Problem("PLACE", expected, repr(place), hint if place == "torchrun" else nearest(place, PLACES)))
    if not NAME.fullmatch(plan.name):
        found.append(Problem("--name", "at most 40 small letters, digits and -", repr(plan.name)))
    if not 1 <= plan.grace_s <= MOST_GRACE_S:
        found.append(Problem("--grace", f"1 to {MOST_GRACE_S} seconds", str(plan.grace_s)))
    if place == "k8s" and not plan.image:
        hint = "an image with this bamboo, and with the code and the data of the job"
        found.append(Problem("--image", "the image of the pods", "nothing", hint))
    return [*found, *_of_other_places(place, plan), *_of_names(place, plan), *_of_sbatch(plan.extra)]


def _of_other_places(place: str, plan: LaunchPlan) -> list[Problem]:
    """Returns the options that this place would leave out."""
    grace = "" if plan.grace_s == USUAL_GRACE_S else str(plan.grace_s)
    given: dict[str, tuple[str, tuple[str, ...]]] = {"--grace": (grace, ("slurm", "k8s"))}
    given |= {"--image": (plan.image, ("k8s",)), "--sbatch": (" ".join(plan.extra), ("slurm",))}
    return [
        Problem(name, f"none for {place}", value, f"it is an option for {' and '.join(places)}")
        for name, (value, places) in given.items()
        if value and place in PLACES and place not in places
    ]


def _of_names(place: str, plan: LaunchPlan) -> list[Problem]:
    named = ",".join(plan.hosts)
    if place == "ssh" and not plan.hosts:
        return [
            Problem("--hosts", "the names of the hosts", str(plan.num_hosts), "ssh is told each host: --hosts a,b,c")
        ]
    if place in ("k8s", "ray") and plan.hosts:
        who = "Kubernetes" if place == "k8s" else "Ray"
        return [Problem("--hosts", "the number of hosts", named, f"{who} chooses the nodes")]
    if place == "slurm" and plan.names != plan.hosts:
        return [Problem("--hosts", "names of nodes without a user", named)]
    return []


def _of_sbatch(extra: Sequence[str]) -> list[Problem]:
    found = []
    for each in extra:
        option = SBATCH.fullmatch(each)
        if option is None:
            found.append(Problem("--sbatch", "one option of sbatch, such as --partition=train", repr(each)))
        elif option[1] in _OWN:
            found.append(Problem("--sbatch", "an option that the script does not set itself", each, _OWN[option[1]]))
    return found


# The manifests for Kubernetes: an Indexed Job of one agent per node, its service, the job file, etcd's certificates.
#
# Rules: a pod that fails is replaced by itself (`backoffLimitPerIndex`), and the others stay. Pods stand on different
# nodes. A pod that has to leave gets SIGTERM, which is a notice, and the grace. A usage error or a difference in the
# arithmetic is no reason to try again.

Resource = dict[str, Any]
_FILES = "/etc/bamboo"
_ETCD = "/etc/bamboo-etcd"
_LABEL = "app.kubernetes.io/name"
TRIES = 6  # of each index
# A file of the secret -> the variable that names it.
TLS_FILES = {"ca.crt": "BAMBOO_ETCD_CA", "tls.crt": "BAMBOO_ETCD_CERT", "tls.key": "BAMBOO_ETCD_KEY"}
_NO_TRY = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.NOTHING_MATCHED)


def kubernetes_manifests(plan: LaunchPlan, job_text: str, tls: Mapping[str, str]) -> list[Resource]:
    """Returns the manifests; `tls` has the files of the secret in base64, and is empty without TLS."""
    found = [_secret(plan, tls)] if tls else []
    return [*found, _service(plan), _config(plan, job_text), _job(plan, list(tls))]


def _named(kind: str, version: str, plan: LaunchPlan, part: str = "") -> Resource:
    labels = {_LABEL: "bamboo", "app.kubernetes.io/instance": plan.name}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": f"bamboo-{plan.name}{part}", "labels": labels}}


def _secret(plan: LaunchPlan, tls: Mapping[str, str]) -> Resource:
    return _named("Secret", "v1", plan, "-etcd") | {"type": "Opaque", "data": dict(tls)}


def _service(plan: LaunchPlan) -> Resource:
    """Returns the service that gives the pods names; nothing listens on its port."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": f"bamboo-{plan.name}"},
    }
    return _named("Service", "v1", plan) | {"spec": spec}


def _config(plan: LaunchPlan, job_text: str) -> Resource:
    return _named("ConfigMap", "v1", plan) | {"data": {"job.yaml": job_text}}


def _job(plan: LaunchPlan, tls: list[str]) -> Resource:
    rules = [
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": sorted(map(int, _NO_TRY))}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": plan.num_hosts,
        "parallelism": plan.num_hosts,
        "backoffLimitPerIndex": TRIES,
        "maxFailedIndexes": plan.num_hosts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {_LABEL: "bamboo"}}, "spec": _pod(plan, tls)},
    }
    return _named("Job", "batch/v1", plan) | {"spec": spec}


def _pod(plan: LaunchPlan, tls: list[str]) -> Resource:
    apart = {
        "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": f"bamboo-{plan.name}"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    volumes: list[Resource] = [{"name": "job", "configMap": {"name": f"bamboo-{plan.name}"}}]
    if tls:
        volumes.append({"name": "etcd", "secret": {"secretName": f"bamboo-{plan.name}-etcd", "defaultMode": 0o400}})
    return {
        "subdomain": f"bamboo-{plan.name}",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": plan.grace_s,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [_container(plan, tls)],
        "volumes": volumes,
    }


def _container(plan: LaunchPlan, tls: list[str]) -> Resource:
    words = plan.words(f"{_FILES}/job.yaml")
    words += ["--run", "$(RUN)", "--node", "$(NODE)", "--address", "$(ADDRESS)"]
    fields = {"NODE": "metadata.name", "ADDRESS": "status.podIP"}
    # The identity of the job, and not its name: a job of the same name is another run.
    fields["RUN"] = "metadata.labels['batch.kubernetes.io/controller-uid']"
    env: list[Resource] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    env += [{"name": TLS_FILES[file], "value": f"{_ETCD}/{file}"} for file in tls if file in TLS_FILES]
    mounts: list[Resource] = [{"name": "job", "mountPath": _FILES, "readOnly": True}]
    if tls:
        mounts.append({"name": "etcd", "mountPath": _ETCD, "readOnly": True})
    return {"name": "agent", "image": plan.image, "command": words, "env": env, "volumeMounts": mounts}


# The Python program for Ray: one actor on each node, which starts an agent and waits for it.
#
# Rules: the actors are spread strictly, so each is on a node of its own. An actor that is lost ends no other.
# Every agent exits with the outcome of the run, so any that is left tells it.

_PROGRAM = '''"""Runs {name} on {num_hosts} nodes of Ray, one bamboo agent on each; made by `bamboo launch ray`."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS = {num_hosts}
AGENT = {words}
VARIABLES = {variables!r}
LOST, NO_OUTCOME = (85, 137, 143), 69


def ends_with_its_actor():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # a notice for its workers, if Ray ends the actor


@ray.remote(num_cpus=1, max_restarts=0)
class Host:
    def run(self, run):
        node = ray.get_runtime_context().get_node_id()[:40]
        address = ray.util.get_node_ip_address()
        words = [*AGENT, "--run", run, "--node", node, "--address", address]
        return subprocess.Popen(words, env={{**os.environ, **VARIABLES}}, preexec_fn=ends_with_its_actor).wait()


def main():
    ray.init()
    group = placement_group([{{"CPU": 1}}] * HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    # Not the number of the job: these begin again in each cluster.
    run = f"ray-{{time.strftime('%Y%m%d-%H%M%S')}}-{{secrets.token_hex(2)}}"
    print(f"the run is called {{run}}", flush=True)
    hosts = [
        Host.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
        for number in range(HOSTS)
    ]
    waiting = [each.run.remote(run) for each in hosts]
    outcome = NO_OUTCOME
    while waiting:
        (done, *_), waiting = ray.wait(waiting, num_returns=1)
        try:
            code = ray.get(done)
        except ray.exceptions.RayError as error:
            print(f"a node was lost, and the others go on: {{type(error).__name__}}", flush=True)
            continue
        print(f"an agent has ended with {{code}}", flush=True)
        if code >= 0 and code not in LOST:
            outcome = code
    return outcome


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_script(plan: LaunchPlan) -> str:
    """Returns the program."""
    words = "[\n" + "".join(f"    {each!r},\n" for each in plan.words()) + "]"
    return _PROGRAM.format(name=plan.name, num_hosts=plan.num_hosts, words=words, variables=dict(plan.variables))


# The script for sbatch: one agent on each node, and the loss of a node or a task ends no other.
#
# Rules:
# - `--no-kill` keeps the job when a node fails; `--kill-on-bad-exit=0` and `--wait=0` keep the step when a task ends.
# - The signal before the end of the job, or at its preemption, is a notice for all workers.
# - The code of srun says how a task ended, and not how the run did. So the script asks for the outcome of the run, and
#   exits with it.
# - Slurm runs the script on the first node. When that one is lost, Slurm keeps the job, and no script ends it. So
#   a task that finds no srun waits for the outcome, and ends the job.

_RUN = '"slurm-$SLURM_JOB_ID"'
_SRUN = "/dev/tcp/$SLURM_SRUN_COMM_HOST/$SLURM_SRUN_COMM_PORT"  # where it listens, for bash


def slurm_script(plan: LaunchPlan) -> str:
    """Returns the script."""
    log = f"bamboo-{plan.name}-%j"
    options = [
        f"--job-name=bamboo-{plan.name}",
        f"--nodes={plan.num_hosts}",
        *([f"--nodelist={','.join(plan.hosts)}"] if plan.hosts else []),
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.cores}",
        "--no-kill",
        "--no-requeue",
        f"--signal=TERM@{plan.grace_s}",
        f"--output={log}.log",
        *plan.extra,
    ]
    # srun takes no number of cores from sbatch.
    srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
    srun += f' --cpus-per-task="$SLURM_CPUS_PER_TASK" --output={log}-%N.log'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {each}" for each in options),
        "",
        "# One agent on each node. A task that is killed and a node that is lost end no other.",
        f"{srun} bash -c {in_shell([_task(plan)])} \\",
        "    2> >(grep --invert-match 'Zero Bytes were transmitted' >&2)  # srun, of a task that looks for it",
        'code=$?; echo "srun: $code"',
        "",
        "# The outcome of the run stays in etcd for an hour. Without a run the agents have said why.",
        f"{plan.asks(_RUN)}",
        f"outcome=$?; [ $outcome = {ExitCode.NOTHING_MATCHED:d} ] && outcome=$code",
        "exit $outcome",
    ]
    return "\n".join(lines) + "\n"


def _task(plan: LaunchPlan) -> str:
    """Returns the commands of each task; SIGTERM, which comes to all its processes, is for the agent."""
    return f"""
trap : TERM
{plan.line} --run {_RUN} --node "$SLURMD_NODENAME"
code=$?
if ! timeout 5 bash -c ": < {_SRUN}"; then
    echo "srun is gone with its node: this task ends the job when the run has ended"
    {plan.asks(_RUN)}
    [ $? = {ExitCode.COORDINATOR_UNAVAILABLE:d} ] || scancel "$SLURM_JOB_ID"
fi
exit $code
"""


# The script for ssh: a line for each host, all at once; the end of one ends no other.
#
# Rule: every agent exits with the outcome of the run. The code 255 is that of ssh, and 85 of a host that was cut off.

_UNKNOWN = " | ".join(str(int(each)) for each in (ExitCode.NOTHING_MATCHED, ExitCode.COORDINATOR_UNAVAILABLE))


def ssh_lines(plan: LaunchPlan, folder: str, run: str) -> list[str]:
    """Returns a line for each host, which begins in `folder` of that host; ssh takes no variables along."""
    found = []
    environment = in_shell(["env", *(f"{name}={value}" for name, value in plan.variables)]) if plan.variables else ""
    for host, node in zip(plan.hosts, plan.names, strict=True):
        agent = f"cd {quote(folder)} && exec {environment} {plan.line} --run {quote(run)} --node {quote(node)}"
        found.append(f"ssh -o BatchMode=yes -o ServerAliveInterval=5 {quote(host)} {quote(agent)}")
    return found


def ssh_script(plan: LaunchPlan, folder: str, run: str) -> str:
    """Returns the script."""
    lines = [
        "#!/bin/bash",
        "# One agent on each host. A host that is lost ends no other.",
        "agents=()",
        *(f"{line} & agents+=($!)" for line in ssh_lines(plan, folder, run)),
        f"outcome={ExitCode.COORDINATOR_UNAVAILABLE:d}",
        'for agent in "${agents[@]}"; do',
        '    wait "$agent"; code=$?',
        '    echo "an agent has ended with $code"',
        "    case $code in 255 | 85 | 137 | 143) ;; *) outcome=$code ;; esac",
        "done",
        "# etcd knows more than an agent that was lost or has left, if it is reached from here.",
        plan.asks(quote(run)),
        f"asked=$?; case $asked in {_UNKNOWN}) ;; *) outcome=$asked ;; esac",
        'exit "$outcome"',
    ]
    return "\n".join(lines) + "\n"
