"""The check before training: each worker tries the layers of its stages and the data that it loads.

A replica copies the parameters and buffers of a layer, and no other state. A layer whose result depends on other state
would change the bits after a failover, so it is refused by its name before training. Each worker sends the hashes of
its layers to the agent, which compares the hashes of all holders of a stage.

Rule: all holders try a layer in the same way, as pipeline 0 in step 0. A layer gets the outputs of the layer before it.
Behind a border it gets normal random numbers drawn from a key. If the stage raises an exception on them, it gets zeros,
which it has accepted when the borders were learned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.codec.messages import in_messages
from engine.codec.values import cut
from engine.core.checks.determinism import without_form
from engine.core.checks.trajectory import DATA, OPTIMIZER, DigestByName, impure_layer
from engine.core.errors import Problem, UserError
from engine.core.history.run_records import PureCheckRecord
from engine.core.job.job import Job
from engine.core.message_kinds import CUT
from engine.core.messages import PureMessage
from engine.core.ownership import Ownership
from engine.models.data import Data, keyed_generator
from engine.models.data_sources import largest
from engine.models.layers import Batch, Model, Tensors
from engine.models.model_registry import is_own
from engine.models.slices import slice_of
from engine.runtime.device.device import HOST, Device, WithoutForm, unwritten_filled
from engine.runtime.process.clock import now_ns
from engine.runtime.stage.random_streams import displace, set_back
from engine.runtime.stage.trials import MICROBATCHES, LayerTrial, OptimizerTrial, drawn_like
from engine.runtime.transport.transport import Border
from engine.runtime.worker.microbatches import DataTrial, on_device
from engine.runtime.worker.step_end import WorkerContext

_MOST_PROBLEMS = 20
_MOST_OF_NAME = 1_000  # bytes; the name begins with the number of the layer


def check_pure(context: WorkerContext, ownership: Ownership) -> None:
    """Tries the layers of this worker's stages and sends the agent their marks; raises UserError for impure layers."""
    start_ns = now_ns()
    check = PureCheck(
        context.job,
        context.replicas.model,
        context.data,
        context.starts,
        context.borders,
        context.worker,
        context.replicas.device,
    )
    stages = sorted({stage for _, stage in context.replicas.stages})
    try:
        tried = list(_optimizer_rows(context))
        rows = tried + check.run({stage: _share_of(context.worker, stage, ownership) for stage in stages})
    finally:
        ms = round((now_ns() - start_ns) / 1e6, 1)
        unchecked = tuple(check.unchecked)
        flops = tuple((trial.index, *trial.flops) for trial in check.trials)
        context.replicas.residuals |= {trial.index: trial.residual for trial in check.trials}
        residuals = tuple((trial.index, *trial.residual) for trial in check.trials)
        gpu = "" if context.replicas.device.is_host else context.replicas.device.name
        layers = len(check.trials)
        record = PureCheckRecord(ms=ms, layers=layers, unchecked=unchecked, flops=flops, residuals=residuals, gpu=gpu)
        context.recorder.write(record)
    displace(
        context.worker, context.replicas.device
    )  # a draw of the data in training shows, as each worker gets another number
    for part in in_messages((cut(name, _MOST_OF_NAME, CUT), marks) for name, marks in rows):
        context.control.send(PureMessage(part))


class TrialShare(NamedTuple):
    """A worker's share of a stage's trial: an owner tries two copies, a shadow one.

    Straight layers with several holders are tried once by each (`is_shared`); all but the first fill new memory
    (`fills`).
    """

    is_twice: bool = True
    is_shared: bool = False
    fills: bool = False


def _share_of(worker: int, stage: int, ownership: Ownership) -> TrialShare:
    holders = [each for pipeline in range(ownership.grid.pipelines) for each in ownership.replicas(pipeline, stage)]
    is_shared = len({*holders}) > 1
    return TrialShare(worker in ownership.owners_of(stage), is_shared, fills=is_shared and worker != holders[0])


def _optimizer_rows(context: WorkerContext) -> Iterator[tuple[str, DigestByName]]:
    """Tries an optimizer of the user's on each layer here; yields the marks; raises UserError if it is impure."""
    if not is_own(context.job.optimizer):
        return
    trial = OptimizerTrial(context.job, context.replicas.device)
    for _, stage in sorted(context.replicas.stages.items()):
        for index, layer in stage.layers.items():
            with set_back(context.replicas.device):
                mark = trial.run(index, layer, stage.optimizers[index])
            yield f"{OPTIMIZER}{context.job.optimizer}", {f"update of layer {index}": mark}


