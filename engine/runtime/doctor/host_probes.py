"""Looks at this machine and returns plain values; judging them is for the host checks.

torch is looked at in a child: importing it here would cost seconds, and a broken build may end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TORCH_TIMEOUT_S = 60.0
DNS_TIMEOUT_S = 3.0
_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0
_PR_GET_PDEATHSIG = 2


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_gpu_devices() -> int:
    """Returns how many NVIDIA devices the kernel shows, whether or not torch can use them."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def missing_kernel_calls() -> list[str]:
    """Returns what the fork server needs and this system lacks, with the reason."""

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
    """Returns why two sockets cannot meet on 127.0.0.1, or an empty string."""
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


def reverse_dns_s() -> float | None:
    """Returns how long the slowest look-up of a loopback address's name takes, or None if the time ran out."""
    # TCP stores listen on both families and see loopback peers under the second name, which a hosts file rarely has.
    names = (_LOOPBACK, f"::ffff:{_LOOPBACK}")
    durations_s: list[float] = []

    def look_up() -> None:
        for name in names:
            started = time.monotonic()
            # An answer that there is no name is an answer.
            with contextlib.suppress(OSError):
                socket.getnameinfo((name, 0), 0)
            durations_s.append(time.monotonic() - started)

    # A look-up cannot be stopped; the thread is left behind and ends with the process.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(DNS_TIMEOUT_S)
    return max(durations_s) if len(durations_s) == len(names) else None


def probe_folder(folder: Path) -> tuple[int, str]:
    """Returns (free bytes, why a file cannot be made) for `folder`, or for the nearest parent that exists."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    try:
        existing = next(each for each in candidates if each.exists())
        with tempfile.TemporaryFile(dir=existing):
            return shutil.disk_usage(existing).free, ""
    except OSError as error:
        return 0, error.strerror or str(error)


def start_torch_probe() -> subprocess.Popen[str]:
    """Starts the look at torch, which takes seconds; its folder and the current one are kept off the module path."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish_torch_probe(child: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Returns (what the probe said, why it failed)."""
    try:
        out, errors = child.communicate(timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return {}, f"importing torch took longer than {TORCH_TIMEOUT_S:g} s"
    if child.returncode != 0:
        return {}, errors.strip().rpartition("\n")[2] or f"importing torch ended with code {child.returncode}"
    return json.loads(out), ""
