"""Records the forward of a module once, on a copy, in training or in evaluation.

The module is called with a microbatch of the data. A parameter of its forward with a name in `TARGETS` gets the
targets; the forward then returns the loss.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.data import Columns
from engine.models.layers import Batch, ModuleCopy, Tensors, flatten, parts_of, unflatten
from engine.models.losses import shapes_of
from engine.models.traced.reads import answering
from engine.models.traced.recorder import CallRecorder
from engine.models.traced.recording import (
    DRAW,
    CodeLine,
    LeafCall,
    Trace,
    UnrecordableError,
    attributes_of,
    carried,
    difference,
    places_of,
    text_of,
)
from engine.models.user_code import is_own, running

TARGETS = ("labels", "label", "targets", "target")
_WITHOUT_LOSS = "return the loss as a scalar tensor, or as `loss` of a dict or a dataclass; or take no labels"


class Example(NamedTuple):
    """How to call a module: with a microbatch, whose inputs have a form, and under autocast to a type, if any.

    With `has_metrics` a forward that returns the loss is to return outputs beside it. With `is_variable` another
    microbatch may have other sizes.
    """

    batch: Batch
    form: object
    autocast: torch.dtype | None
    has_metrics: bool = False
    is_variable: bool = False


class ForwardCall(NamedTuple):
    """The call of the forward, and the tensors in it: the microbatch's inputs, and the targets that it takes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Tensors
    targets: Tensors
    may_ignore_targets: bool = False


class OpenedParts(NamedTuple):
    """How far a module is opened: submodules at the paths in `leaves` are called as a whole; lines are `checked`."""

    leaves: frozenset[str] = frozenset()
    checked: frozenset[CodeLine] = frozenset()


def recorded(module: nn.Module, example: Example, opening: OpenedParts, is_training: bool) -> Trace:
    """Returns the record of a forward; raises UnrecordableError for a line, UserError without output or loss."""
    copied = _copy(module, is_training)
    call = bound(copied, example)
    before = {place.name: tensor for place, tensor in places_of(copied)}
    attributes = attributes_of(copied)
    positions = _positions()
    with _as_in_a_stage(example, is_training):
        recorder = CallRecorder(copied, call.inputs, call.targets, *opening, is_variable=example.is_variable)
        with running("the forward of the model", copied, _columns_text(example)):
            result = recorder.run(lambda made: made(*call.args, **call.kwargs))
        for name, position in _positions().items():
            if positions[name] != position:
                raise UnrecordableError(f"the forward draws from {name}", DRAW, _line_of_draw(copied, call), "")
    recorder.note_buffers(before)
    trace = recorder.trace
    if isinstance(form := example.form, Columns) and form.target and trace.targets:
        trace.as_inputs = {trace.targets[0]: trace.inputs[form.names.index(form.target)]}
    trace.is_loss = bool(call.targets) and not (call.may_ignore_targets and _is_without_loss(result))
    chosen = _chosen(result, trace.is_loss)
    trace.outputs = tuple(recorder.source(each) for each in chosen)
    if trace.is_loss and example.has_metrics and not is_training:
        trace.measured = tuple(recorder.source(each) for each in _beside_loss(result))
    now = {place.name: tensor for place, tensor in places_of(copied)}
    trace.changed = frozenset(
        place.name
        for place, tensor in places_of(module)
        if place.is_buffer and (now[place.name] is not before[place.name] or not torch.equal(now[place.name], tensor))
    )
    called = {each.function.path for each in trace.operations if isinstance(each.function, LeafCall)}
    afterwards = attributes_of(copied)
    if changed := difference(attributes, afterwards, called):
        _restore_buffers(module, copied, before)
        again = bound(copied, example)
        with _as_in_a_stage(example, is_training), running("the second forward of the model", copied), answering():
            outputs = _chosen(copied(*again.args, **again.kwargs), trace.is_loss)
        changing = difference(afterwards, attributes_of(copied), called)
        if changing or text_of(outputs) != text_of(chosen):
            raise carried(copied, (changing or changed)[0])
    if trace.asking:
        is_unchanged = not trace.changed and attributes == afterwards
        other = copied if is_unchanged else _copy(module, is_training)
        trace.has_other_bits = text_of(_alone(other, example, trace.is_loss, is_training)) != text_of(chosen)
    return trace


