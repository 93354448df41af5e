"""A run on several hosts, as one of their agents: it registers, waits for the others, and coordinates or serves.

    every host      registers in the store, waits for the others, compares all that has to be equal
    one of them     is elected: it runs the job as on one host, with the fork servers of all hosts
    the others      fork, relay, signal and see ends for it, until it tells the outcome

Rules: the line of the command is the same on all hosts, and so is the exit code. The outcome stays in the store for an
hour, for an agent that has lost its stream or comes late.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.errors import (
    MASK,
    CoordinatorUnavailableError,
    EnvironmentLacksError,
    NothingMatchedError,
    Problem,
    UserError,
    ensure,
    required,
)
from engine.core.history.process_records import HostRecord
from engine.core.history.run_records import JobRecord
from engine.core.hosts.ends import most_on_one
from engine.core.hosts.host_options import HostOptions, RegisteredHost
from engine.core.hosts.launch import TLS_FILES, LaunchPlan, kubernetes_manifests, ray_script, slurm_script, ssh_script
from engine.core.job.bit_fields import compared_facts
from engine.core.job.job import Job
from engine.core.kv import KV
from engine.core.protocol.coordinator_state import STATE
from engine.files.accelerators import refuse_what_this_host_lacks
from engine.files.atomic_write import open_to_append, storage_errors, write_atomically
from engine.files.events_file import GrowingEvents
from engine.files.host_facts import host_facts
from engine.files.jobs.user_files import code_files, data_files
from engine.files.run_folder import RunFolder, find_run
from engine.files.trajectory_file import own_sources
from engine.harness.dead_runs import launcher_runs
from engine.harness.screen import Screen
from engine.harness.takeover import HostRunEnd, OwnHost, RunOn, coordinate, place_of_host, serve, take_over
from engine.models.model_registry import unreadable_files
from engine.runtime.agent.run_state import FailoverContext
from engine.runtime.hosts.host_registry import (
    HostKeys,
    HostOutcome,
    HostRegistry,
    KeptLease,
    network_of,
    new_certificate,
)
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.hosts.remote_workers import RemoteSpawner
from engine.runtime.hosts.wire import WireServer
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import breakable, holding
from engine.runtime.store.etcd_settings import PASSWORD, PASSWORD_FILE, USER, EtcdSettings

# The outcome of a run that somebody else has started: of several hosts from their store, of any run from its folder.
#
# Rule: the folder of a host tells what that host has recorded. If the run may go on without it, only the store knows.


_POLL_S = 0.25
_CALL_S = 2.0
_START_S = 60.0  # the time that a launcher may take from its folder to its first event
_LEFT = "left"


def awaited_end(results: Path, run: str | None, etcd: EtcdSettings | None) -> tuple[str, HostOutcome]:
    """Waits for the end of a run; returns its name and its outcome. `run` is an id in the store, or names a folder.

    Raises:
        NothingMatchedError: neither the store nor the folder of results knows the run.
        CoordinatorUnavailableError: nobody is left who could tell the outcome.
    """
    if run and etcd is not None and (found := _of_store(run, etcd)) is not None:
        return run, found
    try:
        folder = find_run(results, run)
    except NothingMatchedError as error:
        if etcd is None or not run:
            raise
        places = ", ".join(map(str, etcd.endpoints))
        raise NothingMatchedError(f"no run {run!r} of several hosts in the store at {places}, and {error}") from error
    run_id = _run_id(folder)
    if run_id and etcd is not None and (found := _of_store(run_id, etcd)) is not None:
        return run_id, found
    return folder.path.name, _of_folder(folder, run_id)


def _of_store(run_id: str, etcd: EtcdSettings) -> HostOutcome | None:
    from engine.runtime.store.etcd_kv import EtcdKV

    kv = EtcdKV(etcd, f"/bamboo/{run_id}/", deadline_s=_CALL_S)
    try:
        return HostKeys(kv).end()
    finally:
        kv.close()


def _run_id(folder: RunFolder) -> str:
    """Returns the name of a run of several hosts in its store; empty if it is of one host."""
    host = GrowingEvents(folder.events, last_commits=True).read_on().first(HostRecord)
    return host.run_id if host is not None and host.node else ""


def _of_folder(folder: RunFolder, run_id: str) -> HostOutcome:
    events = GrowingEvents(folder.events, last_commits=True)
    while True:
        history = events.read_on()
        is_new = history.first(JobRecord) is None and time.time() - folder.path.stat().st_mtime < _START_S
        if history.ended is None and not is_new and not launcher_runs(history, folder.path):
            history = events.read_on()
            if history.ended is None:
                raise _unheard("the launcher is gone and did not record the end of the run", run_id)
        if history.ended is not None:
            if history.ended.outcome == _LEFT:
                raise _unheard("this host has left the run, which goes on without it", run_id)
            return HostOutcome(history.ended.exit_code, history.ended.outcome)
        with breakable():
            time.sleep(_POLL_S)


def _unheard(why: str, run_id: str) -> CoordinatorUnavailableError:
    hint = f"; its store may know more: bamboo status --wait {run_id} --etcd HOST:PORT" if run_id else ""
    return CoordinatorUnavailableError(why + hint)


# The files with which something else places a run on several hosts, and their submission by its own program.
#
# Rules: the job file goes with the manifests, since a pod has no other disk. Certificates and keys are in a file of
# their own, which only this user can read and which is never printed. A program that is not there is named, with exit
# code 4.


# place -> the program that takes the file, and the words before the file
_SENDERS: dict[str, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "k8s": ("kubectl", "apply", "--filename"),
    "ray": ("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "python"),
    "ssh": ("bash",),
}
_NEEDS = {"ssh": "ssh"}  # beside the sender
_FOR = {"slurm": "Slurm", "k8s": "Kubernetes", "ray": "Ray (pip install 'bamboo-train[ray]')", "ssh": "OpenSSH"}
_LET_IN = (*TLS_FILES.values(), USER, PASSWORD_FILE)
_MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """A file; `shown` is its text as it may be printed."""

    name: str
    text: str
    shown: str


def launch_files(place: str, plan: LaunchPlan) -> list[LaunchFile]:
    """Returns the files; the last one is sent."""
    if place == "k8s":
        return _manifests(plan)
    if place == "ssh":
        run = f"{plan.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return [_plain(f"{plan.name}.sh", ssh_script(_elsewhere(plan), str(Path.cwd()), run))]
    if place == "ray":
        return [_plain(f"{plan.name}_ray.py", ray_script(_elsewhere(plan)))]
    ensure(place == "slurm", f"no place is called {place!r}")
    return [_plain(f"{plan.name}.sbatch", slurm_script(plan))]


def _elsewhere(plan: LaunchPlan) -> LaunchPlan:
    """Returns the plan for hosts that get no environment: the same program, and the variables that let it into etcd."""
    program = shutil.which("bamboo") or "bamboo"
    found = tuple((name, value) for name in _LET_IN if (value := os.environ.get(name, "")))
    return replace(plan, program=program, variables=found)


def refused_variables(place: str) -> list[Problem]:
    """Returns the variables for etcd that do not reach the agents: a password stands in no file."""
    lost = {"ssh": (PASSWORD,), "ray": (PASSWORD,), "k8s": (USER, PASSWORD, PASSWORD_FILE)}.get(place, ())
    hint = "certificates let the pods in" if place == "k8s" else f"{PASSWORD_FILE} names a file, on every host"
    return [Problem(name, f"none for {place}", "a value", hint) for name in lost if os.environ.get(name)]


def _plain(name: str, text: str) -> LaunchFile:
    return LaunchFile(name, text, text)


def _manifests(plan: LaunchPlan) -> list[LaunchFile]:
    tls = {}
    for file, variable in TLS_FILES.items():
        if path := os.environ.get(variable, ""):
            with storage_errors("read", Path(path)):
                tls[file] = base64.b64encode(Path(path).read_bytes()).decode()
    job_path = Path(plan.job_file)
    with storage_errors("read", job_path):
        job_text = job_path.read_text(encoding="utf-8")
    texts = [_yaml(kubernetes_manifests(plan, job_text, each)) for each in (tls, dict.fromkeys(tls, MASK))]
    return [LaunchFile(f"{plan.name}.yaml", *texts)]


def _yaml(manifests: Sequence[dict[str, Any]]) -> str:
    import yaml

    class Readable(yaml.SafeDumper):
        """Writes a text of several lines as lines, and a value that stands there twice twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def as_lines(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Readable.add_representer(str, as_lines)
    return "---\n".join(yaml.dump(each, Dumper=Readable, sort_keys=False, width=120) for each in manifests)


def write_files(files: Sequence[LaunchFile], folder: Path) -> None:
    """Writes the files, which only this user can read; scripts can be run."""
    with storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for each in files:
        path = folder / each.name
        write_atomically(path, each.text)
        if each.text.startswith("#!"):
            path.chmod(0o700)


def submit(place: str, path: Path) -> str:
    """Sends a file; returns the words of the program that took it.

    Raises:
        EnvironmentLacksError: the program is not there, or does not take the file.
    """
    words = [*_SENDERS[place], str(path)]
    for program in (words[0], _NEEDS.get(place, words[0])):
        if shutil.which(program) is None:
            text = f"{program} is not on the PATH of this machine: {_FOR[place]} has it; {path} can be sent elsewhere"
            raise EnvironmentLacksError(text)
    if place == "ssh":  # which runs as long as the run
        return _detached(words, path)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentLacksError(f"{words[0]} did not answer within {_MOST_S:g} s") from None
    if done.returncode:
        told = done.stderr.strip() or done.stdout.strip()
        raise EnvironmentLacksError(f"{words[0]} has ended with {done.returncode}: {told}")
    return done.stdout.strip()


def _detached(words: Sequence[str], path: Path) -> str:
    log = path.with_suffix(".log")
    with open(open_to_append(log), "ab") as output:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return f"process {child.pid} holds the connections; their words are in {log}"


_LEASE_CALL_S, _REVOKE_S = 0.7, 2.0  # deadlines of calls: each kind has a client of its own
_NOT_EQUAL = ("results", "name")  # fields of a job that may differ between hosts


def run_on_hosts(
    job: Job, name: str, given: HostOptions, patience_s: float, etcd: EtcdSettings, screen: Screen, run: RunOn
) -> HostRunEnd:
    """Runs the agent of this host to the end of the run; where it coordinates, `run` makes it.

    Raises BambooError if the run could not be begun.
    """
    from engine.runtime.store.etcd_kv import EtcdKV

    if problems := unreadable_files(job):
        raise UserError(problems)
    refuse_what_this_host_lacks(job, num_workers=most_on_one(job.num_workers + job.standby, given.number))
    root = f"/bamboo/{given.run_id}/"
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(holding())
        kv, lease_kv, watch_kv = EtcdKV(etcd, root), EtcdKV(etcd, root, _LEASE_CALL_S), EtcdKV(etcd, root, _REVOKE_S)
        for each in (kv, lease_kv, watch_kv):
            stack.callback(each.close)
        kept = KeptLease(lease_kv, given.lease_s)
        stack.callback(_give_back, kept)
        own = RegisteredHost(given.node, secrets.token_hex(8), given.address, kept.lease.lease_id, _facts(job, given))
        registry = HostRegistry(kv, own, kept.lease)
        if (outcome := registry.outcome()) is not None:
            hint = f"run {given.run_id} has ended before (choose another --run to train again)"
            return HostRunEnd(replace(outcome, words=f"{hint}: {outcome.words}"))
        registry.register()
        screen.say(f"host {own.name} has registered, and waits for {given.number - 1} more")
        if (run_of := registry.outlived()) is not None:
            screen.say(f"the run goes on without host {own.name}, which was lost; its outcome is awaited")
            return HostRunEnd(registry.awaited(run_of))
        hosts = registry.gathered(given.names, given.number, patience_s)
        server = stack.enter_context(_forking(kept, own))
        elected = registry.elected()
        if elected is None:
            _refuse_begun(registry, given.run_id, kv)
            wire = WireServer(own.address, made := new_certificate(), screen.say)
            stack.callback(wire.close)
            if registry.elect(hosts, place_of_host(own.address, wire.port), made):
                away = [RemoteSpawner(each) for each in hosts if each.name != own.name]
                servers = HostServers(server, away, watch_kv, given.workers, network_of(made, given.transfers))
                for other in away:
                    wire.admit(other.host, other.peer)
                return coordinate(run, servers, registry, FailoverContext(kept.lease), partial(_give_back, kept))
            elected = required(registry.waited_for_elected(), "another host was elected")
        screen.say(f"host {elected.name} coordinates the run")
        back, label = partial(_give_back, kept), f"{name}/{given.run_id}"
        at = OwnHost(job, label, registry, kept.lease, watch_kv, screen, run, back, given.workers)
        return serve(at, elected, server, interrupts, take_over)


def _refuse_begun(registry: HostRegistry, run_id: str, kv: KV) -> None:
    """Raises CoordinatorUnavailableError for a run whose state is there, but no host that coordinates it."""
    if kv.get(STATE) is not None:
        why = f"run {run_id} was begun before: {registry.holder()}, and is gone; choose another --run"
        raise CoordinatorUnavailableError(why)


def _facts(job: Job, given: HostOptions) -> dict[str, Any]:
    """Returns the facts of this host, of its job and its options in which all hosts of a run have to agree."""
    fields = {name: value for name, value in asdict(job.masked).items() if name not in _NOT_EQUAL}
    files = {"code files": code_files(job), "data files": data_files(job)}
    compared = compared_facts(host_facts(Path.cwd()), job)
    given_here = {"--hosts": ",".join(sorted(given.names)) or given.hosts, "faults": given.faults}
    given_here["transfers"] = given.transfers
    return {**fields, **compared, "sources": own_sources(), **files, **given_here}


def _give_back(kept: KeptLease) -> None:
    with contextlib.suppress(CoordinatorUnavailableError):
        kept.close()


@contextlib.contextmanager
def _forking(kept: KeptLease, own: RegisteredHost) -> Iterator[ForkServer]:
    """Starts the fork server of this host, whose processes end before the lease of the host can expire."""
    with ForkServer() as server:
        server.host, server.address = own.name, own.address

        def end_workers(why: str) -> None:
            server.kill_all()
            since = f"{kept.unrenewed_s:.3f} s after the sending of the last renewal that was answered"
            os.write(2, f"bamboo: {why}; its workers were ended {since}\n".encode())

        kept.end_workers = end_workers
        yield server
