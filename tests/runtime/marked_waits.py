"""Waits of main threads for a GPU without a mark: a worker whose kernel does not end would seem to wait for others.

The standstill of all workers ends such a hang too, but after more than a minute.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from engine.runtime.process.control import Control
from engine.runtime.worker.worker import WorkerRun
from tests.doubles.fake_gpu import FakeGpu


@contextlib.contextmanager
def unmarked_waits(gpu: FakeGpu) -> Iterator[list[str]]:
    """Collects the places of such waits, of workers that are threads and have joined."""
    controls, found, run = dict[int, Control](), list[str](), WorkerRun.run

    def watched(worker: WorkerRun, control: Control, *given: Any) -> int:
        own = threading.get_ident()
        controls[own] = control
        try:
            return run(worker, control, *given)
        finally:
            del controls[own]

    def look(what: str) -> None:
        control = controls.get(threading.get_ident())
        if control is not None and control.accepted and not control.at[2]:
            places = [
                f"{each.filename}:{each.lineno}" for each in traceback.extract_stack() if "/engine/" in each.filename
            ]
            found.append(f"{what} at {' < '.join(places[:-5:-1])}")

    gpu.streams.on_wait = look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerRun, "run", watched)
        yield found
