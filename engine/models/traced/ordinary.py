"""Makes the layers of an ordinary module: records its forward in training and in evaluation, and cuts both records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError, explained
from engine.core.job.job import PERPLEXITY, Job, named_metrics
from engine.models.data import Data
from engine.models.layers import LayerSpec, Model, ModuleCopy, Tensors
from engine.models.losses import default_loss
from engine.models.memory_rules import refuse_what_cannot_be_kept
from engine.models.model_registry import is_own
from engine.models.token_limits import limit_rows, token_limits
from engine.models.traced.pieces import (
    Cut,
    PlannedPiece,
    Splitter,
    choose_cuts,
    holds_cuts,
    is_by_sample,
    names_of,
    notes_on_repeats,
    place_of,
)
from engine.models.traced.reads import WholePart, notes_on, notes_on_tracers, unsteady
from engine.models.traced.recorded import Example, OpenedParts, recorded, with_given
from engine.models.traced.recording import (
    CodeLine,
    LeafCall,
    NamedState,
    Trace,
    UnrecordableError,
    places_of,
    refused,
    told,
)
from engine.models.traced.source_text import Piece, PieceProgram, Writer
from engine.models.traced.straight import first_alike, is_straight

_SAME_BORDERS = "a forward whose pieces hand on the same tensors in training and in evaluation"
_OUTPUT_TOO = "a forward that returns an output besides its loss"
_HOW_OUTPUT = (
    "return (loss, output), or a dict or a dataclass with loss and logits; or take no labels: the output then goes to "
    "the default loss"
)
_OWN_BUFFERS = "a forward that changes only buffers of one layer"
_ONE_LAYER = (
    "read it where it is changed, as in `count = self.count.clone()`, and use that tensor later; or choose "
    "a --split that leaves both lines in one layer"
)
_TRIED = (1, 2)  # steps whose first microbatch has to read the values of the record
_OTHER_SPLIT = "split the module where its tensors are the same in both"


class OutputLoss:
    """The loss of a module whose forward returns it: the operations that depend on the targets."""

    def __init__(self, training: PieceProgram, evaluation: PieceProgram):
        self._training, self._evaluation = training, evaluation

    def __call__(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Returns the loss: that of evaluation where no gradients are wanted."""
        program = self._training if torch.is_grad_enabled() else self._evaluation
        try:
            return program.run((), *outputs, *targets)[0]
        except Exception as error:
            raise program.blamed(error) from None


def ordinary_model(job: Job, data: Data, module: nn.Module, inputs: object = None) -> Model:
    """Returns the model of pieces of `module`, recorded with `inputs` or a microbatch; raises UserError."""
    refuse_what_cannot_be_kept({0: module})
    if limits := token_limits(module):
        limit_rows(data, limits)
    autocast = None if job.dtype == "float32" else getattr(torch, job.dtype)
    batch = data.microbatch(0, 0, 0, job.microbatch_size)
    of_output = (path for path in named_metrics(job).values() if path != PERPLEXITY)  # which is made of the loss
    has_metrics = bool(job.predict_args) or any(of_output)
    example = Example(batch, data.facts.form, autocast, has_metrics, job.variable_shapes)
    if inputs is not None:
        example = with_given(module, example, inputs)
    traces, splitters, notes = _opened(module, example, job, data)
    try:
        cuts = choose_cuts(job.split, module, traces[0], splitters[0])
    except UserError as error:
        raise explained(error, "split", notes) from None
    planned = [_planned(cuts, trace, splitter) for trace, splitter in zip(traces, splitters, strict=True)]
    _refuse_other_borders(cuts, traces, planned)
    _refuse_buffers_of_two_layers(traces[0], planned[0])
    pieces = _pieces(module, traces, planned, _device_of(job))
    layers = [
        LayerSpec(name, kind, ModuleCopy(name, piece))
        for (name, kind), piece in zip(names_of(cuts, traces[0]), pieces, strict=True)
    ]
    model = _with_loss(job, layers, traces, splitters, has_metrics)
    straight = _straight(pieces, planned[0], traces[0], splitters[0], has_own_loss=is_own(job.loss))
    return replace(model, notes=notes, straight=straight, alike=first_alike(pieces, straight))


