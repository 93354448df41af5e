"""The leaks of a run: processes, listening ports, shared memory, files of its store, keys in an external store.

Processes of a run inherit an environment variable from the process that started the run. Shared memory does not record
its creator: a new segment that no process has open counts as a leak.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import closing
from pathlib import Path

import psutil

from engine.runtime.process.link import held, shared_memory
from engine.runtime.store.etcd_settings import EtcdSettings

_VARIABLE = "_BAMBOO_CASE"  # BAMBOO_* are fields of a job
_GONE_WITHIN_S = 2.0
_POLL_S = 0.01


class LeakCheck:
    """The host before a run; `left` returns what differs after it, of processes since `mark_processes`."""

    def __init__(self) -> None:
        self._mark = os.environ[_VARIABLE]
        self._shared_memory = shared_memory()
        self._ports = _own_ports()

    def left(self, logs: Path, run_id: str, etcd: EtcdSettings | None, server: int) -> list[str]:
        """Returns a line per leak that persists for two seconds after a run, the fork server's pid aside.

        Raises CoordinatorUnavailableError if the external store gives no answer.
        """
        until_s = time.monotonic() + _GONE_WITHIN_S
        while (leaks := self._found(logs, server)) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if etcd is not None:
            from engine.runtime.store.etcd_kv import EtcdKV

            with closing(EtcdKV(etcd, f"/bamboo/{run_id}/")) as kv:
                leaks += [f"key {item.key}" for item in kv.read_prefix("").items]
        return leaks

    def _found(self, logs: Path, server: int) -> list[str]:
        leaks = [
            f"process {process.pid} ({process.info['name']})"
            for process in psutil.process_iter(["name", "environ"])
            if process.pid != server and (process.info["environ"] or {}).get(_VARIABLE) == self._mark
        ]
        leaks += [f"this process listens on port {port}" for port in sorted(_own_ports() - self._ports)]
        new = shared_memory() - self._shared_memory
        leaks += [f"shared memory {name}" for name in sorted(new - held(new))]
        return leaks + [f"files of the store in {path}" for path in (logs / "etcd",) if path.exists()]


def mark_processes() -> None:
    """Marks all processes that this one starts from now on, with an environment variable."""
    os.environ[_VARIABLE] = secrets.token_hex(8)


def _own_ports() -> set[int]:
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
