"""A plain training loop in one process: the reference for every bit of the engine, without its code.

It shares the layers, the loss and the data of the workload with the engine. All other rules are written again from the
engine's documents: keys, accumulation, reduction, ties, clipping, learning rate, optimizer, hashes. Each microbatch is
one autograd graph over the whole model, so equal bits also prove that a cut at every layer changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine.core.job.job import Job
from engine.core.messages import Evaluation
from engine.models.data_sources import open_data
from engine.models.layers import Batch, Model, Tensors
from engine.models.losses import metrics_of
from engine.models.model_loader import build_model
from tests.e2e.plain_torch import optimizer_of, plateau_of, rates_of

Texts = tuple[str, ...]  # one row of the trajectory: step, layer, state, buffers, loss


@dataclass(frozen=True, slots=True)
class Mistake:
    """A deliberate error of this loop: the comparison must fail."""

    microbatches_backwards: bool = False
    pipelines_backwards: bool = False
    buffers_counted_twice: bool = False
    step_of_keys: int = 0
    tie_keeps_first_use_only: bool = False


NO_MISTAKE = Mistake()


def train(job: Job, mistake: Mistake = NO_MISTAKE) -> list[Texts]:
    """Trains the job and returns the trajectory as texts, ordered by step and layer."""
    loop, rows = PlainLoop(job, mistake), list[Texts]()
    for step in range(job.steps):
        rows += loop.step(step)
        if loop.is_over(step):
            break
    return rows


class PlainLoop:
    """The model once per pipeline, weights and optimizer state once for all of them."""

    def __init__(self, job: Job, mistake: Mistake = NO_MISTAKE):
        torch.set_num_threads(job.threads)
        self.job, self.mistake = job, mistake
        self.data = open_data(job)
        self.model = build_model(job, self.data.facts, self.data)
        self.pipelines = [_build(job, self.model) for _ in range(job.pipelines)]
        self.first_use = {use: sorted(tie.uses)[0] for tie in self.model.ties for use in sorted(tie.uses)[1:]}
        self._share_storage()
        self.trained = {use: each for use, each in _trained(self.pipelines[0]).items() if use not in self.first_use}
        names = {use: f"{self.model.layers[use[0]].name}.{use[1]}" for use in self.trained}
        self.optimizer, self.factors = optimizer_of(job, {names[use]: each for use, each in self.trained.items()})
        scaling: dict[str, Any] = {**job.scaler_args, "enabled": job.dtype == "float16"}
        self.scaler = torch.amp.GradScaler("cpu", **scaling)
        self.schedule = rates_of(job) if job.lr_schedule != "plateau" else []
        self.plateau = plateau_of(job) if job.lr_schedule == "plateau" else None
        self.watches_steps = job.lr_args.get("monitor") == "train_loss"
        self.best, self.waited = math.inf, 0  # of an early stop by a falling loss
        average = get_ema_multi_avg_fn(job.ema)
        self.averaged = AveragedModel(nn.ParameterList(self.trained.values()), multi_avg_fn=average)

    def _share_storage(self) -> None:
        """Gives all pipelines and all uses of a tied parameter the same memory; each keeps its own gradient."""
        first = _trained(self.pipelines[0])
        for layers in self.pipelines:
            for use, parameter in _trained(layers).items():
                parameter.data = first[self.first_use.get(use, use)].data

    def step(self, step: int) -> list[Texts]:
        """Makes one optimizer step and returns its rows."""
        losses = [self._accumulate(step, pipeline) for pipeline in range(self.job.pipelines)]
        loss = losses[0]
        for other in losses[1:]:
            loss += other
        loss /= self.job.pipelines
        gradients = self._tied(self._reduced())
        for use, parameter in self.trained.items():
            parameter.grad = gradients.get(use)
        self.scaler.unscale_(self.optimizer)
        factor = self._clip_factor(gradients)
        for use, parameter in self.trained.items():
            if parameter.grad is not None:
                parameter.grad = gradients[use] if factor == 1.0 else gradients[use] * factor
        for group, rate_factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            group["lr"] = self.rate(step) * rate_factor
        if self.plateau is not None and step >= self.job.warmup_steps and self.watches_steps:
            self.plateau.step(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.averaged.update_parameters(nn.ParameterList(self.trained.values()))
        for layers in self.pipelines:
            for parameter in _trained(layers).values():
                parameter.grad = None
        return self._rows(step, loss)

    def is_over(self, step: int) -> bool:
        """Validates if that is due, as a user's loop: for the schedule and the early stop; the loss of a step is seen.

        An early stop comes one step after the validation that has used up the patience.
        """
        job, was_out = self.job, self.waited >= self._patience()
        watches = job.early_stop or (self.plateau is not None and not self.watches_steps)
        if not watches or not job.validate_every or (step + 1) % job.validate_every:
            return was_out
        loss = self.validate()[0].loss
        if self.plateau is not None and step >= job.warmup_steps and not self.watches_steps:
            self.plateau.step(loss)
        self.best, self.waited = (loss, 0) if loss < self.best else (self.best, self.waited + 1)
        return was_out

    def _patience(self) -> float:
        return float(self.job.early_stop.rpartition(":")[2]) if self.job.early_stop else math.inf

    def _accumulate(self, step: int, pipeline: int) -> float:
        """Adds up the gradients of one pipeline's microbatches, one graph each; returns their mean loss."""
        job, order = self.job, range(self.job.microbatches)
        losses = []
        for microbatch in reversed(order) if self.mistake.microbatches_backwards else order:
            batch = self.data.microbatch(step, pipeline, microbatch, job.microbatch_size)
            if job.slices > 1:
                losses += self._sliced(step, pipeline, microbatch, batch)
                continue
            values = batch.inputs
            for index, layer in enumerate(self.pipelines[pipeline]):
                torch.manual_seed(key(job.seed, "layer", step + self.mistake.step_of_keys, pipeline, index, microbatch))
                if self.mistake.buffers_counted_twice:
                    self._call(layer, values)
                values = self._call(layer, values)
            loss = self.model.loss(_in_float32(values), batch.targets) * self._weight(step, batch.targets[0])
            self.scaler.scale(loss / job.microbatches).backward()
            losses.append(loss.item())
        return fmean(losses)

    def _sliced(self, step: int, pipeline: int, microbatch: int, batch: Batch) -> list[float]:
        """Runs the slices of a microbatch, then their backwards, the last one first: one graph for each slice.

        A state is a leaf in the graph of the slice behind, whose gradient begins the backward of the slice before.
        """
        job, losses = self.job, list[float]()
        done: list[tuple[Tensor, list[Tensors], list[Tensors]]] = []
        leaves: list[Tensors] = [() for _ in self.pipelines[pipeline]]
        for number in range(job.slices):
            values, targets = (
                tuple(each.chunk(job.slices, dim=1)[number].contiguous() for each in part)
                for part in (batch.inputs, batch.targets)
            )
            start, states = number * values[0].shape[1], list[Tensors]()
            for index, layer in enumerate(self.pipelines[pipeline]):
                item = microbatch * job.slices + number
                torch.manual_seed(key(job.seed, "layer", step, pipeline, index, item))
                forward_slice: Any = layer.forward_slice
                made, state = forward_slice(*values, start=start, state=leaves[index])
                values = (made.contiguous(),)
                states.append(tuple(each.contiguous() for each in state))
            loss = self.model.loss(values, targets)
            losses.append(loss.item())
            leaves = [tuple(each.detach().requires_grad_() for each in state) for state in states]
            done.append((loss / (job.microbatches * job.slices), states, leaves))
        for loss, states, behind in reversed(done):
            pairs = [*zip(_flat(states), _flat(behind), strict=True)]
            carried = [(state, leaf.grad) for state, leaf in pairs if leaf.grad is not None]
            one = torch.ones_like(loss)
            torch.autograd.backward([loss, *(each for each, _ in carried)], [one, *(each for _, each in carried)])
        return losses

    def _weight(self, step: int, target: Tensor) -> float:
        """Returns the weight of the mean over the tokens of a microbatch in the mean over microbatches."""
        job = self.job
        if job.loss_normalisation == "microbatches":
            return 1.0
        places = [(pipeline, each) for pipeline in range(job.pipelines) for each in range(job.microbatches)]
        targets = [self.data.microbatch(step, *place, job.microbatch_size).targets[0] for place in places]
        return int((target != -100).sum()) * len(places) / sum(int((each != -100).sum()) for each in targets)

    def _call(self, layer: nn.Module, values: Tensors) -> Tensors:
        is_narrow = self.job.dtype != "float32"
        with torch.autocast("cpu", getattr(torch, self.job.dtype)) if is_narrow else contextlib.nullcontext():
            made = layer(*values)
        # A rule of the engine: the outputs of a layer are made contiguous, as by a transfer.
        return tuple(each.contiguous() for each in ((made,) if isinstance(made, Tensor) else made))

    def validate(self) -> tuple[Evaluation, ...]:
        """Returns mean loss and metrics of pipeline 0 over the validation microbatches."""
        losses, metrics = [], []
        with torch.no_grad():
            for index in range(self.job.validation_microbatches):
                batch = self.data.validation(index, self.job.microbatch_size)
                values = batch.inputs
                # A copy: a rule of the engine is that a validation changes nothing, not even buffers.
                for layer in copy.deepcopy(self.pipelines[0]):
                    values = self._call(layer.eval(), values)
                losses.append(self.model.loss(_in_float32(values), batch.targets).item())
                metrics.append(metrics_of(self.model, values, batch.targets))
        means = {name: fmean(each[name] for each in metrics) for name in metrics[0]}
        return (Evaluation("validation", len(losses) * self.job.microbatch_size, fmean(losses), means),)

    def _reduced(self) -> dict[tuple[int, str], Tensor]:
        """Returns the mean gradient over pipelines, added in pipeline order; none for an unused parameter."""
        order = list(reversed(self.pipelines)) if self.mistake.pipelines_backwards else self.pipelines
        reduced: dict[tuple[int, str], Tensor] = {}
        for layers in order:
            for use, parameter in _trained(layers).items():
                if parameter.grad is not None:
                    reduced[use] = reduced[use] + parameter.grad if use in reduced else parameter.grad
        return {use: gradient / self.job.pipelines for use, gradient in reduced.items()}

    def _tied(self, gradients: dict[tuple[int, str], Tensor]) -> dict[tuple[int, str], Tensor]:
        """Returns one gradient per parameter: the gradients of a tied parameter are added in layer order."""
        total = {use: gradient for use, gradient in gradients.items() if use not in self.first_use}
        if not self.mistake.tie_keeps_first_use_only:
            for use in sorted(self.first_use):
                if use in gradients:
                    first = self.first_use[use]
                    total[first] = total[first] + gradients[use] if first in total else gradients[use]
        return total

    def _clip_factor(self, gradients: dict[tuple[int, str], Tensor]) -> float:
        """Returns the clip factor; squares are added in float64, first within each layer, then over the layers."""
        squared = 0.0
        for index in range(len(self.model.layers)):
            of_layer = 0.0
            for (layer, _), gradient in gradients.items():
                if layer == index:
                    of_layer += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
            squared += of_layer
        norm, limit = math.sqrt(squared), self.job.clip_norm
        return limit / norm if 0 < limit < norm else 1.0

    def rate(self, step: int) -> float:
        """Returns the learning rate of the open step."""
        job = self.job
        if step < job.warmup_steps:
            return job.lr * (step + 1) / job.warmup_steps
        if self.plateau is not None:
            return float(self.plateau.optimizer.param_groups[0]["lr"])
        if self.schedule:
            return self.schedule[step - job.warmup_steps]
        done = (step - job.warmup_steps) / max(1, job.steps - job.warmup_steps)
        if job.lr_schedule == "cosine":
            return job.lr * (0.5 * (1.0 + math.cos(math.pi * done)))
        return job.lr * (1.0 - done if job.lr_schedule == "linear" else 1.0)

    def _rows(self, step: int, loss: float) -> list[Texts]:
        rows: list[Texts] = []
        averages = dict(zip(self.trained, self.averaged.module.parameters(), strict=True))
        for index, layer in enumerate(self.pipelines[0]):
            state: list[tuple[str, Tensor]] = list(layer.named_parameters())
            for _, name in _trained([layer]):
                use = self.first_use.get((index, name), (index, name))
                of_optimizer = self.optimizer.state[self.trained[use]]
                values = {part: value for part, value in of_optimizer.items() if isinstance(value, Tensor)}
                values |= {"(average)": averages[use]} if self.job.ema else {}
                state += [(f"{name}.{part}", value) for part, value in sorted(values.items())]
            if self.job.dtype == "float16":
                state.append(("(loss scale).good_steps", torch.tensor(self.scaler._get_growth_tracker())))
                state.append(("(loss scale).scale", torch.tensor(self.scaler.get_scale())))
            buffers = [sha256(layers[index].named_buffers()) for layers in self.pipelines]
            joined = buffers[0] if len(buffers) == 1 else hashlib.sha256("\n".join(buffers).encode()).hexdigest()
            rows.append((str(step), str(index), sha256(state), joined, repr(loss)))
        return rows


def key(*parts: int | str) -> int:
    """Returns the first 8 bytes, big endian, of BLAKE2b over the parts joined by slashes, without the top bit."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns SHA-256 over name, dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _in_float32(values: Tensors) -> Tensors:
    return tuple(each.float() if each.dtype in (torch.bfloat16, torch.float16) else each for each in values)


def _build(job: Job, model: Model) -> list[nn.Module]:
    layers = []
    for index, spec in enumerate(model.layers):
        torch.manual_seed(key(job.seed, "weights", index))
        layers.append(spec.build())
    return layers


def _flat(states: Iterable[Tensors]) -> list[Tensor]:
    return [each for state in states for each in state]


def _trained(layers: list[nn.Module]) -> dict[tuple[int, str], nn.Parameter]:
    return {
        (index, name): each
        for index, layer in enumerate(layers)
        for name, each in layer.named_parameters()
        if each.requires_grad
    }
