"""The hang matrix over NCCL on a GPU, and stock torch beside it: how long until a worker that stops is noticed.

They come last, and take the time that is left. Elsewhere each test is skipped with the reason. Nothing here has been
run on a GPU yet.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hang_cells import NUM_CELLS, found_in, slowest_of_rows, wrong
from tests.gpu.gpu_session import BAMBOO, ROOT, WHY, left_s, note
from tests.gpu.hardware_page import Figure
from tests.gpu.stock_pair import STOPS

ON_GPU = ("device=cuda", "backend=nccl", "share_gpu=true")
STOCK_CUT_S = 30.0
STOCK = [sys.executable, "-m", "tests.gpu.stock_pair", f"--cut={STOCK_CUT_S}"]
STOCK_TIMEOUTS_S = (0.0, 5.0)  # torch's own, and a short one that a user may set
ENDING_S = 30.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("in_time"),
]


def test_stock_torch_beside_it(figures: list[Figure]) -> None:
    """All pairs at once: most of them wait for the cut-off."""
    since_s = time.monotonic()
    pairs = {
        (stop, timeout_s): subprocess.Popen(
            [*STOCK, f"--stop={stop}", f"--timeout={timeout_s}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for stop in STOPS
        for timeout_s in STOCK_TIMEOUTS_S
    }
    for (stop, timeout_s), process in pairs.items():
        out, _ = process.communicate(timeout=min(160.0, left_s()))
        told = json.loads(out)
        noticed = told["how"] if told["noticed_s"] is None else f"after {told['noticed_s']:.1f} s: {told['how']}"
        group = f"timeout {timeout_s:g} s" if timeout_s else "torch's own timeout"
        note(figures, f"stock torch.distributed over NCCL, {stop}, {group}", f"noticed {noticed}", since_s)


def test_no_hang_outlives_its_deadline(figures: list[Figure], tmp_path: Path) -> None:
    since_s = time.monotonic()
    settings = [part for each in ON_GPU for part in ("--set", each)]
    how = ["--jobs", "2", "--limit", "60", "--keep", "--json", "--results", str(tmp_path)]
    process = subprocess.Popen(
        [*BAMBOO, "matrix", "matrix-hangs", *settings, *how], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        out, _ = process.communicate(timeout=max(1.0, left_s() - ENDING_S))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it tells the cells that have ended
        out, _ = process.communicate(timeout=ENDING_S)
    cells: list[dict[str, Any]] = json.loads(out)["cells"]
    (runs,) = (tmp_path / "matrices").glob("*-matrix-hangs-*/runs")
    found = [found_in(runs, cell) for cell in cells if cell["result"] == "passed"]
    told = f"{len(found)} of {NUM_CELLS} cells passed; from the last sign of life to the verdict, at most: "
    note(figures, "hang matrix over NCCL, 4 ranks", told + slowest_of_rows(found), since_s)
    assert [cell for cell in cells if cell["result"] != "passed"] == []
    assert [words for each in found if (words := wrong(each, "GPU 0 ("))] == []
    assert found, "no cell has ended in the time"
