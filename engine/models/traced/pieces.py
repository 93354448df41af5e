"""Splits a trace at numbers of operations into pieces, each with the tensors that enter and leave it.

Operations that depend on no data, no weight and no random number, such as masks and positions, are done again in each
piece that needs them, in place of a transfer. Operations that depend on a target belong to the loss. Where weights
follow, as behind the decoder inputs that a model makes of its labels, they read the input of the same column instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from engine.core.errors import Problem, UserError
from engine.core.manifest import PIECE
from engine.models.layers import MAX_TENSORS
from engine.models.traced.recording import (
    BufferWrite,
    LeafCall,
    ModuleCall,
    NamedState,
    TensorSource,
    TorchCall,
    Trace,
    TracedValue,
    UnrecordableError,
    replaced_in,
)

_INPUTS_HINT = "give the targets as an input of the data too, and compute the loss after the last layer with weights"


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A piece's operations in order, the values that enter it, those it overwrites, the tensors that leave it."""

    operations: tuple[TorchCall, ...]
    entering: tuple[TracedValue | NamedState, ...]
    leaving: tuple[TensorSource, ...]
    copied: frozenset[TracedValue] = frozenset()

    def places(self) -> dict[NamedState, None]:
        """Returns the parameters and buffers that it uses, in order."""
        sources = (source for call in self.operations for source in call.sources())
        return dict.fromkeys(each for each in (*sources, *self.leaving) if isinstance(each, NamedState))