def _straight(
    pieces: Sequence[Piece], planned: Sequence[PlannedPiece], trace: Trace, splitter: Splitter, *, has_own_loss: bool
) -> frozenset[int]:
    """Returns the pieces which are lists of torch's own operations in training, the last one with the loss."""
    straight = {
        number
        for number, (piece, plan) in enumerate(zip(pieces, planned, strict=True))
        if is_straight(plan, trace, [*piece.parameters(), *piece.buffers()])
    }
    tail = splitter.loss()
    is_last = not has_own_loss and (tail is None or is_straight(tail, trace, ()))
    return frozenset(straight if is_last else straight - {len(pieces) - 1})


def _opened(
    module: nn.Module, example: Example, job: Job, data: Data
) -> tuple[list[Trace], list[Splitter], tuple[str, ...]]:
    """Returns the records of training and of evaluation, opened as far as can be, and notes on what stays whole."""
    opening, varying, whole = OpenedParts(), set[CodeLine](), list[WholePart]()
    while True:
        try:
            traces = _traces(module, example, opening)
            splitters = [Splitter(trace) for trace in traces]
            others = _unsteady_lines(module, example, opening, traces, job, data) if opening.checked else set()
        except UnrecordableError as error:
            # The smallest submodule around the line runs as it is; the model itself cannot.
            paths = (error.path.rsplit(".", up)[0] for up in range(error.path.count(".") + 1) if error.path)
            leaf = next((path for path in paths if path not in opening.leaves), None)
            if leaf is None:
                raise refused(error) from error
            has_blocks = holds_cuts(job.split, module, leaf)
            if has_blocks and error.is_checkable and error.line not in varying:
                opening = opening._replace(checked=opening.checked | {error.line})
                continue
            opening = opening._replace(leaves=opening.leaves | {leaf})
            whole += [WholePart(leaf, error)] * has_blocks
            continue
        if not others:
            repeats = notes_on_repeats(job.split, module, traces[0])
            return traces, splitters, (*notes_on(whole), *repeats, *notes_on_tracers(traces))
        varying |= others
        opening = opening._replace(checked=opening.checked - others)


def _traces(module: nn.Module, example: Example, opening: OpenedParts) -> list[Trace]:
    return [recorded(module, example, opening, is_training) for is_training in (True, False)]


def _unsteady_lines(
    module: nn.Module, example: Example, opening: OpenedParts, traces: list[Trace], job: Job, data: Data
) -> set[CodeLine]:
    """Returns the lines that read other values in other microbatches, the same ones for every number of steps."""
    lines = set[CodeLine]()
    for step in _TRIED:
        other = example._replace(batch=data.microbatch(step, 0, 0, job.microbatch_size))
        lines |= unsteady(traces, _traces(module, other, opening))
    return lines


def _with_loss(
    job: Job, layers: list[LayerSpec], traces: list[Trace], splitters: list[Splitter], has_metrics: bool
) -> Model:
    """Returns the model of some layers, with the loss that the module returns or the default one."""
    tails, kind = [splitter.loss() for splitter in splitters], _device_of(job)
    if tails[0] is None or tails[1] is None:
        return Model(tuple(layers), default_loss)
    if job.loss:
        hint = "its forward returns the loss: leave its targets out"
        raise UserError([Problem("loss", "no value with a model that has its own", repr(job.loss), hint)])
    training, evaluation = (
        Writer(tail, trace.base, kind).program()[0] for tail, trace in zip((tails[0], tails[1]), traces, strict=True)
    )
    by_sample = is_by_sample(tails[1], traces[1], job.microbatch_size)
    loss = OutputLoss(training, evaluation)
    if not has_metrics or (by_sample and not traces[1].measured):  # there the loss reads the output alone
        return Model(tuple(layers), loss, is_cut_by_sample=by_sample)
    if not splitters[1].measures():
        output = "one that depends on the targets" if traces[1].measured else "the loss alone"
        field = "--output" if job.predict_args else "metrics"
        raise UserError([Problem(field, _OUTPUT_TOO, output, _HOW_OUTPUT)])
    return Model(tuple(layers), loss, is_cut_by_sample=by_sample, num_loss_outputs=splitters[1].num_outputs)


