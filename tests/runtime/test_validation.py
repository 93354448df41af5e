"""A validation pass says that it moves on, so that a long one is no standstill, and a forward that never ends hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.ownership import Grid, fresh
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.process.control import Control
from engine.runtime.process.link import Link
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage
from engine.runtime.worker.validation import Validation
from tests.runtime.small_jobs import NORMED, borders_of, small_job


# The control's thread ends by an exception where it would end the process.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_each_forward_is_a_move(monkeypatch: pytest.MonkeyPatch, pair: tuple[Control, Link]) -> None:
    job = small_job(**{**NORMED, "stages": 1})
    data = open_data(job)
    model = build_model(job, data.facts)
    replicas = Replicas(job, model, (0,), [(0, 0)])
    replicas.learn(borders_of(job, model, data))
    control, _ = pair
    control.at = (5, 7, False)
    context: Any = SimpleNamespace(job=job, worker=0, replicas=replicas, data=data, borders=(), control=control)
    seen: list[tuple[int, int, bool]] = []
    evaluate = Stage.evaluate

    def watched(stage: Stage, inputs: Any) -> Any:
        seen.append(control.at)
        return evaluate(stage, inputs)

    monkeypatch.setattr(Stage, "evaluate", watched)
    plane: Any = SimpleNamespace(aside=None)
    assert Validation(context, plane, fresh(Grid(1, job.microbatches))).run() is not None
    assert seen == [(5, 8 + number, True) for number in range(job.validation_microbatches)]
    assert control.at == (5, 7 + job.validation_microbatches, False)
