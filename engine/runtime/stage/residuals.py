"""Residuals that travel: a worker that leaves sends what autograd saved, and its successor runs the backward with it.

    leaver      forward, as ever | notice: reads the saved tensors off its graphs -> parcel
    successor   the same layers with tensors of no content: a graph of the same form <- the saved tensors

So a usual step pays nothing, and what was forwarded before the notice travels as well. The successor runs no kernel of
the forward (`kernel_free.py`). The backward then is the one that the leaver would have run, by the same kernels, with
the weights of the successor.

Rules: the leaver first makes such a graph itself and compares: names and numbers of all nodes, their edges, and where
tensors are saved. A forward that reads a value (`item`, a branch on data), a function with a backward of its own and
hooks on saved tensors cannot travel this way: their microbatches are recomputed. Views of weights travel as views, also
of sharded ones, which are whole when the backward runs. With activation checkpointing the inputs of the groups travel,
and no graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import InvariantError, ensure
from engine.core.job.job import Job
from engine.core.ownership import Slot
from engine.core.program.inventory import SavedResiduals
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.models.user_code import RAISED
from engine.runtime.stage.buffers import BufferPlace, in_pieces, lending, modules_of, placed, snapshot_of
from engine.runtime.stage.gradient_log import filled
from engine.runtime.stage.kernel_free import ContentNeededError, KernelFree, allocated
from engine.runtime.stage.stage import Checkpoint, Residual, Segment, Stage
from engine.runtime.transport.transfers import receive_bulk, send_bulk
from engine.runtime.transport.transport import AsideKey, Channel, TensorSpec

_RAW, _SAVED = "_raw_saved_", "_saved_"


class CannotTravelError(Exception):
    """A residual has to be recomputed; the text says why."""


class SavedPlace(NamedTuple):
    """A tensor that a node of a graph has saved."""

    node: Any
    name: str
    number: int  # in a list of tensors; -1: it is no list

    @property
    def raw(self) -> Any:
        """The variable, which takes hooks."""
        raw = getattr(self.node, _RAW + self.name)
        return raw if self.number < 0 else raw[self.number]

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, if one was saved."""
        saved = getattr(self.node, _SAVED + self.name)
        return saved if self.number < 0 else saved[self.number]


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a graph as text, and the places of its saved tensors, in the same order in each such graph."""

    text: str
    places: list[SavedPlace]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def saved_places(segment: Segment) -> list[SavedPlace]:
    """Returns the places of the tensors that a segment's graph has saved, without those of the user's backwards."""
    nodes: list[Any] = [output.grad_fn for output in segment.outputs if output.grad_fn is not None]
    graph = set(nodes)
    places: list[SavedPlace] = []
    for node in nodes:  # it grows while it is walked
        following = [each for each, _ in node.next_functions if each is not None and each not in graph]
        nodes += dict.fromkeys(following)
        graph.update(following)
        kind: Any = type(node)
        if not hasattr(kind, "_forward_cls"):
            places += [place for name in _names_of(kind)[0] for place in _places(node, name)]
    return places


def _form_of(segment: Segment, weights: Mapping[int, str]) -> _Form:
    """Returns the form of a segment's graph; `weights` has the names of parameters by `id`."""
    leaves = {**weights, **{id(tensor): f"input {number}" for number, tensor in enumerate(segment.inputs)}}
    nodes: list[Any] = [output.grad_fn for output in segment.outputs if output.grad_fn is not None]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    nodes, lines, places = list(numbers), [], []
    for node in nodes:  # it grows while it is walked
        for following, _ in node.next_functions:
            if following is not None and following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
        if hasattr(type(node), "_forward_cls"):
            raise CannotTravelError(f"{node.name()} is a backward of the user")
        kind: Any = type(node)
        raw, others = _names_of(kind)
        mine = [place for name in raw for place in _places(node, name)]
        edges = [(numbers.get(following, -1), at) for following, at in node.next_functions]
        leaf = leaves.get(id(node.variable), "another leaf") if hasattr(node, "variable") else ""
        values = [(name, getattr(node, name)) for name in others]
        lines.append(f"{node.name()} {leaf} {edges} {values} {[each[1:] for each in mine]}")
        places += mine
    return _Form("\n".join([str([numbers.get(each.grad_fn, -1) for each in segment.outputs]), *lines]), places)


@cache
def _names_of(kind: type) -> tuple[list[str], list[str]]:
    """Returns the names of the tensors that nodes of a kind save, and of the other values."""
    raw = [name.removeprefix(_RAW) for name in sorted(dir(kind)) if name.startswith(_RAW)]
    saved = [name for name in sorted(dir(kind)) if name.startswith(_SAVED)]
    return raw, [name for name in saved if name.removeprefix(_SAVED) not in raw]


