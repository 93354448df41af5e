"""What a run leaves behind, where its fork server outlives it: all but the server itself is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.harness.leak_check import LeakCheck, mark_processes
from engine.runtime.process.fork_client import ForkServer


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("_BAMBOO_CASE", "")  # put back afterwards
    mark_processes()
    with ForkServer() as server:
        yield server


def test_the_server_is_no_leftover(server: ForkServer, tmp_path: Path) -> None:
    assert LeakCheck().left(tmp_path, "run", None, server.pid) == []


def test_a_process_that_stays_is_found_in_every_case(server: ForkServer, tmp_path: Path) -> None:
    for _ in range(2):
        traces = LeakCheck()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            (found,) = traces.left(tmp_path, "run", None, server.pid)
            assert found.startswith(f"process {child.pid} (")
            child.kill()
