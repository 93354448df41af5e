"""The audit of a step: compares the hashes that replicas report, and makes rows of the trajectory of them.

Rules: all replicas of a layer have the same weights and optimizer state, in every pipeline. Replicas in the same
pipeline have the same buffers too. A worker that reports a layer twice must report the same hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.core.checks.trajectory import EITHER, NO_MARKS, TensorMarks, TrajectoryRow
from engine.core.errors import ReplicasDifferError
from engine.core.manifest import joined_buffers

AuditMarks = Sequence[Sequence[str]]  # (name, digest of this tensor and all before it) of each tensor
LayerHashes = Mapping[int, tuple[str, str]]  # layer -> (weights and optimizer state, buffers)
LayerMarks = Mapping[int, tuple[AuditMarks, AuditMarks]]  # the same, of each tensor
_Report = tuple[str, str, AuditMarks]  # hash, reporter, marks


@dataclass(slots=True)
class AuditBook:
    """Collects the hashes of one step at a time; a step is complete with every layer of every pipeline."""

    num_layers: int
    num_pipelines: int
    _states: dict[int, _Report] = field(default_factory=dict)  # by layer
    _buffers: dict[tuple[int, int], _Report] = field(default_factory=dict)  # by layer and pipeline
    _is_disputed: bool = False
    _names: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)  # one copy for all steps

    def add(
        self, step: int, worker: int, pipeline: int, hashes: LayerHashes, marks: LayerMarks = MappingProxyType({})
    ) -> None:
        """Adds the hashes of some layers of a worker's replica in one pipeline, and the marks of their tensors.

        Raises ReplicasDifferError when they differ from another replica's; it names the tensor if the marks show it.
        After that `close` returns no rows, because either replica may be the wrong one.
        """
        reporter = f"worker {worker} in pipeline {pipeline}"
        try:
            for layer, (state, buffers) in hashes.items():
                of_state, of_buffers = marks.get(layer, ((), ()))
                report: _Report = (state, reporter, of_state)
                _compare(step, f"layer {layer}", self._states.setdefault(layer, report), report)
                report = (buffers, reporter, of_buffers)
                known = self._buffers.setdefault((layer, pipeline), report)
                _compare(step, f"a buffer of layer {layer}", known, report)
        except ReplicasDifferError:
            self._is_disputed = True
            raise

    def close(self, step: int, loss: float, data: AuditMarks = ()) -> list[TrajectoryRow]:
        """Returns the rows of `step`, with the marks of its data, and begins the next step.

        A step without a complete audit has no rows.
        """
        states, buffers, self._states, self._buffers = self._states, self._buffers, {}, {}
        if self._is_disputed or len(buffers) < self.num_layers * self.num_pipelines:
            return []
        rows, of_data = [], self._marks(data)
        for layer in range(self.num_layers):
            of_buffers = [buffers[layer, pipeline] for pipeline in range(self.num_pipelines)]
            joined = joined_buffers([report[0] for report in of_buffers])
            state, _, of_state = states[layer]
            marks = (self._marks(of_state), self._marks(of_buffers[0][2]))  # of the first pipeline
            rows.append(TrajectoryRow(step, layer, state, joined, loss, marks, of_data))
        return rows

    def _marks(self, of_tensors: AuditMarks) -> TensorMarks:
        """Returns marks in little memory: a run has some for each step, and a commit waits for them."""
        if not of_tensors:
            return NO_MARKS
        names, marks = zip(*of_tensors, strict=True)
        return self._names.setdefault(names, names), "".join(marks)


def _compare(step: int, part: str, one: _Report, other: _Report) -> None:
    if one[0] != other[0]:
        pairs = zip(one[2], other[2], strict=False)
        tensor = next((f", tensor {mine[0]}," for mine, its in pairs if list(mine) != list(its)), "")
        raise ReplicasDifferError(
            f"step {step}: {part}{tensor} differs between {one[1]} and {other[1]}: {one[0][:12]} and {other[0][:12]}. "
            f"{EITHER}, or bamboo has a bug"
        )
