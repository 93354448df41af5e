"""Draws how the pause after a death grows with the job: `python docs/pictures/scale.py FILE.csv`.

The file is one that `bamboo bench scale` has written; `scale.svg` shows the phases of the pause in its timed runs. Both
axes are logarithmic, so a straight line is a power of the number of workers: its slope is the exponent.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parent / "scale.svg"
REPLAY, SUM = "replay", "pause less replay"
COLORS = {
    SUM: "#000000",
    REPLAY: "#999999",
    "detect": "#0072b2",
    "plan": "#d55e00",
    "fence": "#009e73",
    "agree": "#cc79a7",
    "regroup": "#b8860b",
    "inventory": "#56b4e9",
}
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 85, 210, 40, 55
APART = 17  # the least distance of two labels
RUN = re.compile(r"timed P=(\d+) M=(\d+)")

Lines = Mapping[str, Mapping[int, float]]  # milliseconds by number of workers, of each phase


def lines_of(rows: Iterable[Mapping[str, str]]) -> Lines:
    """Returns the milliseconds of each phase in the runs of a file."""
    lines: dict[str, dict[int, float]] = {name: {} for name in COLORS}
    for row in rows:
        name, unit, _ = row["metric"].partition(" ms; peer: pause")
        if (run := RUN.fullmatch(row["case"])) and unit and name in lines:
            lines[name][int(run[1])] = float(row["ours"])
    return {name: line for name, line in lines.items() if line}


def drawn(lines: Lines, title: str) -> str:
    """Returns the lines as a drawing."""
    workers = sorted({each for line in lines.values() for each in line})
    least, most = (select(value for line in lines.values() for value in line.values()) for select in (min, max))
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)

    def across(number: float) -> float:
        share = math.log(number / workers[0]) / math.log(workers[-1] / workers[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(ms: float) -> float:
        share = (math.log10(ms) - decades[0]) / (decades[-1] - decades[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 22, title, "start", "#000000", "bold")]
    for number in workers:
        parts += [_line([(across(number), TOP), (across(number), HEIGHT - BOTTOM)], "#e5e5e5")]
        parts += [_text(across(number), HEIGHT - BOTTOM + 18, str(number), "middle")]
    for decade in decades:
        parts += [_line([(LEFT, down(10**decade)), (WIDTH - RIGHT, down(10**decade))], "#e5e5e5")]
        parts += [_text(LEFT - 8, down(10**decade) + 4, f"{10**decade:,g} ms", "end")]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "workers", "middle")]
    for name, line in lines.items():
        points = [(across(number), down(ms)) for number, ms in sorted(line.items())]
        parts += [_line(points, COLORS[name], 3 if name == SUM else 1.8, "6 4" if name == REPLAY else "")]
    for name, place in _spread({name: down(line[max(line)]) for name, line in lines.items()}):
        last = lines[name][max(lines[name])]
        parts += [
            _text(
                WIDTH - RIGHT + 10, place + 4, f"{name}, {last:,.{0 if last >= 100 else 1}f} ms", "start", COLORS[name]
            )
        ]
    body = "\n".join(parts)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{paper}\n{body}\n</svg>\n'


def _spread(places: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yields the places of labels from top to bottom, moved down where two would overlap."""
    free = -math.inf
    for name, place in sorted(places.items(), key=lambda each: each[1]):
        free = max(place, free + APART)
        yield name, free


def _line(points: Iterable[tuple[float, float]], color: str, width: float = 1, dashes: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#333333", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main() -> None:
    """Draws the file that is named on the command line."""
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    microbatches = next(run[2] for row in rows if (run := RUN.fullmatch(row["case"])))
    PICTURE.write_text(drawn(lines_of(rows), f"Pause after one SIGKILL, {microbatches} microbatches"), encoding="utf-8")


if __name__ == "__main__":
    main()
