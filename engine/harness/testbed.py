"""Hosts to break: namespaces of this machine with an etcd of their own, for scenarios that strike hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from engine.core.errors import EnvironmentLacksError, ensure
from engine.files.atomic_write import open_to_append, write_atomically
from engine.harness.host_checks import hosts_error, own_namespaces
from engine.runtime.agent.host_registry import new_certificate
from engine.runtime.process import subprocesses
from engine.runtime.store.embedded_etcd import find_etcd

# Hosts of one run as namespaces of this machine: each has its network, processes, mounts, name and clock.
#
#     this process ---> outer namespaces: a bridge ---> h0: 10.99.0.1, its own init, its clock so much ahead
#                                                  ---> h1: 10.99.0.2, ...
#
# Rules:
# - The kernel removes a bed also after a crash: the init of the outer namespaces dies with the thread that made the
#   bed, which must be the main one; with that init die all processes in them, and with the last process each namespace.
# - A switch can take the place of the bridge, and carry each packet later.
# - Nothing outside reaches into a bed over the network, and nothing in it reaches out. Files are those of this machine.
# - A host whose power is cut loses its link first, so that no word of its dying processes leaves it.


NETWORK = "10.99.0.0/24"
SLOW_MS = 200.0
_BRIDGE = "bridge"
_START_S, _CALL_S, _END_S = 10.0, 10.0, 5.0
# The init of a host: its name, its loopback, a word, and then it sleeps.
_INIT = """
import os, socket, subprocess, sys
socket.sethostname(sys.argv[1])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
print("ready", flush=True)
os.execvp("sleep", ["sleep", "infinity"])
"""


class BedHost:
    """A host; `pid` is its init, as this machine numbers it, and its clock is `ahead_ns` ahead of this machine's."""

    def __init__(self, bed: HostBed, number: int, pid: int, ahead_ns: int):
        self.name, self.address, self.pid, self.ahead_ns = f"h{number}", f"10.99.0.{number + 1}", pid, ahead_ns
        self.is_on = True
        self._bed, self._pidfd = bed, os.pidfd_open(pid)
        self._programs: list[subprocess.Popen[bytes]] = []
        self._link = f"to-{self.name}"

    def words(self, *command: str) -> list[str]:
        """Returns the command line that runs a command on this host."""
        return [*_entering(self.pid), "--uts", "--time", "--", *command]

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, log: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a program on this host; it ends with the host, if not before."""
        output = subprocess.DEVNULL if log is None else log
        started = subprocess.Popen(
            self.words(*command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self._programs.append(started)
        return started

    def run(self, *command: str, timeout_s: float = _CALL_S) -> subprocess.CompletedProcess[str]:
        """Runs a program on this host to its end; raises subprocess.TimeoutExpired."""
        return subprocess.run(self.words(*command), capture_output=True, text=True, timeout=timeout_s, check=False)

    def processes(self) -> dict[int, str]:
        """Returns the processes of this host as this machine numbers them, with their names; none once it is off."""
        names: dict[int, str] = {}
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{self.pid}/ns/pid")
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                    if os.readlink(f"/proc/{pid}/ns/pid") == own:
                        names[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        return names

    def connect(self) -> None:
        """Joins this host to the bridge."""
        inner = _inner_pid(self.pid)
        self._bed.call("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(inner))
        self._bed.call("ip", "link", "set", self._link, "master", _BRIDGE, "up")
        _checked(self.words("ip", "address", "add", f"{self.address}/24", "dev", "eth0"))
        _checked(self.words("ip", "link", "set", "eth0", "up"))

    def cut(self) -> None:
        """Cuts its link: packets are lost in both directions, and no connection ends by that."""
        self._bed.call("ip", "link", "set", self._link, "down")

    def slow_network(self) -> None:
        """Slows the network of this host and of all others of its bed."""
        self._bed.slow()

    def power_off(self) -> None:
        """Cuts its link, then kills all its processes at once."""
        self.cut()
        self.is_on = False
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Forgets the host, which has ended with its bed."""
        for each in self._programs:
            subprocesses.end(each, _END_S)
        os.close(self._pidfd)


