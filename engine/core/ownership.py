"""Who owns what: the grid of slots that one step fills, and the worker that trains each slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a step: D x P slots, M microbatches; `ties` are groups of stages that share a parameter."""

    stages: int
    microbatches: int
    pipelines: int = 1
    ties: tuple[tuple[int, ...], ...] = ()

    def slots(self) -> tuple[tuple[int, int], ...]:
        """Returns every (pipeline, stage), pipeline by pipeline."""
        return tuple((pipeline, stage) for pipeline in range(self.pipelines) for stage in range(self.stages))

    def tied_to(self, stage: int) -> tuple[int, ...]:
        """Returns the other stages that share a parameter with `stage`, in order."""
        return tuple(sorted({other for group in self.ties if stage in group for other in group} - {stage}))


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of each slot; `owners[pipeline * stages + stage]` is a worker's number."""

    grid: Grid
    owners: tuple[int, ...]

    def owner(self, pipeline: int, stage: int) -> int:
        """Returns the worker that trains the slot."""
        return self.owners[pipeline * self.grid.stages + stage]

    def slots_of(self, worker: int) -> tuple[tuple[int, int], ...]:
        """Returns the slots that `worker` owns, in order."""
        return tuple(slot for slot, owner in zip(self.grid.slots(), self.owners, strict=True) if owner == worker)

    def workers(self) -> tuple[int, ...]:
        """Returns the workers that own something, in order; a worker's place here is its rank."""
        return tuple(sorted(set(self.owners)))


def one_slot_each(grid: Grid) -> Ownership:
    """Returns the ownership of a fresh job: worker ``pipeline * P + stage`` owns that slot."""
    return Ownership(grid, tuple(range(grid.pipelines * grid.stages)))
