"""The audit of a step: the hashes that replicas report, compared with each other and put into rows of the trajectory.

Rules: all replicas of a layer have the same weights and optimizer state, in every pipeline; those of the same pipeline
have the same buffers too. What has been reported twice must be equal as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.core.checks.trajectory import Row
from engine.core.errors import InvariantError

Marks = Sequence[Sequence[str]]  # of each tensor its name, and a digest of all up to it
LayerHashes = Mapping[int, tuple[str, str]]  # layer -> (weights and optimizer state, buffers)
LayerMarks = Mapping[int, tuple[Marks, Marks]]  # the same
_Said = tuple[str, str, Marks]  # hash, who said so, marks


@dataclass(slots=True)
class AuditBook:
    """Collects the hashes of one step at a time; a step is whole with every layer of every pipeline."""

    num_layers: int
    num_pipelines: int
    _states: dict[int, _Said] = field(default_factory=dict)  # by layer
    _buffers: dict[tuple[int, int], _Said] = field(default_factory=dict)  # by layer and pipeline
    _is_disputed: bool = False

    def add(
        self, step: int, worker: int, pipeline: int, hashes: LayerHashes, marks: LayerMarks = MappingProxyType({})
    ) -> None:
        """Takes the hashes of some layers of a worker's replica in one pipeline, and the marks of their tensors.

        Raises InvariantError, which names the tensor as far as marks tell, when they differ from those of another
        replica; from then on there are no more rows, because nobody knows who is right.
        """
        who = f"worker {worker} in pipeline {pipeline}"
        try:
            for layer, (state, buffers) in hashes.items():
                of_state, of_buffers = marks.get(layer, ((), ()))
                said: _Said = (state, who, of_state)
                _compare(step, f"layer {layer}", self._states.setdefault(layer, said), said)
                said = (buffers, who, of_buffers)
                _compare(step, f"a buffer of layer {layer}", self._buffers.setdefault((layer, pipeline), said), said)
        except InvariantError:
            self._is_disputed = True
            raise

    def close(self, step: int, loss: float) -> list[Row]:
        """Returns the rows of `step` and begins the next; a step that was not audited, or not to the end, has none."""
        states, buffers, self._states, self._buffers = self._states, self._buffers, {}, {}
        if self._is_disputed or len(buffers) < self.num_layers * self.num_pipelines:
            return []
        rows = []
        for layer in range(self.num_layers):
            joined = _joined([buffers[layer, pipeline][0] for pipeline in range(self.num_pipelines)])
            rows.append(Row(step, layer, states[layer][0], joined, loss))
        return rows


def _compare(step: int, what: str, one: _Said, other: _Said) -> None:
    if one[0] != other[0]:
        pairs = zip(one[2], other[2], strict=False)
        tensor = next((f", tensor {mine[0]}," for mine, its in pairs if list(mine) != list(its)), "")
        raise InvariantError(
            f"step {step}: {what}{tensor} differs between {one[1]} and {other[1]}: {one[0][:12]} and {other[0][:12]}"
        )


def _joined(hashes: list[str]) -> str:
    """Returns one hash for the buffers of all pipelines, which differ by right; in pipeline order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