class Splitter:
    """Splits a trace at any numbers of operations."""

    def __init__(self, trace: Trace):
        self.trace = trace
        _read_inputs(trace)
        self._of_loss = _depending(trace, trace.targets)
        self._refuse_weights_in_loss()
        self._constant = _constants(trace)
        self._maker = {value: number for number, each in enumerate(trace.operations) for value in each.values()}
        self._own = [n for n in range(len(trace.operations)) if n not in self._of_loss and n not in self._constant]
        self._last_use = self._last_uses()

    def crossing(self, cut: int) -> tuple[TracedValue, ...]:
        """Returns the values that later pieces read and earlier ones make, by type, shape and time."""
        values = (value for value, last in self._last_use.items() if last >= cut and self._made_at(value) < cut)
        return tuple(sorted(values, key=self._rank))

    def _rank(self, value: TracedValue) -> tuple[str, tuple[int, ...], int]:
        dtype, shape = self.trace.shapes[value]
        return str(dtype), tuple(shape), value.number

    def can_cut(self, cut: int) -> bool:
        """Returns whether a cut keeps the meaning: no later operation overwrites a memory that two tensors share."""
        crossing = self.crossing(cut)
        memory = self.trace.memory
        shared = [memory[each] for each in crossing]
        shared += [memory[place] for place in memory if isinstance(place, NamedState)]
        later = {number for each in self.trace.operations[cut:] for number in each.written}
        return all(memory[each] not in later or shared.count(memory[each]) == 1 for each in crossing)

    def has_weights(self, first: int, last: int) -> bool:
        """Returns whether operations `first` to `last` (exclusive) use a parameter."""
        return any(
            isinstance(source, NamedState) and not source.is_buffer
            for call in self.trace.operations[first:last]
            for source in call.sources()
        )

    def pieces(self, cuts: Sequence[int]) -> list[PlannedPiece]:
        """Returns the pieces before, between and behind the cuts."""
        edges = [0, *cuts, len(self.trace.operations)]
        planned = []
        for first, last in pairwise(edges):
            is_first, is_last = first == 0, last == edges[-1]
            entering = self.trace.inputs if is_first else self.crossing(first)
            leaving: tuple[TensorSource, ...] = self._leaving() if is_last else self.crossing(last)
            own = [n for n in self._own if first <= self._place(n) < last]
            planned.append(self._piece(own, entering, leaving))
        return planned

    def loss(self) -> PlannedPiece | None:
        """Returns the operations that depend on targets; None if the outputs do not."""
        if not self.trace.is_loss:
            return None
        entering = (*self._outputs(), *self.trace.targets)
        return self._piece(sorted(self._of_loss), entering, self.trace.outputs)

    def _piece(
        self, own: list[int], entering: tuple[TensorSource, ...], leaving: tuple[TensorSource, ...]
    ) -> PlannedPiece:
        operations = self.trace.operations
        numbers = sorted({*own, *self._again(own, leaving)})
        written = {memory for number in own for memory in operations[number].written}
        values = (each for each in entering if isinstance(each, TracedValue))
        copied = frozenset(value for value in values if self.trace.memory[value] in written)
        inputs = tuple(each for each in entering if isinstance(each, (TracedValue, NamedState)))
        return PlannedPiece(tuple(operations[number] for number in numbers), inputs, leaving, copied)

    def _again(self, own: Iterable[int], leaving: Iterable[TensorSource]) -> set[int]:
        """Returns the constant operations that a piece needs."""
        operations, needed = self.trace.operations, set[int]()
        left = [source for number in own for source in operations[number].sources()] + list(leaving)
        while left:
            source = left.pop()
            if not isinstance(source, TracedValue) or self._maker.get(source) not in self._constant:
                continue
            memory = self.trace.memory[source]
            makers = {self._maker[source], *(n for n in self._constant if memory in operations[n].written)}
            for number in makers - needed:
                needed.add(number)
                left += operations[number].sources()
        return needed

    def measures(self) -> bool:
        """Returns whether there are outputs for metrics, none of which depends on the targets."""
        of_loss = {value for n in self._of_loss for value in self.trace.operations[n].values()}
        return bool(self.trace.measured) and not {*self.trace.measured} & {*of_loss, *self.trace.targets}

    @property
    def num_outputs(self) -> int:
        """The number of values that the loss reads, or of the outputs."""
        return len(self._outputs())

    def _leaving(self) -> tuple[TensorSource, ...]:
        return (*self._outputs(), *(self.trace.measured if self.measures() else ()))

    def _outputs(self) -> tuple[TensorSource, ...]:
        """Returns what leaves the last piece: the outputs, or the values that the loss reads."""
        if not self.trace.is_loss:
            return self.trace.outputs
        numbers = sorted({*self._of_loss, *self._again(self._of_loss, ())})
        inner = {value for n in numbers for value in self.trace.operations[n].values()} | {*self.trace.targets}
        read = dict.fromkeys(source for n in numbers for source in self.trace.operations[n].sources())
        return tuple(each for each in read if isinstance(each, (TracedValue, NamedState)) and each not in inner)

    def _made_at(self, value: TracedValue) -> int:
        return self._maker.get(value, -1)

    def _place(self, number: int) -> int:
        """Returns the place of an operation: a buffer is given another tensor where that one is made."""
        operation = self.trace.operations[number]
        if not isinstance(operation.function, BufferWrite):
            return number
        return max((self._made_at(each) for each in operation.args if isinstance(each, TracedValue)), default=0)

    def _last_uses(self) -> dict[TracedValue, int]:
        """Returns for each value that can cross a cut the number of the last operation that reads it."""
        operations, end = self.trace.operations, len(self.trace.operations)
        last: dict[TracedValue, int] = {}
        for number in self._own:
            for source in operations[number].sources():
                if isinstance(source, TracedValue):
                    last[source] = max(last.get(source, 0), self._place(number))
        last |= {source: end for source in self._leaving() if isinstance(source, TracedValue)}
        return {value: at for value, at in last.items() if self._maker.get(value) not in self._constant}

    def _refuse_weights_in_loss(self) -> None:
        for number in sorted(self._of_loss):
            call = self.trace.operations[number]
            places = _weights(call, self.trace)
            if places or isinstance(call.function, LeafCall):
                words = f"{places[0] if places else call.function!r} meets a value that depends on the targets"
                raise UnrecordableError(words, _INPUTS_HINT, call.line, "")
            if call.draws:
                raise UnrecordableError("the loss draws random numbers", "draw them before the loss", call.line, "")


def _weights(call: TorchCall, trace: Trace) -> list[str]:
    """Returns the parameters, and the buffers that change, that an operation reads."""
    places = [source for source in call.sources() if isinstance(source, NamedState)]
    return [each.name for each in places if not _is_steady(each, trace)]


