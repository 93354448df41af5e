"""The matrix benchmark: what a real fault case takes in `bamboo matrix`, beside the same case as a command of its own.

Rule: both run the case, its checks and whatever they start; the matrix shares what it can, a warm fork server and
the twin. The goal is 20 cases per minute on two cores.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median

from engine.bench.figures.rows import Row
from engine.bench.runs import run_python
from engine.core.errors import WorkerFailedError

CASES_PER_MINUTE_GOAL = 20
_MATRIX = "matrix-smoke"
_SCENARIO = "kill-middle-stage"


def bench_matrix(folder: Path, cell: str, num_alone: int) -> list[Row]:
    """Measures the cells of the smoke matrix whose name has `cell` in it, and a scenario alone `num_alone` times.

    Raises:
        WorkerFailedError: a cell did not pass.
    """
    alone = ("inject", "--scenario", _SCENARIO, "--json")
    alone_s = [_timed(folder, *alone)[0] for _ in range(num_alone)]
    all_s, printed = _timed(folder, "matrix", _MATRIX, "--json", "--cell", cell)
    cells = json.loads(printed)["cells"]
    taken_s = all_s / len(cells)
    if any(each["result"] != "passed" for each in cells):
        raise WorkerFailedError(f"{_MATRIX}: not every cell passed")
    goal_s = 60 / CASES_PER_MINUTE_GOAL
    peer_s, warm_s = median(alone_s), median(each["seconds"] for each in cells)
    name = f"{_MATRIX}, {len(cells)} cells"
    return [
        Row(
            name,
            "s per case, beside one alone",
            taken_s,
            peer_s,
            taken_s / peer_s,
            goal_s,
            taken_s <= goal_s,
            len(cells),
        ),
        Row(name, "s in its lane, beside one alone", warm_s, peer_s, warm_s / peer_s, None, None, len(cells)),
    ]


def _timed(folder: Path, *arguments: str) -> tuple[float, str]:
    """Returns the seconds that a command took, and what it printed; its results are gone then."""
    with tempfile.TemporaryDirectory(dir=folder) as results:
        started_s = time.monotonic()
        run = run_python(folder, ["-m", "bamboo_cli", *arguments, "--results", results])
        return time.monotonic() - started_s, run.stdout
