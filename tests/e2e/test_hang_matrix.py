"""The hang matrix with real processes: each worker that stops is put out by its deadline, and named with the cause."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.hang_cells import NUM_CELLS, found_in, slowest_of_rows, wrong
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]


def test_whoever_stops_is_put_out_by_its_deadline(launch: Callable[..., Launcher]) -> None:
    launcher = launch("matrix", "matrix-hangs", "--jobs", "2", "--limit", "60", "--keep", "--json")
    done = launcher.wait(880)
    assert done.code == 0, done.stdout + done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) == NUM_CELLS
    (runs,) = (launcher.folder / "results" / "matrices").glob("*-matrix-hangs-*/runs")
    found = [found_in(runs, cell) for cell in cells]
    assert [words for each in found if (words := wrong(each, "a played GPU"))] == []
    print(slowest_of_rows(found))
