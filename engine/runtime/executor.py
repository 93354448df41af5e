"""The executor: interprets a program, action by action, through one table from op to method.

It obeys. What runs, where and in which order was decided by the program; what a commit is was decided by the agent.
Each action is on the progress board while it runs and in the events file before the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from engine.core.action import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.job import Job
from engine.core.lr_schedule import learning_rate
from engine.core.ownership import Ownership
from engine.models.data import Data
from engine.models.layers import Batch, Tensors
from engine.runtime.control import Control
from engine.runtime.optimizer import trainable
from engine.runtime.plane import DataPlane
from engine.runtime.progress_board import ProgressBoard
from engine.runtime.recorder import Recorder, now_ns
from engine.runtime.reduction import mean_over_pipelines
from engine.runtime.stage import Stage, squared_norm
from engine.runtime.tensor_spec import Border, TensorSpec
from engine.runtime.tied import Use, later_uses, sum_in_layer_order, uses_of
from engine.runtime.transfers import Kind, Receiver, receives_of, send_key, transfer_key

Slot = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an executor works with: fixed for one epoch."""

    job: Job
    worker: int
    ownership: Ownership
    starts: tuple[int, ...]
    borders: tuple[Border, ...]
    stages: Mapping[Slot, Stage]
    data: Data
    plane: DataPlane
    control: Control
    recorder: Recorder
    board: ProgressBoard


