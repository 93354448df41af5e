"""The audit of a step: the hashes that replicas report, compared with each other and put into rows of the trajectory.

Rules: all replicas of a layer have the same weights and optimizer state, in every pipeline; those of the same pipeline
have the same buffers too. What has been reported twice must be equal as well.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from engine.core.errors import InvariantError
from engine.core.trajectory import Row

LayerHashes = dict[int, tuple[str, str]]  # layer -> (weights and optimizer state, buffers)


@dataclass(slots=True)
class AuditBook:
    """Collects the hashes of one step at a time; a step is whole with every layer of every pipeline."""

    num_layers: int
    num_pipelines: int
    _states: dict[int, tuple[str, str]] = field(default_factory=dict)  # layer -> hash, who said so
    _buffers: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)  # (layer, pipeline) -> the same
    _is_disputed: bool = False

    def add(self, step: int, worker: int, pipeline: int, hashes: LayerHashes) -> None:
        """Takes the hashes of some layers of a worker's replica in one pipeline.

        Raises InvariantError when they differ from those of another replica; from then on there are no more rows,
        because nobody knows who is right.
        """
        who = f"worker {worker} in pipeline {pipeline}"
        try:
            for layer, (state, buffers) in hashes.items():
                _compare(step, f"layer {layer}", self._states.setdefault(layer, (state, who)), (state, who))
                said = self._buffers.setdefault((layer, pipeline), (buffers, who))
                _compare(step, f"a buffer of layer {layer}", said, (buffers, who))
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


def _compare(step: int, what: str, one: tuple[str, str], other: tuple[str, str]) -> None:
    if one[0] != other[0]:
        raise InvariantError(
            f"step {step}: {what} differs between {one[1]} and {other[1]}: {one[0][:12]} and {other[0][:12]}"
        )


def _joined(hashes: list[str]) -> str:
    """Returns one hash for the buffers of all pipelines, which differ by right; in pipeline order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