def _copy(module: nn.Module, is_training: bool) -> nn.Module:
    copied = ModuleCopy("the model", module)()
    return copied if is_training else copied.eval()


def _alone(copied: nn.Module, example: Example, is_loss: bool, is_training: bool) -> Tensors:
    """Returns the results of a forward of a copy that is not recorded."""
    call = bound(copied, example)
    with _as_in_a_stage(example, is_training), running("the forward of the model", copied):
        return _chosen(copied(*call.args, **call.kwargs), is_loss)


def _restore_buffers(module: nn.Module, copied: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Gives a copy of a module the buffers that it had `before` a forward, with their values."""
    with torch.no_grad():
        for place, value in places_of(module):
            if place.is_buffer:
                copied.get_submodule(place.holder)._buffers[place.key] = before[place.name].copy_(value)


def bound(module: nn.Module, example: Example) -> ForwardCall:
    """Returns the call of the forward with copies of the tensors of a microbatch."""
    form, inputs = example.form, tuple(each.clone() for each in example.batch.inputs)
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(form, Columns):
        targeted = {*TARGETS} - {*form.names} | {form.target}
        names = [each.name for each in parameters if each.name in targeted]
        columns = form.taken_by(module.forward, names)
        if columns.is_dict and form.target:
            target = example.batch.targets[0].clone()
            of_names = zip(form.names, inputs, strict=True)
            args, _ = columns.chosen(tuple(target if name == form.target else each for name, each in of_names))
            return ForwardCall(args, {}, inputs, (target,), may_ignore_targets=True)
        args, kwargs = columns.chosen(inputs)
    else:
        args, kwargs = (inputs, {}) if form is None else unflatten(form, inputs)
        at = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        bound_args = {*at[: len(args)], *kwargs}
        names = [each.name for each in parameters if each.name in TARGETS and each.name not in bound_args]
    targets = tuple(each.clone() for each in example.batch.targets[: len(names)])
    return ForwardCall(tuple(args), {**kwargs, **dict(zip(names, targets, strict=False))}, inputs, targets)


def _columns_text(example: Example) -> str:
    form, (inputs, targets) = example.form, (example.batch.inputs, example.batch.targets)
    parts: list[tuple[str, Tensors]] = [("inputs", inputs)]
    if isinstance(form, Columns):
        parts = [(name, (each,)) for name, each in zip(form.names, inputs, strict=True)]
    if not isinstance(form, Columns) or not form.target:
        parts.append(("targets", targets))
    return f"the microbatch has {', '.join(f'{name} {shapes_of(tensors)}' for name, tensors in parts)}"


@contextlib.contextmanager
def _as_in_a_stage(example: Example, is_training: bool) -> Iterator[None]:
    """Sets the modes and the default generator of torch, equal on all workers; sets the generator back at the end."""
    is_autocast = example.autocast is not None
    autocast = torch.autocast("cpu", dtype=example.autocast or torch.bfloat16, enabled=is_autocast)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(is_training), autocast:
        torch.default_generator.manual_seed(0)
        yield


def _line_of_draw(module: nn.Module, call: ForwardCall) -> CodeLine:
    """Returns the user's line after which a generator stands elsewhere; an empty one if another forward has none."""
    before, lines, draws = _positions(), [CodeLine()], list[CodeLine]()

    def watch(frame: FrameType, event: str, result: Any) -> Any:
        if not is_own(frame.f_code.co_filename):
            return None
        if not draws and _positions() != before:
            draws.append(lines[-1])
        lines.append(CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return watch

    tracing = sys.gettrace()
    sys.settrace(watch)
    try:
        with contextlib.suppress(Exception):
            module(*call.args, **call.kwargs)
    finally:
        sys.settrace(tracing)
    return draws[0] if draws else CodeLine()


def _positions() -> dict[str, object]:
    positions: dict[str, object] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:  # numpy itself imports its generator with the first draw
        name, keys, *others = importlib.import_module("numpy.random").get_state()
        positions["numpy's generator"] = (name, keys.tobytes(), *others)
    return positions


def _chosen(result: Any, is_loss: bool) -> Tensors:
    return _loss_in(result) if is_loss else _outputs_in(result)


def _is_without_loss(result: Any) -> bool:
    """Returns whether a forward that was given the targets returns outputs alone."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    is_scalar = isinstance(result, Tensor) and result.numel() == 1
    return loss is None and not is_scalar and not isinstance(result, tuple)


def _loss_in(result: Any) -> Tensors:
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        loss = result[0] if result else None
    elif not isinstance(result, Tensor):
        loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return (loss,)
    kind = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    expected = "a forward that takes targets and returns the loss"
    raise UserError([Problem("model", expected, f"{kind} as the loss of {type(result).__name__}", _WITHOUT_LOSS)])


def _beside_loss(result: Any) -> Tensors:
    """Returns the outputs beside a loss: `logits`, else all others; of a tuple the second part."""
    if isinstance(result, Tensor):
        return ()
    if isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        return flatten(result[1])[1] if len(result) > 1 else ()
    parts = dict(result) if isinstance(result, Mapping) else parts_of(result) or vars(result)
    logits = parts.get("logits", getattr(result, "logits", None))
    others = {name: each for name, each in parts.items() if name != "loss"}
    return (logits,) if isinstance(logits, Tensor) else flatten(others)[1]


def _outputs_in(result: Any) -> Tensors:
    parts = parts_of(result)
    logits = (parts or {}).get("logits", getattr(result, "logits", None) if parts is None else None)
    outputs = (logits,) if isinstance(logits, Tensor) else flatten(result)[1]
    if not outputs:
        raise UserError(
            [Problem("model", "a forward that returns tensors", f"a {type(result).__name__} without tensors")]
        )
    return outputs


# Example inputs that a factory returns beside its module: the forward is recorded with them, in place of the data.
#
# A tensor or a tuple is given by position, a mapping by name. They have the shapes and dtypes of the first microbatch,
# because the record is made for these. Targets may be left out: they then come from the data.

ByParameter = dict[str, Tensors]  # tensors by the parameter of the forward that takes them
_HINT = "dimension 0 is --microbatch-size; or return the module alone: it is then recorded with the first microbatch"


def with_given(module: nn.Module, example: Example, inputs: Any) -> Example:
    """Returns the example with the given inputs in the place of those of the data; raises UserError if they differ."""
    call = bound(module, example)
    theirs = _named(module, call.args, call.kwargs)
    if isinstance(inputs, Mapping):
        ours = _named(module, (), dict(inputs))
    else:
        ours = _named(module, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {})
    of_targets = {id(each) for each in call.targets} - {id(each) for each in call.inputs}
    needed = {name for name, tensors in theirs.items() if not all(id(each) in of_targets for each in tensors)}
    known = needed <= ours.keys() <= theirs.keys()
    names = dict.fromkeys([*theirs, *ours]) if not known else ours
    expected, text = _inputs_text(theirs, names), _inputs_text(ours, names)
    if expected != text:
        raise UserError([Problem("model", f"example inputs as the data: {expected}", text, _HINT)])
    pairs = [zip(theirs[name], ours[name], strict=True) for name in ours]
    instead = {id(one): other.detach() for each in pairs for one, other in each}

    def replaced(tensors: Tensors, used: Tensors) -> Tensors:
        return tuple(instead.get(id(each), tensor) for each, tensor in zip(used, tensors, strict=True))

    batch, targets = example.batch, example.batch.targets
    count = len(call.targets)
    targets = (*replaced(targets[:count], call.targets), *targets[count:])
    return example._replace(batch=Batch(replaced(batch.inputs, call.inputs), targets))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByParameter:
    """Returns the tensors of a call of the forward by its parameters; raises UserError if it cannot be called so."""
    try:
        call = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError as error:
        expected = "example inputs that the forward takes"
        raise UserError([Problem("model", expected, f"{type(error).__name__}: {error}")]) from None
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        is_spread = call.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if is_spread else {name: value}
    return {name: flatten(value)[1] for name, value in arguments.items() if value is not None}


def _inputs_text(named: ByParameter, names: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {shapes_of(named[name])}" for name in names if name in named) or "nothing"