class HostBed:
    """So many hosts, made when the context is entered; the clock of each is `apart_s` ahead of the one before."""

    def __init__(self, num_hosts: int, apart_s: int = 0):
        self.hosts: list[BedHost] = []
        self._num_hosts, self._apart_s = num_hosts, apart_s
        self._outer: subprocess.Popen[bytes] | None = None
        self._starters: list[subprocess.Popen[bytes]] = []
        self._pid = 0

    def __enter__(self) -> HostBed:
        """Makes the hosts; raises EnvironmentLacksError with the reason that `bamboo doctor` gives."""
        ensure(threading.current_thread() is threading.main_thread(), "the hosts would die with this thread")
        if why := hosts_error():
            raise EnvironmentLacksError(f"this machine makes no hosts of namespaces: {why}")
        try:
            self._pid = self._begin()
            self.call("ip", "link", "add", _BRIDGE, "type", "bridge")
            self.call("ip", "link", "set", _BRIDGE, "up")
            for number in range(self._num_hosts):
                ahead_ns = number * self._apart_s * 1_000_000_000
                self.hosts.append(BedHost(self, number, self._host(number), ahead_ns))
                self.hosts[-1].connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *command: str) -> None:
        """Runs a program beside the bridge; raises EnvironmentLacksError if it fails."""
        _checked([*_entering(self._pid), "--", *command])

    def slow(self, round_trip_ms: float = SLOW_MS) -> None:
        """Lets a round trip between two hosts take so long from now on."""
        links = [f"to-{host.name}" for host in self.hosts if host.is_on]
        module = ["-S", "-P", "-m", "engine.harness.slow_switch", str(round_trip_ms / 2)]
        command = [*_entering(self._pid), "--", sys.executable, *module, *links]
        self._starters.append(_piped(command, {**os.environ, "PYTHONPATH": subprocesses.python_path()}))
        _ready(self._starters[-1])

    def close(self) -> None:
        """Kills all processes of all hosts and waits for their end."""
        if self._outer is not None:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            self._outer.kill()
            for process in (*self._starters, self._outer):
                subprocesses.end(process, _END_S)
                if process.stdout is not None:
                    process.stdout.close()
        for host in self.hosts:
            host.close()
        self._outer, self.hosts, self._starters = None, [], []

    def _begin(self) -> int:
        command = [sys.executable, "-S", "-P", "-m", "engine.runtime.process.exec_with_parent", str(os.getpid())]
        command += [str(shutil.which("unshare")), *own_namespaces(), sys.executable, "-I", "-S", "-c", _INIT, "bridge"]
        environment = {**os.environ, "PYTHONPATH": subprocesses.python_path()}
        self._outer = _piped(command, environment)
        return _ready(self._outer)

    def _host(self, number: int) -> int:
        ahead = str(number * self._apart_s)
        apart = ["--net", "--mount", "--pid", "--uts", "--time", "--monotonic", ahead, "--boottime", ahead]
        apart += ["--fork", "--kill-child", "--mount-proc"]
        command = [
            *_entering(self._pid),
            "--",
            "unshare",
            *apart,
            sys.executable,
            "-I",
            "-S",
            "-c",
            _INIT,
            f"h{number}",
        ]
        self._starters.append(_piped(command, os.environ))
        return _ready(self._starters[-1])


def started_pid(entered: subprocess.Popen[bytes]) -> int | None:
    """Returns the pid of a program that was started on a host, as this machine numbers it; None if it has ended."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text().split():
            return int(each)
    return None


def _entering(pid: int) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *user, "--net", "--mount", "--pid"]


def _piped(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a program whose first word says that a namespace is ready; an unshare that is killed complains."""
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
    if done.returncode:
        raise EnvironmentLacksError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()}")


def _ready(starter: subprocess.Popen[bytes]) -> int:
    """Waits for the word of an init, and returns its pid: the last of the chain of processes that made it."""
    output = starter.stdout
    line = output.readline() if output is not None else b""
    if line != b"ready\n":
        raise EnvironmentLacksError(f"a namespace was not made; unshare exited with {starter.wait(_START_S)}")
    pid = starter.pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def _inner_pid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("NSpid:")]
    return int(line.split()[-2])


# An etcd of three members on three hosts of a bed, over TLS with certificates of its own.
MEMBERS = 3
_CLIENTS, _PEERS = 2379, 2380
_ETCD_START_S, _ETCD_CALL_S = 60.0, 5.0


