"""The start of a simulated worker: it learns the partition, forms the first group, learns the borders, and has joined.

Rule: the driver of a worker does this before its machine has a part. The messages are those of the shipped worker, and
every third stage returns another border than the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.core import messages
from engine.core.message_kinds import ToWorker
from tests.simulation.executor import Executor
from tests.simulation.replica import first_replica

if TYPE_CHECKING:
    from tests.simulation.world import World


class Joining(Executor):
    """A worker that joins."""

    def __init__(self, world: World, number: int):
        super().__init__(world, number)
        self.ownership = world.ownership
        self.learns = False  # the borders, once the first group is formed
        self.early: list[tuple[messages.BorderSpecs, ...]] = []  # borders that it was told of

    def start(self) -> None:
        """Learns its job; the first worker cuts the model."""
        if self.puts_off(self.start):
            return
        self.come_to("welcome")
        self.goes_on(self._cut)

    def goes_on(self, what: Callable[[], None]) -> None:
        """Makes a call, unless the worker is dead or stopped."""
        if not self.puts_off(what):
            what()

    def _cut(self) -> None:
        if self.number not in self.world.members:
            self.joined()
        elif self.number == self.ownership.owners[0]:
            stages = range(self.case.stages)
            self.world.say(self.number, messages.CutMessage(tuple(stages), tuple(map(str, stages))))

    def joins(self, message: ToWorker) -> None:
        """Takes a message of the start; a worker that waits has no part in it."""
        if self.number not in self.world.members:
            return
        if isinstance(message, messages.PartitionMessage) and self.group < 0:
            self.come_to("partition")
            self.goes_on(self._build)
        elif isinstance(message, messages.BordersMessage):
            self.early.append(message.borders)
            self.learn()

    def _build(self) -> None:
        for slot in self.ownership.held_by(self.number):
            self.replicas[slot] = first_replica(slot, self.case.pipelines)
        self.join(0)
        self.world.links.join(self, 0, self.world.members)

    def formed_first(self) -> None:
        """Begins to learn the borders."""
        self.learns = True
        if self.ownership.owner(0, 0) == self.number:
            self.world.say(self.number, messages.BorderMessage(0, (), ()))
        self.learn()

    def learn(self) -> None:
        """Tries its stages behind the first border and behind the true one; has joined with the borders of all."""
        while self.learns and self.early:
            borders = self.early.pop(0)
            if len(borders) == self.case.stages:
                self.early, self.learns = [], False
                self.come_to("ready")
                self.goes_on(self.joined)
            for stage in range(len(borders), self.case.stages if len(borders) == 1 else len(borders) + 1):
                if stage < self.case.stages and self.ownership.owner(0, stage) == self.number:
                    before = borders[-1]
                    behind = (*before, ((stage,), "float32", True)) if stage % 3 == 0 else before
                    self.world.say(self.number, messages.BorderMessage(stage, (before,), behind))

    def joined(self) -> None:
        """Handles the end of the start."""
        raise NotImplementedError
