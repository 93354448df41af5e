"""Probes of this machine: they return plain values, which the host checks judge.

A child probes torch: the import would cost this process seconds, and a broken build may end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.core.errors import EnvironmentLacksError
from engine.runtime.hosts.run_certificate import new_certificate
from engine.runtime.ipc.link_pairs import new_ring
from engine.runtime.process.subprocesses import inherited

TORCH_TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0
_PR_GET_PDEATHSIG = 2


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_kernel_calls() -> list[str]:
    """Returns the kernel calls that the fork server needs and this system lacks, each with the error."""

    def pidfd() -> None:
        fd = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(fd, 0)
        os.close(fd)

    def prctl() -> None:
        death_signal = ctypes.c_int()
        if ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(death_signal), 0, 0, 0) != 0:
            raise OSError("refused")

    missing = []
    for name, call in (
        ("pidfd", pidfd),
        ("prctl", prctl),
        ("memfd", lambda: os.close(os.memfd_create("bamboo-doctor"))),
    ):
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
    """Returns why two processes of this host cannot get the ends of a link, or an empty string."""
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
    """Returns the options of `unshare` for a network, processes and mounts of one's own; rootless with a user, too."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [*user, "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


def hosts_error() -> str:
    """Returns the reason why hosts cannot be made of namespaces on this machine, or an empty string."""
    if lacks := [each for each in ("unshare", "nsenter", "ip") if shutil.which(each) is None]:
        return f"no {', no '.join(lacks)} (util-linux and iproute2 have them)"
    trial = ["unshare", "--time", "--monotonic", "1", "--fork", "sh", "-c", "ip link add trial type bridge"]
    command = ["unshare", *own_namespaces(), *trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"unshare has ended with {done.returncode}")


def probe_folder(folder: Path) -> tuple[int, str]:
    """Returns (free bytes, error of creating a file) for `folder` or its nearest existing parent."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    try:
        existing = next(each for each in candidates if each.exists())
        with tempfile.TemporaryFile(dir=existing):
            return shutil.disk_usage(existing).free, ""
    except OSError as error:
        return 0, error.strerror or str(error)


def certificate_error() -> str:
    """Makes a certificate, as for a run on several hosts; returns why it cannot, or an empty string."""
    try:
        new_certificate()
    except EnvironmentLacksError as error:
        return str(error)
    return "" if ssl.HAS_TLSv1_3 else "this Python has no TLS 1.3"


def start_torch_probe() -> subprocess.Popen[str]:
    """Starts the probe of torch, which takes seconds, without its own and the current folder in `sys.path`."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))]
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
