"""The audit of a step: the hashes that owners report, compared over pipelines and put into rows of the trajectory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from engine.core.errors import InvariantError
from engine.core.trajectory import Row

LayerHashes = dict[int, tuple[str, str]]  # layer -> (weights and optimizer state, buffers)


@dataclass(slots=True)
class AuditBook:
    """Collects the hashes of one step at a time; `num_layers` x `num_pipelines` of them make a step whole."""

    num_layers: int
    num_pipelines: int
    reported: dict[int, LayerHashes] = field(default_factory=dict)

    def add(self, pipeline: int, hashes: LayerHashes) -> None:
        """Takes the hashes of some layers of one pipeline."""
        self.reported.setdefault(pipeline, {}).update(hashes)

    def close(self, step: int, loss: float) -> list[Row]:
        """Returns the rows of `step` and begins the next; a step that was not audited, or not to the end, has none.

        Raises InvariantError when two pipelines disagree on a layer's weights or optimizer state.
        """
        reported, self.reported = self.reported, {}
        if any(len(reported.get(pipeline, ())) < self.num_layers for pipeline in range(self.num_pipelines)):
            return []
        rows = []
        for layer in range(self.num_layers):
            states = [reported[pipeline][layer][0] for pipeline in range(self.num_pipelines)]
            for pipeline, state in enumerate(states):
                if state != states[0]:
                    raise InvariantError(
                        f"step {step}: layer {layer} differs between pipelines 0 and {pipeline}: "
                        f"{states[0][:12]} and {state[:12]}"
                    )
            buffers = [reported[pipeline][layer][1] for pipeline in range(self.num_pipelines)]
            rows.append(Row(step, layer, states[0], _joined(buffers), loss))
        return rows


def _joined(hashes: list[str]) -> str:
    """Returns one hash for the buffers of all pipelines, which differ by right; in pipeline order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