def _read_inputs(trace: Trace) -> None:
    """Lets operations that depend on targets, and that weights follow, read the inputs of the same columns."""
    operations, of_targets = trace.operations, _depending(trace, trace.as_inputs)
    before, values, memories = set[int](), set[TracedValue](), set[int]()
    for number in sorted(of_targets, reverse=True):
        call = operations[number]
        is_followed = not values.isdisjoint(call.values()) or not memories.isdisjoint(call.written)
        if is_followed or isinstance(call.function, LeafCall) or _weights(call, trace):
            before.add(number)
            read = [source for source in call.sources() if isinstance(source, TracedValue)]
            values |= {*read}
            memories |= {trace.memory[each] for each in read}
    own = {trace.memory[each] for pair in trace.as_inputs.items() for each in pair}
    is_changed = any(not own.isdisjoint(operations[number].written) for number in before)
    left = (source for number in of_targets - before for source in operations[number].sources())
    is_read = any(source in trace.as_inputs for source in left)
    for number in before if is_read and not is_changed else ():
        call = operations[number]
        call.args, call.kwargs = replaced_in((call.args, call.kwargs), trace.as_inputs)


def _depending(trace: Trace, roots: Iterable[TracedValue]) -> frozenset[int]:
    """Returns the operations that depend on these values, over memory that they overwrite too."""
    values, memories, numbers = set(roots), set[int](), set[int]()
    for number, call in enumerate(trace.operations):
        read = [source for source in call.sources() if isinstance(source, TracedValue)]
        if any(source in values or trace.memory[source] in memories for source in read):
            numbers.add(number)
            values |= set(call.values())
            memories |= call.written
    return frozenset(numbers)


def _constants(trace: Trace) -> frozenset[int]:
    """Returns the operations that give the same in every microbatch and every step."""
    operations = trace.operations
    constant = {
        number
        for number, call in enumerate(operations)
        if not call.draws
        and not isinstance(call.function, (BufferWrite, LeafCall))
        and all(_is_steady(source, trace) for source in call.sources())
    }
    while True:
        others = [each for number, each in enumerate(operations) if number not in constant]
        varying = {value for each in others for value in each.values()} | {*trace.inputs, *trace.targets}
        memories = {memory for each in others for memory in each.written}
        left = {
            number
            for number in constant
            if not any(source in varying for source in operations[number].sources())
            and not any(trace.memory[value] in memories for value in operations[number].values())
            and not memories & operations[number].written
        }
        if left == constant:
            return frozenset(constant)
        constant = left


def _is_steady(source: TensorSource, trace: Trace) -> bool:
    return not isinstance(source, NamedState) or (source.is_buffer and source.name not in trace.changed)


# Chooses where a module is cut: around its repeated blocks, around named submodules, or into equal pieces.
#
# Rules: a cut lies at the begin or the end of a call of a submodule, so that it has a name and stands in the trace of
# training and in that of evaluation. It does not depend on the number of stages or on a clock. At most `MAX_LIVE`
# tensors cross it. A piece without weights joins its neighbour.

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MOST_NAMES = 6


class Cut(NamedTuple):
    """The begin or the end of the call number `call` of a submodule."""

    path: str
    call: int
    is_end: bool


