"""The placement of a schedule: the user's choice, or by default the one that the schedule was made for."""

from __future__ import annotations

from engine.core.placement import Placement, PlacementChoice, worker_of
from engine.core.schedules.compute import ComputeLists
from engine.core.schedules.csv_text import is_text, lists_from_csv, stages_on
from engine.core.schedules.registry import SCHEDULES

_PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


def placement_of(schedule: str, choice: PlacementChoice) -> Placement:
    """Returns the placement of a schedule, given by name or as CSV."""
    if choice != "auto":
        return choice
    if is_text(schedule):
        lists = lists_from_csv(schedule)
        return next((each for each in _PLACEMENTS if stands_as(lists, each)), "loop")
    return SCHEDULES[schedule].placement


def stands_as(lists: ComputeLists, placement: Placement) -> bool:
    """Returns whether compute lists have each stage on the worker that a placement gives it."""
    stages = stages_on(lists)
    return all(worker_of(stage, len(lists), placement) == worker for stage, worker in stages.items())