class BedEtcd:
    """The members, one on each of the first three hosts; `variables` let a client in.

    Their data and certificates lie in `folder`, their output in `logs`, by default there too.
    """

    def __init__(self, hosts: Sequence[BedHost], folder: Path, logs: Path | None = None):
        self.hosts = tuple(hosts[:MEMBERS])
        self._folder = folder.absolute()  # a program on a host begins in the root folder
        self._logs = self._folder if logs is None else logs
        self._cert, self._key = self._folder / "cert.pem", self._folder / "key.pem"
        self._members: list[subprocess.Popen[bytes]] = []

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the environment with which bamboo finds the cluster and is let in."""
        endpoints = ",".join(f"{each.address}:{_CLIENTS}" for each in self.hosts)
        files = {"CA": self._cert, "CERT": self._cert, "KEY": self._key}
        return {"BAMBOO_ETCD": endpoints, **{f"BAMBOO_ETCD_{name}": str(path) for name, path in files.items()}}

    def __enter__(self) -> BedEtcd:
        """Starts the members and waits for their leader."""
        self._make_certificate()
        for host in self.hosts:
            with open(open_to_append(self._logs / f"etcd-{host.name}.log"), "ab") as log:
                self._members.append(host.start(find_etcd(), *self._flags(host), log=log))
        until_s = time.monotonic() + _ETCD_START_S
        while not all(self.answers(each) for each in self.hosts):
            if any(each.poll() is not None for each in self._members):
                raise EnvironmentLacksError(f"a member of etcd has ended at its start; see its logs in {self._logs}")
            if time.monotonic() > until_s:
                raise EnvironmentLacksError(f"etcd has no leader after {_START_S:g} s; see its logs in {self._logs}")
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:  # what enters a host for them; the members end with their hosts
            member.kill()
            member.wait()

    def answers(self, host: BedHost, timeout_s: float = _ETCD_CALL_S) -> bool:
        """Returns whether the member on a host has a quorum; asked on that host."""
        return self._ask(host, timeout_s, "endpoint", "health").returncode == 0

    def member_pid(self, host: BedHost) -> int | None:
        """Returns the process of the member on a host, as this machine numbers it; None if it has ended."""
        return next(
            (started_pid(each) for on, each in zip(self.hosts, self._members, strict=False) if on is host), None
        )

    def leader(self, *, first: BedHost | None = None, but: BedHost | None = None) -> BedHost:
        """Returns the host whose member leads; the member on `first` is asked first, that on `but` is not asked."""
        for host in sorted(self.hosts, key=lambda other: other is not first):
            if not host.is_on or host is but:
                continue
            done = self._ask(host, _ETCD_CALL_S, "endpoint", "status", "--write-out=json")
            answers: list[dict[str, Any]] = json.loads(done.stdout or "[]")  # of a member that does not answer, none
            statuses = [answer["Status"] for answer in answers]  # without `leader` while none is elected
            if any(status.get("leader") == status["header"]["member_id"] for status in statuses):
                return host
        raise EnvironmentLacksError("etcd has no leader")

    def lead(self, host: BedHost) -> None:
        """Lets the member on a host lead."""
        leader = self.leader()
        if leader is not host:
            status: dict[str, Any] = json.loads(
                self._ask(host, _ETCD_CALL_S, "endpoint", "status", "--write-out=json").stdout
            )[0]
            self._ask(leader, _ETCD_CALL_S, "move-leader", f"{status['Status']['header']['member_id']:x}")

    def _ask(self, host: BedHost, timeout_s: float, *words: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(find_etcd()).with_name("etcdctl"))
        tls = [f"--cacert={self._cert}", f"--cert={self._cert}", f"--key={self._key}"]
        limits = [f"--command-timeout={timeout_s:g}s", f"--dial-timeout={timeout_s:g}s"]
        place = f"--endpoints=https://{host.address}:{_CLIENTS}"
        return host.run(
            "env", "ETCDCTL_API=3", program, place, *tls, *limits, *words, timeout_s=timeout_s + _ETCD_CALL_S
        )

    def _make_certificate(self) -> None:
        """Makes one certificate, which all members and clients show and trust."""
        certificate = new_certificate("bed", [host.address for host in self.hosts])
        write_atomically(self._cert, certificate.certificate)
        write_atomically(self._key, certificate.key)

    def _flags(self, host: BedHost) -> list[str]:
        all_peers = ",".join(f"{each.name}=https://{each.address}:{_PEERS}" for each in self.hosts)
        clients, peers = f"https://{host.address}:{_CLIENTS}", f"https://{host.address}:{_PEERS}"
        tls = [f"{begin}{name}" for begin in ("--", "--peer-") for name in self._tls]
        return [
            f"--name={host.name}",
            f"--data-dir={self._folder / host.name}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster={all_peers}",
            "--unsafe-no-fsync",
            *tls,
        ]

    @property
    def _tls(self) -> tuple[str, ...]:
        files = (f"cert-file={self._cert}", f"key-file={self._key}", f"trusted-ca-file={self._cert}")
        return (*files, "client-cert-auth=true")