def _places(node: Any, name: str) -> list[SavedPlace]:
    raw = getattr(node, _RAW + name)
    return (
        [SavedPlace(node, name, each) for each in range(len(raw))]
        if isinstance(raw, (list, tuple))
        else [SavedPlace(node, name, -1)]
    )


class _Rebuilding:
    """Makes graphs of a stage's layers with tensors of no content; leaves the stage as it is."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.lent: list[Tensor] = []  # the memory of the inputs and buffers of graphs that were made here
        self.kernel_free = KernelFree()
        self._models: dict[str, _Form] = {}
        self.by_name = {
            f"{index} {name}": parameter
            for index, layer in stage.layers.items()
            for name, parameter in layer.named_parameters(remove_duplicate=False)
        }
        self.weights = {id(parameter): name for name, parameter in self.by_name.items()}

    def layer(self, index: int, specs: Sequence[Sequence[Any]]) -> Segment:
        """Returns the segment of a layer; raises CannotTravelError if its forward needs the content of a tensor."""
        inputs, stage = self._leaves(specs), self.stage
        return Segment(inputs, self._run(lambda: stage.call(index, inputs), stage.layers[index]), stage.where(index))

    def loss(self, specs: Sequence[Sequence[Any]], targets: Tensors, weight: float | None) -> Segment:
        """Returns the segment of the loss."""
        inputs, stage = self._leaves(specs), self.stage
        return Segment(inputs, self._run(lambda: (stage.weighted_loss(inputs, targets, weight),)), "the loss")

    def model(self, key: object, make: Callable[[], Segment]) -> _Form:
        """Returns the form of a graph, made the first time for this key; raises CannotTravelError for hooks too."""
        if (form := self._models.get(str(key))) is None:
            form = self._models[str(key)] = _form_of(make(), self.weights)
            list(map(_refuse_hooks, form.places))
        return form

    def _leaves(self, specs: Sequence[Sequence[Any]]) -> Tensors:
        leaves = tuple(_leaf(spec, self.stage) for spec in specs)
        self.lent += leaves
        return leaves

    def _run(self, forward: Any, layer: nn.Module | None = None) -> Tensors:
        modules = modules_of([layer] if layer is not None else [])
        attributes = [dict(module.__dict__) for module in modules]
        buffers = snapshot_of(modules).copy()
        self.lent += buffers.memory
        weights = layer.parameters() if layer is not None else ()
        try:
            with lending(modules, buffers.buffers()), _with_memory(weights), self.kernel_free:
                outputs: Tensors = forward()
        except ContentNeededError as error:
            raise CannotTravelError(f"its forward cannot run without values: {error}") from error
        except RAISED as error:
            raise CannotTravelError(f"its forward cannot run without values: {type(error).__name__}") from error
        finally:
            for module, before in zip(modules, attributes, strict=True):  # a forward may keep a tensor of no content
                module.__dict__.clear()
                module.__dict__.update(before)
        return outputs


@contextlib.contextmanager
def _with_memory(weights: Iterable[Tensor]) -> Iterator[None]:
    """Gives sharded weights memory of any content during the block, as some views of them need it."""
    freed = [weight for weight in weights if weight.untyped_storage().nbytes() < weight.nbytes]
    for weight in freed:
        weight.untyped_storage().resize_(weight.nbytes)
    try:
        yield
    finally:
        for weight in freed:
            weight.untyped_storage().resize_(0)


def _refuse_hooks(place: SavedPlace) -> None:
    try:
        place.raw.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError as error:
        if "None" not in str(error):  # they could run anything
            raise CannotTravelError("it has hooks on saved tensors") from error


def _spec(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.requires_grad]


def _leaf(spec: Sequence[Any], stage: Stage) -> Tensor:
    dtype, shape, stride, needs_grad = spec
    return allocated(shape, stride, _dtype(dtype), stage.device.place).requires_grad_(needs_grad)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvariantError(f"{name!r} is not a dtype")
    return dtype


# The parcel: a header in JSON, and the memory of all tensors in pieces of bytes.
#
#     inputs   those of the stage, from which a successor whose layers make other graphs runs the forward again
#     groups   of each group of layers: its segments, or the inputs and buffers of its checkpoint
#     segment  the inputs by shape, the digest of the form, and of each place: the number of a tensor, the view of a
#              weight, or null for none and for a number of the code, which the successor has
#     before   the buffers from before the next forward, by their numbers


@dataclass(frozen=True, slots=True)
class Parcel:
    """The residual of one microbatch, ready to be sent; `pieces` share the memory of the residual."""

    header: dict[str, Any]
    pieces: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(len(piece) for piece in self.pieces)


class _Packing:
    """Collects the tensors of a parcel."""

    def __init__(self, rebuilding: _Rebuilding):
        self._rebuilding, self._stage = rebuilding, rebuilding.stage
        self.tensors: list[Tensor] = []
        # The memory of sharded weights has no address, but its owner in C++ has.
        self._storages = {parameter.untyped_storage()._cdata: name for name, parameter in rebuilding.by_name.items()}

    def number(self, tensor: Tensor) -> int:
        """Adds a tensor, and returns its number."""
        plain = tensor.detach()
        is_plain = type(plain) is Tensor and plain.layout is torch.strided and not (plain.is_conj() or plain.is_neg())
        if not is_plain or plain.device != self._stage.device.place:
            raise CannotTravelError(f"a tensor of {plain.layout} on {plain.device} is saved")
        self.tensors.append(plain)
        return len(self.tensors) - 1

    def segment(self, segment: Segment, theirs: _Form) -> dict[str, Any]:
        """Returns the entry of a segment; raises CannotTravelError if the rebuilt graph has another form."""
        mine = _form_of(segment, self._rebuilding.weights)
        if mine.text != theirs.text:
            raise CannotTravelError(f"the graph of {segment.place} cannot be made again without values")
        lent = {tensor.untyped_storage().data_ptr() for tensor in self._rebuilding.lent}
        saved = [self._saved(here, there, lent) for here, there in zip(mine.places, theirs.places, strict=True)]
        return {"inputs": [_spec(tensor) for tensor in segment.inputs], "form": mine.digest, "saved": saved}

    def _saved(self, here: SavedPlace, there: SavedPlace, lent: set[int]) -> Any:
        model, tensor = there.tensor, here.tensor
        if model is None or tensor is None:
            if model is not tensor:
                raise CannotTravelError(f"{here.node.name()} saves a tensor at times")
            return None
        is_known = self._rebuilding.kernel_free.is_number(model) and model.untyped_storage().data_ptr() not in lent
        if is_known and model.dtype == tensor.dtype and torch.equal(model, tensor):
            return None  # a number in the code
        name = self._storages.get(tensor.untyped_storage()._cdata)
        if name is not None:
            return [name, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())]
        return self.number(tensor)


def parcel_of(stage: Stage, microbatch: int, rebuilding: _Rebuilding | None = None) -> Parcel:
    """Returns the residual of a microbatch that has been forwarded and not backwarded.

    `rebuilding` remembers the graphs of other microbatches of the stage.
    Raises CannotTravelError if it has to be recomputed.
    """
    residual, rebuilding = stage.residuals[microbatch].made(), rebuilding or _Rebuilding(stage)
    packing = _Packing(rebuilding)
    groups: list[Any] = []
    first = residual.groups[0]
    of_first = first.inputs if isinstance(first, Checkpoint) else first[0].inputs
    of_stage = [[packing.number(tensor), tensor.requires_grad] for tensor in of_first]
    for indices, entry in zip(stage.groups, residual.groups, strict=True):
        if isinstance(entry, Checkpoint):
            inputs = [[packing.number(tensor), tensor.requires_grad] for tensor in entry.inputs]
            groups.append({"inputs": inputs, "buffers": list(map(packing.number, entry.buffers.tensors()))})
        else:
            models = [_model_of_layer(rebuilding, *pair) for pair in zip(indices, entry, strict=True)]
            groups.append(list(map(packing.segment, entry, models)))
    header: dict[str, Any] = {"inputs": of_stage, "groups": groups, "loss": None}
    if residual.loss is not None:
        targets, weight = residual.counts
        model = _model_of_loss(rebuilding, residual.loss, targets, weight)
        header["loss"] = {
            "value": stage.losses[microbatch].hex(),
            "targets": list(map(packing.number, targets)),
            "weight": None if weight is None else weight.hex(),
            "segment": packing.segment(residual.loss, model),
        }
    header["before"] = list(map(packing.number, stage.history.before(microbatch + 1).tensors()))
    pieces, places = in_pieces(packing.tensors)
    header["tensors"] = [
        [place.piece, str(place.dtype), place.offset, list(place.size), list(place.stride)] for place in places
    ]
    header["sizes"] = [len(piece) for piece in pieces]
    return Parcel(header, pieces)


def _model_of_layer(rebuilding: _Rebuilding, index: int, segment: Segment) -> _Form:
    specs = list(map(_spec, segment.inputs))
    return rebuilding.model((index, specs), lambda: rebuilding.layer(index, specs))


def _model_of_loss(rebuilding: _Rebuilding, segment: Segment, targets: Tensors, weight: float | None) -> _Form:
    specs, of_targets = (list(map(_spec, tensors)) for tensors in (segment.inputs, targets))
    return rebuilding.model((specs, of_targets, weight), lambda: rebuilding.loss(specs, targets, weight))


@dataclass(frozen=True, slots=True)
class ResidualOffers:
    """What a worker that leaves can send, and why it cannot send more."""

    saved: dict[Slot, SavedResiduals] = field(default_factory=dict)
    parcels: dict[Value, Parcel] = field(default_factory=dict)
    stuck: str = ""


_LEAST_GRAPH_NS = 1_000_000  # of a layer
_LOAD_NS = 2_000_000_000  # to load what makes them, usually, at each end
_LEAST_LEFT_NS = 300_000_000  # to make some, and hand over
_SHARE = 4  # of the time that is left, and of the time for an inventory


def load_graph_making() -> int:
    """Loads what shapes of outputs are computed with, torch's compiler; returns the nanoseconds, 1 at least."""
    start_ns = time.monotonic_ns()
    with KernelFree():
        nn.functional.layer_norm(torch.empty(1, 1, device="cpu"), (1,))
    return max(1, time.monotonic_ns() - start_ns)


