"""Runs over the calls of NCCL, on a double of its library: of one fork server, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.runtime.process.fork_client import ForkServer
from tests.doubles.nccl_double import EAGER, Double
from tests.e2e.kill_runs import Runs
from tests.e2e.launcher import ROOT

OVER_NCCL: dict[str, Any] = {"backend": "nccl", "device": "cpu"}
# What real libraries do either way: an error tells a death or none does; a short message leaves early or waits.
MODES = {
    "told-early": (True, EAGER),
    "silent-waits": (False, 1),
    "silent-early": (False, EAGER),
    "told-waits": (True, 1),
}


class OverNccl:
    """Runs of one fork server over one double."""

    def __init__(self, double: Double, runs: Runs):
        self.double, self.runs = double, runs
        self._numbers = count()

    def has_next_modes(self) -> None:
        """Takes the modes of the double in turn."""
        told, eager = list(MODES.values())[next(self._numbers) % len(MODES)]
        self.double.has_modes(tells_deaths=told, eager=eager)

    def check(self) -> None:
        """Checks that messages went over the double, and that no call broke a rule."""
        counts = self.double.counts()
        assert counts["eager"] + counts["rendezvous"] > 0 and counts["joins"] > 0
        assert self.double.offences() == []


@contextmanager
def served(folder: Path) -> Iterator[OverNccl]:
    """Makes runs in a folder."""
    double = Double(folder / "double")
    with pytest.MonkeyPatch.context() as patch, double.in_environment():
        patch.setenv("PYTHONPATH", str(ROOT))
        with ForkServer() as server:
            yield OverNccl(double, Runs(folder, server))


def over_nccl(job: Job) -> Job:
    """Returns a job whose workers send over NCCL between CPUs."""
    return replace(job, **OVER_NCCL)