def choose_cuts(split: str, module: nn.Module, trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts in order; raises UserError if `split` names no submodule, or more pieces than there can be."""
    if split.isdecimal():
        return _equal(int(split), trace, splitter)
    if split:
        return _named(split, module, trace, splitter)
    once = {call.path for call in trace.calls} - {call.path for call in trace.calls if call.count}
    units = set(_units(module, "")) & once
    return _joined(_around(trace, lambda path: path in units), trace, splitter)


def notes_on_repeats(split: str, module: nn.Module, trace: Trace) -> tuple[str, ...]:
    """Returns a note for the user on each block that is called again: `choose_cuts` does not cut between its calls."""
    rows = [(path, row) for path, row in module.named_modules() if isinstance(row, _CONTAINERS)]
    blocks = {f"{path}.{name}".lstrip(".") for path, row in rows for name, _ in row.named_children()}
    counts = Counter(call.path for call in trace.calls if call.path in blocks and not split)
    again = [
        path
        for path, count in counts.items()
        if count > 1 and next(module.get_submodule(path).parameters(), None) is not None
    ]
    outer = [path for path in again if not any(path.startswith(f"{other}.") for other in again)]
    hint = "(--split with its name cuts between them)"
    return tuple(f"{path} stays one layer: {counts[path]} calls share its weights {hint}" for path in outer)


def holds_cuts(split: str, module: nn.Module, path: str) -> bool:
    """Returns whether `split` may cut a module inside of its submodule `path`."""
    inside = [each for each, _ in module.named_modules() if each.startswith(f"{path}.")]
    if split and not split.isdecimal():
        patterns = [each.strip() for each in split.split(",") if each.strip()]
        return any(_matches(pattern, each) for pattern in patterns for each in inside)
    return not {*_units(module, "")}.isdisjoint(inside)


def _matches(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) and pattern.count(".") == path.count(".")


def place_of(cut: Cut, trace: Trace) -> int | None:
    """Returns the number of the operation before which a cut lies in a trace; None if it has no such call."""
    calls = (call for call in trace.calls if (call.path, call.count) == (cut.path, cut.call))
    return next((call.last if cut.is_end else call.first for call in calls), None)


def names_of(cuts: Sequence[Cut], trace: Trace) -> list[tuple[str, str]]:
    """Returns the name and the kind of each piece: those of the first submodule that is called in it."""
    edges = [0, *(place_of(cut, trace) or 0 for cut in cuts), len(trace.operations)]
    names: list[tuple[str, str]] = []
    for number, (first, last) in enumerate(pairwise(edges)):
        begins = cuts[number - 1] if number else None
        call = next((each for each in trace.calls if _begins_with(each, first, last, begins)), None)
        name = call.path if call else f"the end of {begins.path}" if begins else "its inputs"
        again = f" ({call.count + 1})" if call and call.count else ""
        names.append((f"{PIECE}{name}{again}", (call or trace.calls[0]).kind))
    return names


def _begins_with(call: ModuleCall, first: int, last: int, begins: Cut | None) -> bool:
    """Returns whether a piece is named after this call: it lies in the piece, and no call around it does."""
    if begins is not None and not begins.is_end and call.first == first:
        return (call.path, call.count) == (begins.path, begins.call)
    return bool(call.path) and first <= call.first < call.last <= last


def _units(module: nn.Module, path: str) -> Iterator[str]:
    """Yields the paths of the submodules that stay whole: blocks of containers, and others at the top."""
    for name, child in module.named_children():
        here = f"{path}.{name}".lstrip(".")
        if isinstance(child, _CONTAINERS) or _has_blocks(child):
            yield from _units(child, here)
        else:
            yield here


def _has_blocks(module: nn.Module) -> bool:
    """Returns whether a submodule holds a row of blocks: two or more of one class, with submodules of their own."""
    containers = (each for each in module.modules() if isinstance(each, _CONTAINERS))
    rows = ([type(child) for child in row.children() if any(True for _ in child.children())] for row in containers)
    return any(len(kinds) > len(set(kinds)) for kinds in rows)


def _around(trace: Trace, is_chosen: Callable[[str], bool]) -> list[Cut]:
    """Returns the begin and the end of each chosen call, in order."""
    calls = [call for call in trace.calls if is_chosen(call.path)]
    cuts = [Cut(call.path, call.count, is_end) for call in calls for is_end in (False, True)]
    return sorted(cuts, key=lambda cut: place_of(cut, trace) or 0)


def _joined(cuts: Sequence[Cut], trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts that can be made, without those that would leave a piece without weights."""
    end, joined, before = len(trace.operations), list[Cut](), 0
    for cut in cuts:
        place = place_of(cut, trace) or 0
        if not splitter.has_weights(place, end) or not _fits(place, splitter):
            continue
        if splitter.has_weights(before, place):
            joined.append(cut)
        elif joined and len(splitter.crossing(place)) <= len(splitter.crossing(before)):
            joined[-1] = cut  # an activation stays with the layer before it
        else:
            continue
        before = place
    return joined


def _fits(place: int, splitter: Splitter) -> bool:
    return len(splitter.crossing(place)) <= MAX_TENSORS and splitter.can_cut(place)


def _named(split: str, module: nn.Module, trace: Trace, splitter: Splitter) -> list[Cut]:
    patterns = [each.strip() for each in split.split(",") if each.strip()]
    paths = list(dict.fromkeys(call.path for call in trace.calls if call.path))
    matches = {pattern: [path for path in paths if _matches(pattern, path)] for pattern in patterns}
    expected = "names of submodules that the forward calls, such as"
    problems = [
        Problem("split", f"{expected} {_near(pattern, module, paths)}", repr(pattern))
        for pattern in patterns
        if not matches[pattern]
    ]
    if problems:
        raise UserError(problems)
    chosen = {path for matched in matches.values() for path in matched}
    cuts = _around(trace, chosen.__contains__)
    for cut in cuts:
        if not _fits(place_of(cut, trace) or 0, splitter):
            crossing = len(splitter.crossing(place_of(cut, trace) or 0))
            why = f"{crossing} tensors cross it" if crossing > MAX_TENSORS else "a tensor is overwritten on both sides"
            where = f"the {'end' if cut.is_end else 'begin'} of {cut.path}"
            problems.append(Problem("split", f"cuts that at most {MAX_TENSORS} tensors cross", f"{where}: {why}"))
    if problems:
        raise UserError(problems)
    return _joined(cuts, trace, splitter)


def _near(pattern: str, module: nn.Module, paths: Iterable[str]) -> str:
    """Returns names that could be meant, the nearest first: those of the blocks, and others as deep as a pattern."""
    units = set(_units(module, ""))
    near = (each for each in paths if each in units or each.count(".") == pattern.count("."))
    names = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in near)
    return ", ".join(get_close_matches(pattern, names, _MOST_NAMES, cutoff=0.0))


