"""The grid of a dry run, against drawings."""

from __future__ import annotations

import pytest

from engine.core.action import Action, Op
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program.build import build_program
from engine.core.program.dry_run import DryRun, Span, dry_run, grid_lines, marked_lines
from tests.core.drawing import program_of

DRAWINGS = {
    ("1f1b", Grid(3, 4)): """
worker 0  0F0 0F1 0F2                 0B0 -   0F3 0B1 -       0B2 -       0B3 -
worker 1      1F0 1F1         1B0 -   1F2 1B1 -   1F3 1B2 -       1B3 -
worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -
""",
    ("gpipe", Grid(2, 2)): """
worker 0  0F0 0F1             0B0 -   0B1 -
worker 1      1F0 1F1 1B0 -   1B1 -
""",
    ("1f1b", Grid(1, 2)): """
worker 0  0F0 0B0 -   0F1 0B1 -
""",
    ("gpipe", Grid(2, 1, pipelines=2)): """
worker 0  0F0                     0B0   -
worker 1        1F0   1B0   -
worker 2  0F0@1                   0B0@1 -
worker 3        1F0@1 1B0@1 -
""",
}


def lines_of(schedule: str, ownership: Ownership, width: int = 0) -> list[str]:
    """Returns the grid of a schedule with the usual costs."""
    return grid_lines(dry_run(build_program(schedule, ownership), ownership), width)


@pytest.mark.parametrize(("schedule", "grid"), DRAWINGS)
def test_grid(schedule: str, grid: Grid) -> None:
    assert "\n".join(lines_of(schedule, fresh(grid))) == DRAWINGS[schedule, grid].strip("\n")


def test_a_narrow_terminal_gets_blocks() -> None:
    lines = lines_of("gpipe", fresh(Grid(2, 2)), width=30)
    assert "\n".join(lines) == (
        "worker 0  0F0 0F1\nworker 1      1F0 1F1 1B0 -\n\nworker 0  0B0 -   0B1 -\nworker 1  1B1 -"
    )


@pytest.mark.parametrize("width", [1, 20, 40, 79])
def test_no_line_is_wider_than_asked_where_a_cell_fits(width: int) -> None:
    lines = lines_of("1f1b", fresh(Grid(4, 8)), width)
    assert max(map(len, lines)) <= max(width, len("worker 0  0F0"))
    cells = [cell for line in lines for cell in line.split()[2:] if cell != "-"]
    assert sorted(cells) == sorted(f"{s}{op}{m}" for s in range(4) for op in "FB" for m in range(8))


def test_names_of_workers_are_aligned() -> None:
    grid = Grid(2, 1)
    lines = lines_of("gpipe", Ownership(grid, (9, 10)))
    assert [line[:13] for line in lines] == ["worker 9   0F", "worker 10    "]


def test_what_is_done_for_another_slot_stands_in_brackets() -> None:
    ownership = Ownership(Grid(2, 1), (0, 1), shadows=((), (0,)))
    spans = (
        Span(0.0, 1.0, 0, Action(0, Op.F, 0)),
        Span(1.0, 2.0, 1, Action(1, Op.F, 0)),
        Span(1.0, 2.0, 0, Action(1, Op.F, 0)),
    )
    run = DryRun(spans, 2.0, 0.0, {})
    assert grid_lines(run, 0, ownership) == ["worker 0  0F0   (1F0)", "worker 1        1F0"]
    assert grid_lines(run) == ["worker 0  0F0 1F0", "worker 1      1F0"]


def test_what_breaks_a_rule_is_marked_in_its_row() -> None:
    program = program_of("0: 0F0 0F1 0B0 0B1 0STEP\n1: 1F0 1B0\n10: 2F0")
    assert marked_lines(program, {(0, 2), (1, 0)}, 80) == [
        "worker 0   0F0   0F1   >0B0< 0B1   0STEP",
        "worker 1   >1F0< 1B0",
        "worker 10  2F0",
    ]
    assert marked_lines(program, {(0, 4)}, 32) == ["worker 0   0F1     0B0", "worker 1   1B0", "worker 10"]