def residual_offers(stages: Mapping[Slot, tuple[Stage, int]], job: Job, left_ns: int) -> ResidualOffers:
    """Returns the residuals of these stages that can be sent; with each stage comes the time of its forward.

    With `auto`, none whose graph takes longer to make than its forward, and none at all where to load what makes graphs
    takes longer than all forwards. To make graphs takes a part of the time that is left at most.
    """
    offers, stuck, load_ns, is_auto = ResidualOffers(), "", 0, job.residuals == "auto"
    redone_ns = sum(forward_ns * len(stage.residuals) for stage, forward_ns in stages.values())
    load_at_most_ns = 0 if "torch._dynamo" in sys.modules else _LOAD_NS
    if job.residuals == "recompute" or not redone_ns or (is_auto and redone_ns < 2 * load_at_most_ns):
        return offers
    if left_ns < _LEAST_LEFT_NS + load_at_most_ns:
        return replace(offers, stuck="there is no time to find out what can be sent")
    until_ns = time.monotonic_ns() + min(left_ns, 10_000_000_000) // _SHARE
    for slot, (stage, forward_ns) in stages.items():
        first = min(stage.residuals, default=0)
        sizes, graph_ns = list[int](), _LEAST_GRAPH_NS * len(stage.layers)
        rebuilding = _Rebuilding(stage)
        while first + len(sizes) in stage.residuals and not (is_auto and graph_ns > forward_ns):
            if time.monotonic_ns() > until_ns:
                break
            microbatch = first + len(sizes)
            try:
                load_ns = load_ns or load_graph_making()
                start_ns = time.monotonic_ns()
                parcel = parcel_of(stage, microbatch, rebuilding)
            except CannotTravelError as error:
                stuck = f"{job.slot_noun} {slot[1]}: {error}"
                break
            offers.parcels[Value(Kind.RESIDUAL, *slot, microbatch)] = parcel
            sizes.append(parcel.num_bytes)
            graph_ns = max(graph_ns, time.monotonic_ns() - start_ns)
        if sizes:
            offers.saved[slot] = SavedResiduals(first, tuple(sizes), forward_ns, graph_ns, load_ns)
    return replace(offers, stuck=stuck)


