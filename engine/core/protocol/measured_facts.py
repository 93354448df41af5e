"""What is measured of stages, workers and moves, by which the policy decides on owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.ownership import Grid

BYTES_PER_S, PAUSE_S = 1e9, 0.05  # first guesses
UNIT_FORWARD, UNIT_BACKWARD = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class MeasuredFacts:
    """The known facts, per stage; empty if unknown: then each stage costs one unit forward, two backward."""

    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    speed: Mapping[int, float] = field(default_factory=dict)  # worker -> 1 as usual, 0.5 if all takes twice as long
    replica_bytes: tuple[int, ...] = ()  # of weights and optimizer state, which a move copies
    owned_bytes: tuple[int, ...] = ()  # of all that an owner holds for a slot
    memory: Mapping[int, int] = field(default_factory=dict)  # worker -> bytes for slots; an absent worker has enough
    host_of: Mapping[int, str] = field(default_factory=dict)  # worker -> host; empty: all on one
    bytes_per_s: float = BYTES_PER_S  # between two workers
    pause_s: float = PAUSE_S  # of training, for a prepared hand-over

    @property
    def in_seconds(self) -> bool:
        """Whether times are seconds, and not units."""
        return bool(self.forward_s)

    def forwards(self, grid: Grid) -> tuple[float, ...]:
        """Returns the time of one forward of each stage on a worker of usual speed."""
        return self.forward_s or (UNIT_FORWARD,) * grid.stages

    def backwards(self, grid: Grid) -> tuple[float, ...]:
        """Returns the time of one backward of each stage on a worker of usual speed."""
        return self.backward_s or (UNIT_BACKWARD,) * grid.stages

    def moved_bytes(self, stage: int) -> int:
        """Returns the bytes of a replica of a stage; 1 if unknown, so that the fewest slots move."""
        return self.replica_bytes[stage] if self.replica_bytes else 1

    def needed_bytes(self, stage: int) -> int:
        """Returns the bytes that an owner of a stage needs; 0 if unknown."""
        return self.owned_bytes[stage] if self.owned_bytes else 0

    def speed_of(self, worker: int) -> float:
        """Returns the speed of a worker; 1 if unknown."""
        return self.speed.get(worker, 1.0)
