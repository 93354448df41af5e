"""Whole jobs inside the process of a test: the agent and the workers of every run, with a store that is a double."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.core.faults.fault import Fault
from engine.core.job.job import Job
from engine.core.ownership import Ownership
from engine.runtime.agent import session
from engine.runtime.agent.coordinator import Node
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.clock import now_ns
from engine.runtime.process.thread_server import ThreadServer
from tests.doubles.kv_double import StoreDouble
from tests.doubles.kv_double_client import ClientDouble


def _join_double(stack: Any, etcd: Any, run_id: str, logs: Path, first: Any, *rest: Any) -> Node:
    return Node(ClientDouble(StoreDouble(), "/"), first, now_ns())


@contextmanager
def with_store_double() -> Iterator[None]:
    """Lets sessions have a store that is a double."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "join_store", _join_double)
        yield


def run_in_threads(
    job: Job, faults: Sequence[Fault] = (), ownership: Ownership | None = None, **options: Any
) -> Ending:
    """Runs a job to its end; `options` are others of `run_session`."""
    with tempfile.TemporaryDirectory() as name, ThreadServer() as server, with_store_double():
        folder = Path(name)
        return session.run_session(
            job, folder / "events.jsonl", folder, server=server, faults=faults, ownership=ownership, **options
        )
