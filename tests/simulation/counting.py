"""What the workers of a history did with samples, for the check that every committed step counted each of them once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.action import Action
from engine.core.checks.samples import DoneAction, RunLives, miscounted_in
from engine.core.job.job import Job
from engine.core.protocol.state import Phase, State
from tests.simulation.compiled import OPS

if TYPE_CHECKING:
    from tests.simulation.executor import Executor
    from tests.simulation.world import World


class SampleCounts:
    """The records of one history that the check of a run reads."""

    def __init__(self, world: World):
        self.world = world
        self._done: list[tuple[int, int, int, int, tuple[Any, ...]]] = []
        self._out: list[tuple[int, int]] = []
        self._starts: list[tuple[int, int]] = []

    def did(self, worker: Executor, action: tuple[Any, ...]) -> None:
        """Records an action that has a part in the sums of a slot."""
        self._done.append((worker.step, worker.epoch, self.world.now, worker.number, action))

    def decided(self, old: State, new: State) -> None:
        """Records a verdict, or that the job is started again."""
        if new.epoch > old.epoch:
            self._out += [(self.world.now, each.worker) for each in new.verdict]
        if new.phase is Phase.RESTARTING is not old.phase:
            self._starts.append((self.world.now, -1))

    def miscounted(self, num_steps: int) -> list[str]:
        """Returns one sentence for each microbatch that the first steps did not count once."""
        case = self.world.case
        job = Job(
            stages=case.stages // case.blocks,
            blocks=case.blocks,
            pipelines=case.pipelines,
            microbatches=case.microbatches // case.slices,
            slices=case.slices,
            log_every=case.log_every,
        )
        done = (
            DoneAction(step, epoch, at, worker, Action(slot[1], OPS[code], microbatch, slot[0]))
            for step, epoch, at, worker, (code, slot, microbatch, *_) in self._done
        )
        return miscounted_in({*range(num_steps)}, done, RunLives(self._starts, self._out), job)
