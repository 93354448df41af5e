"""Splits a trace at numbers of operations into pieces, each with the tensors that enter and leave it.

Operations that depend on no data, no weight and no random number, such as masks and positions, are done again in each
piece that needs them, in place of a transfer. Operations that depend on a target belong to the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.models.traced.recording import (
    BufferWrite,
    LeafCall,
    NamedState,
    TensorSource,
    TorchCall,
    Trace,
    TracedValue,
)
from engine.models.traced.refusal import UnrecordableError

_INPUTS_HINT = "give the targets as an input of the data too, and compute the loss after the last layer with weights"


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """The operations of one piece in order, the values that enter it, and the tensors that leave it.

    `copied` are the entering values that it overwrites.
    """

    operations: tuple[TorchCall, ...]
    entering: tuple[TracedValue | NamedState, ...]
    leaving: tuple[TensorSource, ...]
    copied: frozenset[TracedValue] = frozenset()

    def places(self) -> dict[NamedState, None]:
        """Returns the parameters and buffers that it uses, in order."""
        found = (source for each in self.operations for source in each.sources())
        return dict.fromkeys(each for each in (*found, *self.leaving) if isinstance(each, NamedState))


class Splitter:
    """Splits a trace at any numbers of operations."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self._of_loss = _depending(trace, trace.targets)
        self._refuse_weights_in_loss()
        self._constant = _constants(trace)
        self._maker = {value: number for number, each in enumerate(trace.operations) for value in each.values()}
        self._own = [n for n in range(len(trace.operations)) if n not in self._of_loss and n not in self._constant]
        self._last_use = self._last_uses()

    def crossing(self, cut: int) -> tuple[TracedValue, ...]:
        """Returns the values that later pieces read and earlier ones make, in the order in which they were made."""
        found = (value for value, last in self._last_use.items() if last >= cut and self._made_at(value) < cut)
        return tuple(sorted(found, key=lambda each: each.number))

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
            for each in self.trace.operations[first:last]
            for source in each.sources()
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
        copied = frozenset(
            each for each in entering if isinstance(each, TracedValue) and self.trace.memory[each] in written
        )
        given = tuple(each for each in entering if isinstance(each, (TracedValue, NamedState)))
        return PlannedPiece(tuple(operations[number] for number in numbers), given, leaving, copied)

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
            each = self.trace.operations[number]
            sources = [source for source in each.sources() if isinstance(source, NamedState)]
            places = [place.name for place in sources if not _is_steady(place, self.trace)]
            if places or isinstance(each.function, LeafCall):
                words = f"{places[0] if places else each.function!r} meets a value that depends on the targets"
                raise UnrecordableError(words, _INPUTS_HINT, each.line, "")
            if each.draws:
                raise UnrecordableError("the loss draws random numbers", "draw them before the loss", each.line, "")


def _depending(trace: Trace, roots: Iterable[TracedValue]) -> frozenset[int]:
    """Returns the operations that depend on these values, over memory that they overwrite too."""
    values, memories, found = set(roots), set[int](), set[int]()
    for number, each in enumerate(trace.operations):
        read = [source for source in each.sources() if isinstance(source, TracedValue)]
        if any(source in values or trace.memory[source] in memories for source in read):
            found.add(number)
            values |= set(each.values())
            memories |= each.written
    return frozenset(found)


def _constants(trace: Trace) -> frozenset[int]:
    """Returns the operations that give the same in every microbatch and every step."""
    operations = trace.operations
    constant = {
        number
        for number, each in enumerate(operations)
        if not each.draws
        and not isinstance(each.function, (BufferWrite, LeafCall))
        and all(_is_steady(source, trace) for source in each.sources())
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
