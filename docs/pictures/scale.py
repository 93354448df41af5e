"""Draws how the pause after a death grows with the job: `python docs/pictures/scale.py FILE.csv`.

The file is one that `bamboo bench scale` has written; `scale.png` shows the phases of the pause in its timed runs. Both
axes are logarithmic, so a straight line is a power of the number of workers: its slope is the exponent.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from record import PICTURES, screenshot

PAGE = """<!doctype html><meta charset="utf-8"><div id="chart"></div><script>{program}</script>
<script>Plotly.newPlot("chart", {lines}, {layout}, {{displayModeBar: false}})</script>"""
SIZE = (860, 520)


def lines_of(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns one line of the chart for each phase, in milliseconds by number of workers."""
    workers = rows["case"].str.extract(r"^timed P=(\d+) M=\d+$")[0]
    phase = rows["metric"].str.extract(r"^(.+) ms; peer: pause$")[0]
    runs = rows.assign(workers=workers, phase=phase).dropna(subset=["workers", "phase"]).astype({"workers": int})
    return [
        {"name": name, "x": line["workers"].tolist(), "y": line["ours"].tolist(), "mode": "lines+markers"}
        for name, line in runs.groupby("phase", sort=False)
    ]


def main() -> None:
    """Draws the file that is named on the command line."""
    lines = lines_of(pd.read_csv(sys.argv[1]))
    ticks = sorted({workers for line in lines for workers in line["x"]})
    layout = {
        "title": {"text": "Pause after one SIGKILL"},
        "width": SIZE[0],
        "height": SIZE[1],
        "xaxis": {"type": "log", "title": {"text": "workers"}, "tickvals": ticks},
        "yaxis": {"type": "log", "title": {"text": "milliseconds"}, "dtick": 1},
    }
    program = files("engine.report.pages").joinpath("plotly-basic.min.js").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "scale.html")
        page.write_text(PAGE.format(program=program, lines=json.dumps(lines), layout=json.dumps(layout)))
        screenshot(page, PICTURES / "scale.png", SIZE)


if __name__ == "__main__":
    main()