class Executor:
    """Runs one worker's share of a training program, a step at a time."""

    def __init__(self, around: Surroundings, actions: Sequence[Action]):
        self.around = around
        self.actions = [(action, str(action), getattr(self, _METHODS[action.op])) for action in actions]
        self.receives = receives_of(actions, around.worker, around.ownership, around.borders)
        self.routes = {action: self._route(action) for action in actions if action.op in SEND_OPS}
        self.next_forwards = _next_forwards(actions)
        self.batches: dict[Action, Batch] = {}
        self.uses = uses_of(next(iter(around.stages.values())).model.ties, around.starts)
        self.step = 0
        self.num_computed = 0
        self.receiver: Receiver
        self.values: dict[tuple[Op, int, int, int], Tensors] = {}
        self.tied_gradients: dict[tuple[int, Use], Tensor] = {}
        self.clip_factor = 1.0
        self.is_last_step = False

    def run_step(self, step: int) -> None:
        """Runs the program once; raises Stopped when the agent says so, and whatever a layer raises."""
        around = self.around
        self.step = step
        self.values = {}
        self.receiver = Receiver(around.plane, self.receives)
        committed = False
        for index, (action, text, run) in enumerate(self.actions, start=1):
            around.control.check()
            if action.op is Op.STEP and not committed:
                self._await_commit()
                committed = True
            around.board.write(around.worker, step, self.num_computed, text)
            around.control.at = (step, index, action.op in _BUSY_OPS)
            start_ns = now_ns()
            run(action)
            around.recorder.action(step, text, start_ns, now_ns())
            around.control.at = (step, index, False)
            self.num_computed += action.op in COMPUTE_OPS

    def _stage(self, action: Action) -> Stage:
        return self.around.stages[action.pipeline, action.stage]

    def _forward(self, action: Action) -> None:
        stage = self._stage(action)
        inputs = self.values.pop((Op.F, action.pipeline, action.stage - 1, action.microbatch), None)
        targets = None
        if self._reads_data(action):
            batch = self.batches.pop(action, None) or self._load(action)
            inputs = batch.inputs if action.stage == 0 else inputs
            targets = batch.targets if stage.is_last else None
        assert inputs is not None
        outputs = stage.forward(self.step, action.microbatch, inputs, targets)
        self.values[Op.F, action.pipeline, action.stage, action.microbatch] = outputs

    def _backward(self, action: Action) -> None:
        gradients = self.values.pop((Op.B, action.pipeline, action.stage + 1, action.microbatch), ())
        self.values.pop((Op.F, action.pipeline, action.stage, action.microbatch), None)
        made = self._stage(action).backward(self.step, action.microbatch, gradients)
        self.values[Op.B, action.pipeline, action.stage, action.microbatch] = made

    def _reads_data(self, action: Action) -> bool:
        return action.stage == 0 or self._stage(action).is_last

    def _load(self, action: Action) -> Batch:
        around = self.around
        return around.data.microbatch(self.step, action.pipeline, action.microbatch, around.job.microbatch_size)

    def _receive(self, action: Action) -> None:
        if self.receiver.must_wait() and action in self.next_forwards:
            self._prepare(self.next_forwards[action])
        made_by, source = (Op.F, action.stage - 1) if action.op is Op.RECV_F else (Op.B, action.stage + 1)
        self.values[made_by, action.pipeline, source, action.microbatch] = self.receiver.take()

    def _prepare(self, forward: Action) -> None:
        """Does for a coming forward what does not depend on its input, in time that would pass in a wait."""
        self._stage(forward).prepare(self.step, forward.microbatch)
        if forward not in self.batches and self._reads_data(forward):
            self.batches[forward] = self._load(forward)

    def _route(self, send: Action) -> tuple[int, int]:
        """Returns whom a send is for, and the key of its transfer."""
        ownership, step_to = self.around.ownership, 1 if send.op is Op.SEND_F else -1
        return ownership.owner(send.pipeline, send.stage + step_to), send_key(ownership.grid, send)

    def _send(self, action: Action) -> None:
        made_by = Op.F if action.op is Op.SEND_F else Op.B
        tensors = self.values.pop((made_by, action.pipeline, action.stage, action.microbatch))
        self.around.plane.send(*self.routes[action], tensors)

    def _reduce(self, action: Action) -> None:
        around, stage = self.around, self._stage(action)
        parameters = [parameter for layer in stage.layers.values() for _, parameter in trainable(layer)]
        gradients = [_gradient(parameter) for parameter in parameters]
        reduced = mean_over_pipelines(around.plane, around.ownership, action.pipeline, action.stage, gradients)
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient
        for uses in self.uses:
            for use in uses:
                if use.stage == action.stage:
                    self._share_tied(action.pipeline, use, uses)

    def _share_tied(self, pipeline: int, use: Use, uses: list[Use]) -> None:
        """Sends the gradient of one use of a tied parameter to the other stages that use it."""
        around = self.around
        gradient = _gradient(around.stages[pipeline, use.stage].layers[use.layer].get_parameter(use.name))
        self.tied_gradients[pipeline, use] = gradient
        for target in sorted({around.ownership.owner(pipeline, other.stage) for other in uses} - {around.worker}):
            around.plane.send(target, self._tie_key(pipeline, use), (gradient,))

    def _tie_key(self, pipeline: int, use: Use) -> int:
        index = sum(len(uses) for uses in self.uses[: use.tie]) + use.order
        return transfer_key(self.around.ownership.grid, Kind.TIE, pipeline, use.stage, index)

    def _commit(self, action: Action) -> None:
        """Gathers what the optimizer step will read, then votes: this slot holds it all."""
        around, stage = self.around, self._stage(action)
        for uses in self.uses:
            self._sum_tied(action, uses)
        skip = later_uses(stage.model.ties)
        norms = {
            index: squared_norm([_gradient(p) for name, p in trainable(layer) if (index, name) not in skip])
            for index, layer in stage.layers.items()
        }
        loss = None
        if stage.is_last:
            loss = fmean(stage.losses)  # rounds once; `sum` differs between versions of Python
            stage.losses = []
        around.control.send(
            "vote", step=self.step, pipeline=action.pipeline, stage=action.stage, norms=list(norms.items()), loss=loss
        )

    def _sum_tied(self, action: Action, uses: list[Use]) -> None:
        around = self.around
        mine = [use for use in uses if use.stage == action.stage]
        if not mine:
            return
        layer = around.stages[action.pipeline, action.stage].layers[mine[0].layer]
        border = (TensorSpec.of(layer.get_parameter(mine[0].name)).as_gradient(),)
        for use in uses:
            source = around.ownership.owner(action.pipeline, use.stage)
            if (action.pipeline, use) not in self.tied_gradients:
                around.plane.post(source, self._tie_key(action.pipeline, use), border)
                (gradient,) = around.plane.take(source, self._tie_key(action.pipeline, use))
                self.tied_gradients[action.pipeline, use] = gradient
        total = sum_in_layer_order([self.tied_gradients[action.pipeline, use] for use in uses])
        for use in mine:
            around.stages[action.pipeline, use.stage].layers[use.layer].get_parameter(use.name).grad = total.clone()

    def _await_commit(self) -> None:
        commit = self.around.control.take("commit")
        assert commit["step"] == self.step, f"commit of step {commit['step']} while at step {self.step}"
        self.clip_factor = commit["clip_factor"]
        self.is_last_step = commit["last"]
        self.around.plane.reap()
        self.tied_gradients = {}

    def _optimizer_step(self, action: Action) -> None:
        job, stage = self.around.job, self._stage(action)
        rate = learning_rate(job.lr_schedule, job.lr, self.step, job.steps, job.warmup_steps)
        for index, optimizer in stage.optimizers.items():
            if self.clip_factor != 1.0:
                for _, parameter in trainable(stage.layers[index]):
                    _gradient(parameter).mul_(self.clip_factor)
            optimizer.step(rate)


# While it runs one of these, a worker waits for nobody: one that never ends hangs.
_BUSY_OPS = COMPUTE_OPS | {Op.STEP}

_METHODS = {
    Op.F: "_forward",
    Op.B: "_backward",
    Op.RECV_F: "_receive",
    Op.RECV_B: "_receive",
    Op.SEND_F: "_send",
    Op.SEND_B: "_send",
    Op.REDUCE_GRAD: "_reduce",
    Op.COMMIT: "_commit",
    Op.STEP: "_optimizer_step",
}


def _next_forwards(actions: Sequence[Action]) -> dict[Action, Action]:
    """Returns for each receive the forward that comes next, whatever it is that is received."""
    found: dict[Action, Action] = {}
    forward = None
    for action in reversed(actions):
        if action.op is Op.F:
            forward = action
        elif action.op in RECEIVE_OPS and forward is not None:
            found[action] = forward
    return found


def _gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter; one that no loss depends on has zeros, in every pipeline alike."""
    if parameter.grad is None:
        parameter.grad = parameter.new_zeros(parameter.shape)
    return parameter.grad