def _planned(cuts: Sequence[Cut], trace: Trace, splitter: Splitter) -> list[PlannedPiece]:
    places = [place_of(cut, trace) for cut in cuts]
    for cut, place, after in zip(cuts, places, [*places, len(trace.operations)][1:], strict=True):
        if place is None or after is None or place > after or not splitter.can_cut(place):
            raise UserError([Problem("model", _SAME_BORDERS, f"no cut at {cut.path} in evaluation", _OTHER_SPLIT)])
    return splitter.pieces([place or 0 for place in places])


def _refuse_other_borders(cuts: Sequence[Cut], traces: list[Trace], planned: list[list[PlannedPiece]]) -> None:
    problems = []
    for number, cut in enumerate(cuts):
        texts = []
        for trace, pieces in zip(traces, planned, strict=True):
            shapes = (trace.shapes[each] for each in pieces[number + 1].entering if not isinstance(each, NamedState))
            texts.append(", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in shapes))
        if texts[0] != texts[1]:
            place = f"{texts[0]} in training, {texts[1]} in evaluation, at the {'end' if cut.is_end else 'begin'} of"
            hint = f"{_OTHER_SPLIT}; metrics also need the output besides the loss there" * bool(traces[1].measured)
            problems.append(Problem("model", _SAME_BORDERS, f"{place} {cut.path}", hint or _OTHER_SPLIT))
    if problems:
        raise UserError(problems)


def _refuse_buffers_of_two_layers(trace: Trace, pieces: list[PlannedPiece]) -> None:
    """Raises UserError for buffers that a forward changes and that two pieces use: each would have its own copy."""
    problems = []
    for name in sorted(trace.changed):
        lines = [_line_with(NamedState(name, is_buffer=True), trace, piece) for piece in pieces]
        using = [f"{told(line)}in layer {number}" for number, line in enumerate(lines) if line is not None]
        if len(using) > 1:
            buffer = f"the buffer {name!r}, which the forward changes, {' and '.join(using)}"
            problems.append(Problem("model", _OWN_BUFFERS, buffer, _ONE_LAYER))
    if problems:
        raise UserError(problems)


def _line_with(buffer: NamedState, trace: Trace, piece: PlannedPiece) -> CodeLine | None:
    """Returns a line of a piece that changes a buffer, else one that reads it; None if there is none."""
    memory = trace.memory[buffer]
    lines = {
        memory in call.written: call.line
        for call in reversed(piece.operations)
        if any(isinstance(source, NamedState) and trace.memory.get(source) == memory for source in call.sources())
    }
    return lines.get(True, lines.get(False))


def _device_of(job: Job) -> str:
    """Returns the kind of device for which pieces are written; `auto` stays in jobs that no host has resolved."""
    return "cuda" if job.device == "cuda" else "cpu"


def _pieces(module: nn.Module, traces: list[Trace], planned: list[list[PlannedPiece]], kind: str) -> list[Piece]:
    both = list(zip(*planned, strict=True))
    bases = [trace.base for trace in traces]
    leaves = [
        list(dict.fromkeys(o.function.path for p in pair for o in p.operations if isinstance(o.function, LeafCall)))
        for pair in both
    ]
    used = [dict.fromkeys(place for piece in pair for place in piece.places()) for pair in both]
    _add_unused(module, used)
    return [
        Piece(module, places, paths, *(Writer(*planned, kind).program() for planned in zip(pair, bases, strict=True)))
        for pair, places, paths in zip(both, used, leaves, strict=True)
    ]


def _add_unused(module: nn.Module, used: list[dict[NamedState, None]]) -> None:
    """Gives each name of the state_dict to a piece: one that uses the tensor, else the piece of the name before it."""
    named = dict(places_of(module))
    of_name = {place: number for number, places in reversed(list(enumerate(used))) for place in places}
    of_tensor = {id(named[place]): number for place, number in of_name.items()}
    number = 0
    for place, tensor in named.items():
        number = of_name.get(place, of_tensor.get(id(tensor), number))
        used[number].setdefault(place)
