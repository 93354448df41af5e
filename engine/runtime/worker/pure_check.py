"""The check before training: every layer that this worker holds a replica of is tried, and so is the data it loads.

A replica has parameters and buffers, and nothing else that a layer may have kept; so what another copy would make
otherwise is refused here, with the layer's name, and not found out after a failover. The marks of the layers go to the
agent, which compares what the holders of one stage say. Rule: every holder tries a layer in the same way, as pipeline 0
in step 0. It is called with what the layer before returned; behind a border with normal numbers drawn from a key, or
with zeros if the stage raises on those: zeros it has taken before, when the borders were learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.checks.purity import DATA, DigestByName, impure
from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.core.history.run_records import PureCheckRecord
from engine.core.messages import PureMessage
from engine.core.ownership import Ownership
from engine.models.data import Data, keyed_generator
from engine.models.layers import Batch, Model, Tensors
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.stage.layer_trial import MICROBATCHES, LayerTrial, Marked, drawn_like
from engine.runtime.stage.random_streams import set_back
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.worker.worker_context import WorkerContext

_ROWS_PER_MESSAGE, _MOST_PROBLEMS = 50, 20  # so that a message fits into a packet


def check_pure(context: WorkerContext, ownership: Ownership) -> None:
    """Tries the layers of this worker's stages and tells the agent their marks; raises UserError for what is impure."""
    start_ns = now_ns()
    check = PureCheck(context.job, context.replicas.model, context.data, context.starts, context.borders)
    owned = {stage for _, stage in ownership.slots_of(context.worker)}
    try:
        rows = check.run({stage: stage in owned for _, stage in sorted(context.replicas.stages)})
    finally:
        ms = round((now_ns() - start_ns) / 1e6, 1)
        unchecked = tuple(check.unchecked)
        context.recorder.write(PureCheckRecord(ms=ms, layers=len(check.trials), unchecked=unchecked))
    for first in range(0, len(rows), _ROWS_PER_MESSAGE):
        context.control.send(PureMessage(tuple(rows[first : first + _ROWS_PER_MESSAGE])))


@dataclass(slots=True)
class PureCheck:
    """Tries layers of a job; `unchecked` names those of which nothing can be said, because they raised."""

    job: Job
    model: Model
    data: Data
    starts: Sequence[int]
    borders: Sequence[Border]
    trials: list[LayerTrial] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    _loaded: Marked = field(default_factory=lambda: Marked(DATA))
    _batches: list[Batch] = field(default_factory=list)

    def run(self, stages: Mapping[int, bool]) -> list[tuple[str, DigestByName]]:
        """Tries the layers of some stages, in two copies or in one; returns the marks of each layer by name.

        Raises UserError with all that is impure.
        """
        with set_back():
            if 0 in stages or self.job.stages - 1 in stages:
                self._batches = [self._load(microbatch, "") for microbatch in MICROBATCHES]
            for stage, twice in stages.items():
                self._try(stage, twice)
            for microbatch in reversed(range(len(self._batches))):
                self._load(microbatch, "when it is loaded again")
            if problems := list(self._problems()):
                raise UserError(problems[:_MOST_PROBLEMS])
        return [(each.name, each.marks) for each in (self._loaded, *(trial.marked for trial in self.trials))]

    def _load(self, microbatch: int, when: str) -> Batch:
        # A job of one microbatch has no second one: what comes as whole batches cannot give it.
        number = min(microbatch, self.job.microbatches - 1)
        batch = self.data.microbatch(0, 0, number, self.job.microbatch_size)
        self._loaded.note(f"microbatch {microbatch}", (*batch.inputs, *batch.targets), when)
        return batch

    def _try(self, stage: int, twice: bool) -> None:
        layers = range(self.starts[stage], (*self.starts[1:], len(self.model.layers))[stage])
        trials: list[LayerTrial] = []
        for inputs in self._inputs(stage):
            trials = self._first_trials(layers, inputs)
            if len(trials) == len(layers):
                break
        for trial in reversed(trials) if twice else ():
            trial.second()
        self.trials += trials
        self.unchecked += [self.model.layers[index].name for index in layers[len(trials) :]]

    def _inputs(self, stage: int) -> Iterator[list[Tensors]]:
        """Yields what a stage may be called with, the best first."""
        if stage == 0:
            yield [batch.inputs for batch in self._batches]
            return
        zeros = [tuple(spec.zeros() for spec in self.borders[stage - 1]) for _ in MICROBATCHES]
        generator = keyed_generator(self.job.seed, "pure", "border", stage)
        yield [tuple(drawn_like(each, generator).requires_grad_(each.requires_grad) for each in one) for one in zeros]
        yield zeros

    def _first_trials(self, layers: Sequence[int], inputs: list[Tensors]) -> list[LayerTrial]:
        """Tries a copy of each layer in turn, up to one that raises: if it does so in training too, that will tell."""
        trials = []
        for index in layers:
            trial = LayerTrial(self.job, self.model, index, inputs, [batch.targets for batch in self._batches])
            try:
                inputs = trial.first()
            except Exception:
                break
            trials.append(trial)
        return trials

    def _problems(self) -> Iterator[Problem]:
        if self._loaded.sign:
            yield impure(DATA, self._loaded.sign)
        for trial in self.trials:
            if trial.marked.sign:
                yield impure(trial.marked.name, trial.marked.sign + trial.changed_attributes())
