"""Probes of etcd and its client: they return plain values, which the host checks judge."""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from itertools import pairwise
from pathlib import Path
from statistics import median

from engine.core.errors import BambooError
from engine.runtime.process.subprocesses import inherited
from engine.runtime.store.embedded_etcd import EmbeddedEtcd, find_etcd

_NUM_PUTS = 50
_VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """The etcd that a run would start, or the error."""

    path: str = ""
    version: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """The distributions that own the package `etcd3`, versions of its dependencies, or the error of its import."""

    owners: tuple[str, ...]
    protobuf: str = ""
    implementation: str = ""
    grpc: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of a private etcd in ms: from its start to the end of the first put, and of a later put (median)."""

    first_put_ms: float = 0.0
    put_ms: float = 0.0
    error: str = ""


def probe_server() -> Server:
    """Returns the etcd that a run without --etcd would start."""
    try:
        path = find_etcd()
        command = [path, "--version"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_VERSION_TIMEOUT_S, env=inherited()
        )
    except (BambooError, OSError, subprocess.SubprocessError) as error:
        return Server(error=str(error))
    # The first line is: etcd Version: 3.5.1
    return Server(path, done.stdout.partition("\n")[0].rpartition(" ")[2])


def probe_client() -> Client:
    """Returns the package that `import etcd3` finds here."""
    owners = tuple(sorted(set(packages_distributions().get("etcd3", ()))))
    try:
        from google.protobuf.internal import api_implementation

        from engine.runtime.store.etcd3_import import import_etcd3

        import_etcd3()
    except (BambooError, ImportError, TypeError) as error:
        return Client(owners, error=f"{type(error).__name__}: {error}".partition("\n")[0])
    named = tuple(f"{owner} {version(owner)}" for owner in owners)
    return Client(named, version("protobuf"), api_implementation.Type(), version("grpcio"))


def measure_latency() -> Latency:
    """Starts a private etcd, measures its latency, and ends it."""
    from engine.runtime.store.etcd_kv import EtcdKV

    with tempfile.TemporaryDirectory(prefix="bamboo-doctor-") as folder:
        started_s = time.perf_counter()
        try:
            with EmbeddedEtcd(Path(folder)) as server:
                kv = EtcdKV(server.settings(), "/bamboo/doctor/")
                stamps_s = [started_s]
                for _ in range(_NUM_PUTS):
                    kv.put("a", b"")
                    stamps_s.append(time.perf_counter())
                kv.close()
        except BambooError as error:
            return Latency(error=str(error))
    durations_ms = [(after - before) * 1e3 for before, after in pairwise(stamps_s)]
    return Latency(durations_ms[0], median(durations_ms[1:]))