@dataclass(slots=True)
class PureCheck:
    """Tries layers of a job; `unchecked` names the layers that raised an exception, and the layers behind them."""

    job: Job
    model: Model
    data: Data
    starts: Sequence[int]
    borders: Sequence[Border]
    worker: int = 0
    device: Device = HOST
    trials: list[LayerTrial] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    _data_trial: DataTrial = field(init=False)
    _batches: list[Batch] = field(default_factory=list)
    _without_form: dict[str, list[str]] = field(default_factory=dict)  # operations by the name of their layer

    def __post_init__(self) -> None:
        self._data_trial = DataTrial(self.job, self.data, self.worker)

    def run(self, stages: Mapping[int, TrialShare]) -> list[tuple[str, DigestByName]]:
        """Tries this worker's share of some stages, returns the marks by layer; raises UserError for impure ones."""
        with set_back(self.device):
            loads = 0 in stages or self.job.slots - 1 in stages
            if loads:
                batches = [slice_of(each, 0, self.job.slices) for each in self._data_trial.first()]
                self._batches = [on_device(each, self.device) for each in batches]
            for stage, share in stages.items():
                self._try(stage, share)
            if loads:
                self._data_trial.others()
                self._data_trial.again()
            if problems := list(self._problems()):
                raise UserError(problems[:_MOST_PROBLEMS])
        marked = [trial.marked for trial in self.trials]
        return [(DATA, self._data_trial.marks), *((each.name, each.marks) for each in marked)]

    def _try(self, stage: int, share: TrialShare) -> None:
        layers = range(self.starts[stage], (*self.starts[1:], len(self.model.layers))[stage])
        trials: list[LayerTrial] = []
        num_inputs = 1 if self.device.is_host and self.model.straight.issuperset(layers) else len(MICROBATCHES)
        filled = unwritten_filled if self.job.deterministic else contextlib.nullcontext
        with filled() if share.fills else contextlib.nullcontext():
            for inputs in self._inputs(stage):
                trials = self._first_trials(layers, inputs[:num_inputs], self._targets(stage))
                if len(trials) == len(layers):
                    break
        with filled():
            for trial in reversed(trials) if share.is_twice else ():
                if not (share.is_shared and trial.is_straight):
                    trial.second()
        self.trials += trials
        self.unchecked += [self.model.layers[index].name for index in layers[len(trials) :]]

    def _inputs(self, stage: int) -> Iterator[list[Tensors]]:
        """Yields inputs for a stage, the preferred ones first."""
        if stage == 0:
            yield [batch.inputs for batch in self._batches]
            return
        zeros = [tuple(spec.zeros(self.device) for spec in self.borders[stage - 1]) for _ in MICROBATCHES]
        generator = keyed_generator(self.job.seed, "pure", "border", stage)
        yield [tuple(drawn_like(each, generator).requires_grad_(each.requires_grad) for each in one) for one in zeros]
        yield zeros

    def _targets(self, stage: int) -> list[Tensors]:
        """Returns the targets of the inputs of a stage, which behind a border have the sizes of the largest."""
        if not (stage and self.job.variable_shapes and self._batches):
            return [batch.targets for batch in self._batches]
        batch = self.data.microbatch(*largest(self.job, self.data), self.job.microbatch_size)
        return [on_device(batch, self.device).targets for _ in MICROBATCHES]

    def _first_trials(self, layers: Sequence[int], inputs: list[Tensors], targets: list[Tensors]) -> list[LayerTrial]:
        """Tries a copy of each layer in turn, up to a layer that raises an exception: training will show it."""
        trials: list[LayerTrial] = []
        for index in layers:
            trial = LayerTrial(self.job, self.model, index, inputs, targets, self.device)
            operations = WithoutForm()
            try:
                with operations if self.job.deterministic else contextlib.nullcontext():
                    tried = next((each for each in trials if each.can_stand_for(trial)), None)
                    inputs = trial.take(tried) if tried else trial.first()
            except Exception:
                break
            finally:
                self._without_form[trial.marked.name] = operations.found
            trials.append(trial)
        return trials

    def _problems(self) -> Iterator[Problem]:
        if self._data_trial.problem:
            yield self._data_trial.problem
        for name, operations in self._without_form.items():
            yield from (without_form(name, each) for each in operations)
        for trial in self.trials:
            if trial.marked.sign and not self._without_form.get(trial.marked.name):
                yield impure_layer(trial.marked.name, trial.marked.sign + trial.changed_attributes())