def _equal(count: int, trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts of `count` pieces of about equal work; of places close to equal, that with least to send."""
    cuts = _joined(_around(trace, bool), trace, splitter)
    by_place = {place_of(cut, trace) or 0: cut for cut in cuts}
    if len(by_place) < count - 1:
        expected = f"at most {len(by_place) + 1}, the places where this module can be cut"
        raise UserError([Problem("split", expected, str(count), "name submodules, as in blocks.*")])
    done = [0, *accumulate(each.work for each in trace.operations)]
    chosen: list[int] = []
    places = sorted(by_place)

    def cost(place: int, goal: float) -> tuple[int, int, int]:
        away = abs(done[place] - goal) * count / done[-1]  # in pieces
        sent = sum(trace.shapes[each][1].numel() for each in splitter.crossing(place))
        return round(4 * away), sent, place

    for number in range(1, count):
        left = places[: len(places) - (count - 1 - number)]
        goal = done[-1] * number / count
        free = [each for each in left if each > (chosen[-1] if chosen else 0)]
        chosen.append(min(free, key=partial(cost, goal=goal)))
    return [by_place[each] for each in chosen]


# Whether a recorded loss can be cut by samples: its shapes are constants, and its rows may be mixed.
#
# It can if it is one known function of one output and the targets, which pairs the rows of both.

_PAIRING = frozenset(
    """
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits
    """.split()
)


def is_by_sample(loss: PlannedPiece, trace: Trace, size: int) -> bool:
    """Returns whether the loss of the first samples of a microbatch of `size` is that of the first rows."""
    if len(loss.operations) != 1 or len(trace.targets) != 1:
        return False
    (operation,) = loss.operations
    is_known = getattr(operation.function, "__name__", "") in _PAIRING
    if not is_known or len(operation.args) != 2 or operation.kwargs.get("reduction", "mean") != "mean":
        return False
    output, target = operation.args
    if not isinstance(output, TracedValue) or target != trace.targets[0] or loss.entering != (output, target):
        return False
    return all(trace.shapes[each][1][:1] == (size,) for each in (output, target))
