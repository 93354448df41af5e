"""The trial of a layer: two fresh copies run two microbatches in different orders, which must not change a bit.

    first copy   F0 F1 redo-F0 B0 B1       as in training with a recovery
    second copy  redo-F1 F0 B0 F1 B1       redo-F1 with the first copy's buffers before F1, as in a takeover

Outputs, gradients, weights and buffers must have the same bits in both copies, and in a second process.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from engine.core.checks.purity import INPUT
from engine.core.config.job import Job
from engine.models.data import keyed_generator
from engine.models.layers import Model, Tensors
from engine.runtime.device.device import HOST, Device
from engine.runtime.stage.buffers import lending, modules_of, snapshot_of
from engine.runtime.stage.random_streams import own_generators, positions
from engine.runtime.stage.segment import cut_off
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import hash_tensors

MICROBATCHES = (0, 1)
_MARK_DIGITS = 16
_MOST_ATTRIBUTES, _MOST_CHARACTERS = 3, 300  # in a message
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Marked:
    """Hashes of the results of one layer; `sign` says which result first differed from an earlier one."""

    def __init__(self, name: str):
        self.name = name
        self.marks: dict[str, str] = {}
        self.sign = ""

    def note(self, what: str, tensors: Iterable[Tensor | tuple[str, Tensor]], when: str) -> None:
        """Records the hash of the result called `what`; blames, with `when`, if an earlier one had other bits."""
        named = (each if isinstance(each, tuple) else (str(place), each) for place, each in enumerate(tensors))
        mark = hash_tensors(named)[:_MARK_DIGITS]
        if self.marks.setdefault(what, mark) != mark:
            self.blame(f"its {what} differs {when}")

    def blame(self, sign: str) -> None:
        """Sets the sign, unless there is one already."""
        self.sign = self.sign or sign


class LayerTrial:
    """The trial of one layer; `inputs` and `targets` have an entry per microbatch; only the last layer uses targets."""

    def __init__(
        self,
        job: Job,
        model: Model,
        index: int,
        inputs: list[Tensors],
        targets: list[Tensors] | None,
        device: Device = HOST,
    ):
        self.job, self.model, self.index, self.device = job, model, index, device
        self.inputs = inputs
        self.targets = targets if index == len(model.layers) - 1 else None
        self.marked = Marked(f"layer {index} ({model.layers[index].name})")
        given = [self._called_with(microbatch) for microbatch in MICROBATCHES]
        self.marked.note(INPUT, (each for one, also in given for each in (*one, *(also or ()))), "")
        self._before_second = snapshot_of(())  # the buffers before the second forward
        self._own: dict[str, object] = {}  # generators that the copy under trial keeps as attributes
        self._drawn: dict[tuple[str, str], object] = {}

    def first(self) -> list[Tensors]:
        """Tries the first copy; returns its outputs per microbatch, inputs of the next layer. Lets errors through."""
        stage = self._built("")
        outputs = []
        for microbatch in MICROBATCHES:
            if not self.job.retains:  # else `Stage.forward` does it
                stage.history.note(microbatch)
            outputs.append(self._forward(stage, microbatch, ""))
        self._before_second = stage.history.before(1)
        with self._refusing("when its forward is redone"):
            self._redo(stage, 0, "when its forward is redone")
        for microbatch in MICROBATCHES:
            self._backward(stage, microbatch, "")
        self._close(stage, "")
        return outputs

    def second(self) -> None:
        """Tries the second copy."""
        when = "in a second copy, in another order"
        with self._refusing(when):
            stage = self._built("when it is built again")
            stage.counted = len(MICROBATCHES)  # as in a shadow that received a stream
            with lending(modules_of(stage.layers.values()), self._before_second.copy().buffers()):
                self._redo(stage, 1, "in a copy that has not run the forwards before it")
            stage.forget_step()
            for microbatch in MICROBATCHES:
                self._forward(stage, microbatch, when)
                self._backward(stage, microbatch, when)
            self._close(stage, when)

    def _built(self, when: str) -> Stage:
        self._own = {}
        with self._watching("constructor"):
            stage = Stage(self.job, self.model, 0, self.index, self.index + 1, self.device)
        layer = stage.layers[self.index]
        self.marked.note("weight", layer.named_parameters(), when)
        self.marked.note("buffer", layer.named_buffers(), when)
        self._own = own_generators(layer)
        return stage

    def _forward(self, stage: Stage, microbatch: int, when: str) -> Tensors:
        with self._watching(f"forward of microbatch {microbatch}"):
            outputs = stage.forward(0, microbatch, *self._called_with(microbatch))
        self._note_outputs(stage, microbatch, when)
        buffers = stage.layers[self.index].named_buffers()
        self.marked.note(f"buffer after the forward of microbatch {microbatch}", buffers, when)
        return cut_off(outputs)

    def _redo(self, stage: Stage, microbatch: int, when: str) -> None:
        with self._watching(f"forward of microbatch {microbatch}"):
            stage.redo_forward(0, microbatch, *self._called_with(microbatch))
        self._note_outputs(stage, microbatch, when)

    def _called_with(self, microbatch: int) -> tuple[Tensors, Tensors | None]:
        return self.inputs[microbatch], self.targets[microbatch] if self.targets else None

    def _note_outputs(self, stage: Stage, microbatch: int, when: str) -> None:
        residual = stage.residuals[microbatch]
        self.marked.note(f"output of microbatch {microbatch}", residual.outputs, when)
        if residual.loss is not None:
            self.marked.note(f"loss of microbatch {microbatch}", residual.loss.outputs, when)

    def _backward(self, stage: Stage, microbatch: int, when: str) -> None:
        residual = stage.residuals[microbatch]
        gradients: Tensors = ()
        if residual.loss is None:
            generator = keyed_generator(self.job.seed, "pure", self.index, microbatch)
            gradients = tuple(drawn_like(each, generator) for each in residual.outputs if each.requires_grad)
        with self._watching(f"backward of microbatch {microbatch}"):
            made = stage.backward(0, microbatch, gradients)
        self.marked.note(f"input gradient of microbatch {microbatch}", made, when)

    def _close(self, stage: Stage, when: str) -> None:
        layer = stage.layers[self.index]
        self.marked.note("weight gradient", stage.gradients()[self.index].items(), when)
        self.marked.note("weight", layer.named_parameters(), "after a forward and a backward")

    @contextlib.contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """Blames a call that draws from a random stream without a key: the same call twice ends at two positions.

        A call that seeds the stream itself ends at one position and passes. So does a stream that one call alone moves.
        """
        before = positions(self._own, self.device)
        yield
        for stream, now in positions(self._own, self.device).items():
            if now != before.get(stream) and self._drawn.setdefault((what, stream), now) != now:
                self.marked.blame(f"its {what} draws from {stream}")

    @contextlib.contextmanager
    def _refusing(self, when: str) -> Iterator[None]:
        """Blames an exception in a repetition: the first run raised none."""
        try:
            yield
        except Exception as error:
            self.marked.blame(f"it raises {type(error).__name__} {when}: {error}"[:_MOST_CHARACTERS])

    def changed_attributes(self) -> str:
        """Returns the attributes that a forward changes, as part of a message; empty if none is visible."""
        names: list[str] = []
        with contextlib.suppress(Exception):  # the layer is known to misbehave
            stage = Stage(self.job, self.model, 0, self.index, self.index + 1, self.device)
            layer = stage.layers[self.index]
            before = _attributes(layer)
            stage.forward(0, 0, *self._called_with(0))
            names = [name for name, text in _attributes(layer).items() if text != before.get(name)]
        return f"; a forward changes {', '.join(names[:_MOST_ATTRIBUTES])}" if names else ""


def drawn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns normal random numbers of a tensor's shape, dtype and device; zeros for integers, which may be indices."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros_like(tensor, requires_grad=False)
    return torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.device, tensor.dtype)


def _attributes(layer: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}".lstrip("."): _text(value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


def _text(value: object) -> str:
    """Returns a text that is equal for equal values: it leaves out addresses of objects."""
    if isinstance(value, Tensor):
        return hash_tensors([("", value)])
    return _ADDRESS.sub("", repr(value))
