"""The trial of stages at the start: behind the first border at once, and behind the true one where that is another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.core.job.job import Job
from engine.core.messages import BorderMessage, BordersMessage
from engine.core.ownership import Grid, fresh
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.runtime.process.control import Control
from engine.runtime.stage.replicas import Replicas
from engine.runtime.worker.borders import learn_borders

FIRST, LONGER = ((((4, 8), "float32", True),), (((4, 16), "float32", True),))


class Doubled(nn.Module):
    """Takes rows of any length, and returns longer ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=1)


class Agent:
    """Tells a worker of borders, one after the other, and hears its words."""

    def __init__(self, told: Sequence[Sequence[Any]]):
        self.told = [BordersMessage(tuple(borders)) for borders in told]
        self.heard: list[BorderMessage] = []
        self.asked: list[int] = []  # the words heard before each message was taken

    def take(self, kind: type[BordersMessage]) -> BordersMessage:
        self.asked.append(len(self.heard))
        return self.told.pop(0)

    def send(self, message: BorderMessage) -> None:
        self.heard.append(message)


def words(stage: int, layers: Sequence[LayerSpec], *told: Sequence[Any], data: Data | None = None) -> Agent:
    """Returns the agent of the owner of a stage; each stage has one layer."""
    job = Job(stages=len(layers), microbatch_size=4, model="timed", data_args={"features": 8})
    model = Model(tuple(layers), default_loss)
    ownership, starts = fresh(Grid(len(layers), 1)), tuple(range(len(layers)))
    replicas = Replicas(job, model, starts, [(0, stage)])
    agent = Agent(told)
    learn_borders(cast(Control, agent), stage, ownership, replicas, starts, data or open_data(job))
    return agent


def layer(kind: str, size: int = 0) -> LayerSpec:
    return LayerSpec(kind, kind, partial(nn.Linear, size, size) if size else Doubled)


SQUARE, OTHER, ANY = layer("square", 8), layer("other", 16), layer("any")


def test_the_first_stage_is_tried_with_data() -> None:
    agent = words(0, [SQUARE] * 3, (FIRST,), (FIRST,) * 3)
    assert agent.heard == [BorderMessage(0, (), FIRST)] and agent.asked == [1, 1]


def test_a_stage_is_tried_behind_the_first_border_before_the_true_one_is_known() -> None:
    agent = words(2, [SQUARE] * 4, (FIRST,), (FIRST, FIRST), (FIRST,) * 4)
    assert agent.heard == [BorderMessage(2, (FIRST,), FIRST)]
    assert agent.asked == [0, 1, 1], "the true border is the one that it was tried behind"


def test_a_stage_is_tried_again_behind_another_border() -> None:
    agent = words(2, [SQUARE, ANY, ANY, OTHER], (FIRST,), (FIRST, LONGER), (FIRST,) * 4)
    assert [each.before for each in agent.heard] == [(FIRST,), (LONGER,)]
    assert [each.behind[0][0] for each in agent.heard] == [(4, 16), (4, 32)]


def test_an_exception_counts_only_behind_the_true_border() -> None:
    layers = [SQUARE, ANY, OTHER, OTHER]
    agent = words(2, layers, (FIRST,), (FIRST, LONGER), (FIRST,) * 4)
    assert agent.heard == [BorderMessage(2, (LONGER,), LONGER)]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        words(2, layers, (FIRST,), (FIRST, FIRST), (FIRST,) * 4)


def test_a_stage_behind_layers_of_several_kinds_waits_for_its_border() -> None:
    agent = words(3, [SQUARE, SQUARE, layer("also square", 8), SQUARE, SQUARE], (FIRST,), (FIRST,) * 3, (FIRST,) * 5)
    assert agent.asked == [0, 0, 1]


def test_a_mistake_in_the_data_is_one_behind_any_border() -> None:
    class Wrong:
        facts = open_data(Job(model="timed")).facts

        def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> None:
            raise OSError("no such sample")

    with pytest.raises(OSError, match="no such sample"):
        words(2, [SQUARE] * 3, (FIRST,), (FIRST,) * 3, data=cast(Data, Wrong()))
