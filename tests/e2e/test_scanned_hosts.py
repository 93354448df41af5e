"""A run on two hosts whose ports a stranger scans all the time, with garbage: it keeps its bits."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from pathlib import Path

import pytest

from engine.core.job.job import Job
from tests.e2e.conftest import Train
from tests.e2e.host_bed import HostBed, kept_etcd, settings

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(240)]
MLP = Job(model="mlp", stages=4, steps=40, microbatches=2)
GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\xff" * 5000, b"\x16\x03\x01\x02\x00\x01")


class Scan:
    """A stranger that connects to every port on which the processes of a bed listen, again and again."""

    def __init__(self, bed: HostBed):
        self.reached: set[str] = set()
        self._agents = [*bed.agents.values()]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scan:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        garbage = itertools.cycle(GARBAGE)
        while not self._is_over.wait(0.02):
            for each in [found for agent in self._agents for found in agent.listeners()]:
                address = each.address.removeprefix("::ffff:")
                with contextlib.suppress(OSError), socket.create_connection((address, each.port), 0.5) as stranger:
                    stranger.sendall(next(garbage))
                    self.reached.add(address)


def test_a_run_whose_ports_are_scanned_keeps_its_bits(tmp_path: Path, train: Train) -> None:
    with kept_etcd(tmp_path) as etcd, contextlib.ExitStack() as stack:
        bed = HostBed(tmp_path / "run", etcd, 2, settings(MLP, "model", "stages", "steps", "microbatches"))
        stack.callback(bed.close)
        bed.until_commits(3)
        with Scan(bed) as scan:
            ends = bed.ends()
        assert {each.code for each in ends.values()} == {0}, ends
        assert scan.reached
        assert scan.reached <= {"127.0.0.1", "127.0.0.2"}
        assert [each["verdict"] for each in bed.chief.events("epoch")] == [[]]
        assert bed.trajectory() == [row.texts() for row in train(MLP).view.run_state.rows]
