"""An etcd of three members on three hosts of a bed, over TLS with certificates of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import EnvironmentLacksError
from engine.files.atomic_write import open_to_append
from engine.harness.bed.host_bed import BedHost, started_pid
from engine.runtime.store.embedded_etcd import find_etcd

MEMBERS = 3
_CLIENTS, _PEERS = 2379, 2380
_START_S, _CALL_S = 60.0, 5.0


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
        for each in self.hosts:
            with open(open_to_append(self._logs / f"etcd-{each.name}.log"), "ab") as log:
                self._members.append(each.start(find_etcd(), *self._flags(each), log=log))
        until_s = time.monotonic() + _START_S
        while not all(self.answers(each) for each in self.hosts):
            if any(each.poll() is not None for each in self._members):
                raise EnvironmentLacksError(f"a member of etcd has ended at its start; see its logs in {self._logs}")
            if time.monotonic() > until_s:
                raise EnvironmentLacksError(f"etcd has no leader after {_START_S:g} s; see its logs in {self._logs}")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._members:  # what enters a host for them; the members end with their hosts
            each.kill()
            each.wait()

    def answers(self, host: BedHost, timeout_s: float = _CALL_S) -> bool:
        """Returns whether the member on a host has a quorum; asked on that host."""
        return self._ask(host, timeout_s, "endpoint", "health").returncode == 0

    def member_pid(self, host: BedHost) -> int | None:
        """Returns the process of the member on a host, as this machine numbers it; None if it has ended."""
        return next(
            (started_pid(each) for on, each in zip(self.hosts, self._members, strict=False) if on is host), None
        )

    def leader(self, *, first: BedHost | None = None, but: BedHost | None = None) -> BedHost:
        """Returns the host whose member leads; the member on `first` is asked first, that on `but` is not asked."""
        for each in sorted(self.hosts, key=lambda host: host is not first):
            if not each.is_on or each is but:
                continue
            done = self._ask(each, _CALL_S, "endpoint", "status", "--write-out=json")
            status: list[dict[str, Any]] = json.loads(done.stdout or "[]")  # of a member that does not answer, none
            found = [told["Status"] for told in status]  # without `leader` while none is elected
            if any(told.get("leader") == told["header"]["member_id"] for told in found):
                return each
        raise EnvironmentLacksError("no member of etcd leads")

    def lead(self, host: BedHost) -> None:
        """Lets the member on a host lead."""
        leader = self.leader()
        if leader is not host:
            told: dict[str, Any] = json.loads(
                self._ask(host, _CALL_S, "endpoint", "status", "--write-out=json").stdout
            )[0]
            self._ask(leader, _CALL_S, "move-leader", f"{told['Status']['header']['member_id']:x}")

    def _ask(self, host: BedHost, timeout_s: float, *words: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(find_etcd()).with_name("etcdctl"))
        tls = [f"--cacert={self._cert}", f"--cert={self._cert}", f"--key={self._key}"]
        limits = [f"--command-timeout={timeout_s:g}s", f"--dial-timeout={timeout_s:g}s"]
        place = f"--endpoints=https://{host.address}:{_CLIENTS}"
        return host.run("env", "ETCDCTL_API=3", program, place, *tls, *limits, *words, timeout_s=timeout_s + _CALL_S)

    def _make_certificate(self) -> None:
        """Makes one certificate, which all members and clients show and trust."""
        names = ",".join(f"IP:{each.address}" for each in self.hosts)
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", str(self._key), "-out", str(self._cert), "-days", "2", "-subj", "/CN=bed"]
        command += ["-addext", f"subjectAltName={names}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
        if done.returncode:
            raise EnvironmentLacksError(f"openssl has ended with {done.returncode}: {done.stderr.strip()}")

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