def send_parcel(channel: Channel[AsideKey], targets: Iterable[int], key: AsideKey, parcel: Parcel) -> None:
    """Starts sending a residual, which must not change before the commit of the step."""
    header = json.dumps(parcel.header).encode()
    as_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for target in targets:
        channel.send(target, key, (torch.tensor([len(header)], device="cpu"),))
        channel.send(target, key, (as_bytes,))
        send_bulk(channel, (target,), key, parcel.pieces)


def take_parcel(channel: Channel[AsideKey], source: int, key: AsideKey, stage: Stage) -> Parcel:
    """Waits for a residual and returns it."""
    (size,) = _take(channel, source, key, TensorSpec((1,), torch.int64, False))
    with stage.device.waiting():
        (length,) = size.tolist()
    (text,) = _take(channel, source, key, TensorSpec((length,), torch.uint8, False))
    with stage.device.waiting():
        header = json.loads(text.cpu().numpy().tobytes())
    specs = [TensorSpec((size,), torch.uint8, False) for size in header["sizes"]]
    return Parcel(header, tuple(receive_bulk(channel, source, key, specs)))


def _take(channel: Channel[AsideKey], source: int, key: AsideKey, spec: TensorSpec) -> Tensors:
    channel.post(source, key, (spec,))
    return channel.take(source, key)


