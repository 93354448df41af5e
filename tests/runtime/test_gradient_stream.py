"""Streams between two replicas of one slot, over a wire on which what is sent has arrived."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.core.action import Action, Op
from engine.core.ownership import Grid, Ownership
from engine.core.program.build import build_program
from engine.core.program.dependencies import routes_of
from engine.models.data_sources import open_data
from engine.models.layers import Tensors
from engine.models.model_loader import build_model
from engine.runtime.stage.gradient_log import GradientStreams
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.transport import AsideKey
from tests.runtime.small_jobs import ALL_KINDS, STATEFUL, small_job

STEP, SLOT, NUM_MICROBATCHES = 1, (0, 0), 6
OWNERSHIP = Ownership(Grid(1, NUM_MICROBATCHES), (0,), ((1,),))


class Wire:
    """Stands for the messages aside of both."""

    def __init__(self) -> None:
        self.sent: dict[AsideKey, Tensor] = {}
        self.posted: list[AsideKey] = []
        self.aside = self

    def send(self, target: int, key: AsideKey, tensors: Tensors) -> None:
        assert target == 1
        (self.sent[key],) = tensors

    def post(self, source: int, key: AsideKey, border: Any) -> None:
        self.posted.append(key)

    def take(self, source: int, key: AsideKey) -> Tensors:
        assert key in self.posted
        return (self.sent.pop(key),)

    def take_arrived(self, source: int, key: AsideKey) -> Tensors | None:
        return self.take(source, key) if key in self.sent else None


class Pair:
    """The owner of a slot and its shadow."""

    def __init__(self, log_every: int, model_fields: dict[str, Any] = STATEFUL):
        job = small_job(**model_fields, stages=1, microbatches=NUM_MICROBATCHES, log_every=log_every)
        data = open_data(job)
        model = build_model(job, data.facts)
        self.batches = [data.microbatch(STEP, 0, each, job.microbatch_size) for each in range(NUM_MICROBATCHES)]
        self.wire = cast("Any", Wire())
        replicas = [Replicas(job, model, (0,), [SLOT]) for _ in range(2)]
        self.owner, self.shadow = (each.stages[SLOT] for each in replicas)
        program = build_program("1f1b", OWNERSHIP, "lazy", log_every=log_every)
        self.sends, self.takes = (GradientStreams(job, worker, replicas[worker]) for worker in range(2))
        for worker, streams in enumerate((self.sends, self.takes)):
            streams.enter(self.wire, OWNERSHIP, routes_of(worker, program, OWNERSHIP), program[worker])
            streams.begin()
        self.streamed = [action.microbatch for action in program[0] if action.op is Op.STREAM]

    def forward(self, stage: Stage, microbatch: int, op: Op = Op.F) -> Tensor:
        batch = self.batches[microbatch]
        run = stage.forward if op is Op.F else stage.redo_forward
        return run(STEP, microbatch, batch.inputs, batch.targets)[0]

    def train(self, stage: Stage, until: int) -> None:
        """Trains on the microbatches that are left, one forward ahead of the backwards; the owner streams."""
        while stage.added < until:
            while stage.counted < min(stage.added + 2, NUM_MICROBATCHES):
                self.forward(stage, stage.counted)
            if stage.added not in stage.residuals:
                self.forward(stage, stage.added, Op.REDO_F)
            stage.backward(STEP, stage.added, ())
            if stage is self.owner and stage.added - 1 in self.streamed:
                self.sends.run(Action(0, Op.STREAM, stage.added - 1), STEP)


def state(stage: Stage) -> tuple[object, ...]:
    gradients = [None if each.grad is None else each.grad.tolist() for each in stage.trained()]
    return gradients, [each.tolist() for each in stage.buffers()], dict(stage.losses), stage.counted, stage.added


@pytest.mark.parametrize("ahead", [0, 2, 5])
@pytest.mark.parametrize("log_every", [1, 2])
@pytest.mark.parametrize("model", [STATEFUL, ALL_KINDS], ids=["stateful", "all kinds"])
def test_a_shadow_goes_on_from_what_was_streamed(model: dict[str, Any], log_every: int, ahead: int) -> None:
    """It may have run forwards itself; one stream it takes in its program, the next when it is asked what it holds."""
    pair = Pair(log_every, model)
    for microbatch in range(ahead):
        pair.forward(pair.shadow, microbatch)
    pair.train(pair.owner, 2 * log_every)
    pair.takes.run(Action(0, Op.STREAM, log_every - 1), STEP)
    assert (pair.shadow.counted, pair.shadow.added) == (max(ahead, log_every), 0), "what it holds is not asked yet"
    pair.takes.settle()
    assert (pair.shadow.counted, pair.shadow.added) == (max(ahead, 2 * log_every), 2 * log_every)
    assert None in state(pair.shadow)[0], "no parameter lacks a gradient"  # type: ignore[operator]
    for microbatch in range(2 * log_every):  # somebody may have lost its gradient
        again = pair.forward(pair.shadow, microbatch, Op.REDO_F)
        assert torch.equal(again, pair.forward(pair.owner, microbatch, Op.REDO_F))
    for stage in (pair.owner, pair.shadow):
        pair.train(stage, NUM_MICROBATCHES)
    assert state(pair.shadow) == state(pair.owner)


def test_a_stream_is_a_copy() -> None:
    pair = Pair(1)
    pair.train(pair.owner, 1)
    (stream,) = pair.wire.sent.values()
    before = stream.tolist()
    pair.train(pair.owner, 3)
    assert stream.tolist() == before


def test_one_stream_is_posted_ahead_and_nothing_is_left_of_a_step() -> None:
    pair = Pair(1)
    assert len(pair.wire.posted) == 1
    pair.train(pair.owner, 3)
    pair.takes.run(Action(0, Op.STREAM, 0), STEP)
    assert len(pair.wire.posted) == 2
    pair.takes.clear()
    pair.takes.settle()
    assert pair.shadow.added == 0