def keep_parcel(
    stage: Stage, step: int, microbatch: int, parcel: Parcel, tell: Callable[[str], object] = lambda why: None
) -> None:
    """Gives a stage the residual of a microbatch, and counts its forward if that has not been counted.

    Its graphs are made at its backward, when the worker that leaves need not be there any more. If they differ from
    those of that worker, the forward is run again, and `tell` gets the reason.
    """
    header, tensors = parcel.header, _tensors(parcel)
    if microbatch == stage.counted:
        stage.history.note(microbatch)
        before = filled(snapshot_of(stage.history.modules), (tensors[number] for number in header["before"]))
        stage.history.take_over({microbatch + 1: before})
        if header["loss"] is not None:
            stage.losses[microbatch] = float.fromhex(header["loss"]["value"])
        stage.counted += 1
    ensure(microbatch < stage.counted, f"the residual of {microbatch} comes where {stage.counted} are in")

    def make() -> Residual:
        try:
            return _unpacked(stage, header, tensors)
        except CannotTravelError as error:
            tell(str(error))
        inputs = tuple(tensors[number].requires_grad_(needs_grad) for number, needs_grad in header["inputs"])
        targets, weight = _counts(header["loss"], tensors) if header["loss"] is not None else (None, None)
        stage.redo_forward(step, microbatch, inputs, targets, weight)
        return stage.residuals.pop(microbatch)

    stage.residuals[microbatch] = Residual([], (), make=make)
    stage.peak_stash = max(stage.peak_stash, stage.num_stashed)


def _counts(loss: Mapping[str, Any], tensors: Sequence[Tensor]) -> tuple[Tensors, float | None]:
    weight = loss["weight"]
    return tuple(tensors[number] for number in loss["targets"]), None if weight is None else float.fromhex(weight)


def _unpacked(stage: Stage, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> Residual:
    """Raises CannotTravelError if the layers here make a graph of another form."""
    rebuilding = _Rebuilding(stage)
    groups: list[list[Segment] | Checkpoint] = []
    for indices, entry in zip(stage.groups, header["groups"], strict=True):
        if isinstance(entry, dict):
            inputs = tuple(tensors[number].requires_grad_(needs_grad) for number, needs_grad in entry["inputs"])
            template = snapshot_of(modules_of(stage.layers[index] for index in indices))
            groups.append(Checkpoint(inputs, filled(template, (tensors[number] for number in entry["buffers"]))))
        else:
            layers = [rebuilding.layer(index, each["inputs"]) for index, each in zip(indices, entry, strict=True)]
            for segment, each in zip(layers, entry, strict=True):
                _fill(segment, each, tensors, rebuilding)
            groups.append(layers)
    residual = Residual(groups, ())
    if (loss := header["loss"]) is not None:
        residual.counts = targets, weight = _counts(loss, tensors)
        residual.loss = rebuilding.loss(loss["segment"]["inputs"], targets, weight)
        _fill(residual.loss, loss["segment"], tensors, rebuilding)
    return residual


def _tensors(parcel: Parcel) -> list[Tensor]:
    return [
        placed(parcel.pieces[piece], BufferPlace(piece, _dtype(dtype), offset, torch.Size(size), tuple(stride)))
        for piece, dtype, offset, size, stride in parcel.header["tensors"]
    ]


def _fill(segment: Segment, entry: Mapping[str, Any], tensors: Sequence[Tensor], rebuilding: _Rebuilding) -> None:
    """Puts the saved tensors of the leaver into the places of a graph that was made here."""
    form = _form_of(segment, rebuilding.weights)
    if form.digest != entry["form"]:
        raise CannotTravelError(f"the graph of {segment.place} is not the one of the worker that left")
    for place, saved in zip(form.places, entry["saved"], strict=True):
        if saved is None:
            continue
        if isinstance(saved, int):
            tensor = tensors[saved]
        else:
            name, shape, stride, offset = saved
            tensor = rebuilding.by_name[name].detach().as_strided(shape, stride, offset)
        place.raw.register_hooks(lambda _: None, lambda _, kept=tensor: kept)
