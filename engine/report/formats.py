"""Tables as text, for a terminal or as CSV, JSON, Markdown or HTML, and as parquet if pyarrow is installed.

Rule: figures are rounded for a terminal, Markdown and HTML only; the other formats hold all digits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import pandas as pd

from engine.core.checks.recoveries import PHASES
from engine.core.errors import EnvironmentLacksError

DataTable = pd.DataFrame  # for annotations where pandas is not loaded


def cell_text(value: Any) -> str:
    """Returns the text of a value: floats are rounded, and a missing value is empty."""
    if pd.isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def as_text(table: pd.DataFrame, form: str) -> str:
    """Returns a table as csv, json, markdown or html."""
    return _WRITERS[form](table)


def as_parquet(table: pd.DataFrame) -> bytes:
    """Returns a table as parquet; raises EnvironmentLacksError without pyarrow."""
    if find_spec("pyarrow") is None:
        raise EnvironmentLacksError("parquet needs pyarrow: pip install 'bamboo-train[parquet]'")
    buffer = BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


# End of a column's name -> its form in a title.
_UNITS = {"_ms": " ms", "_ns": " ns", "_mib": " MiB", "_bytes": " bytes", "_p50": " p50 ms", "_p95": " p95 ms"}
_RUNS = ("a", "b")  # the two runs of a comparison


def title_of(name: str) -> str:
    """Returns the title of a column for a reader, with its unit: ``detect ms`` for ``detect_ms``."""
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            name = f"{name.removesuffix(ending)}{unit}"
            break
    name = name.removeprefix("num_").replace("_per_s", "/s").replace("_", " ")
    first, _, rest = name.partition(" ")
    return f"{first.upper() if first in _RUNS else first} {rest}".rstrip()


_TIMES = ("time", "stages")  # the tables with many kinds of time

# The columns of the recoveries that fit into a line.
_SUMMARY = [
    "run",
    "what",
    "outcome",
    "step",
    "heirs",
    "stall_ms",
    "stall_bound",
    *(f"{phase}_ms" for phase in PHASES),
    "pause_ms",
    "redone_actions",
    "rung",
]


def for_reading(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns the table of this name: recoveries in one line each, times summed over steps, without empty kinds."""
    if name == "recovery":
        return table[_SUMMARY]
    if name == "time":
        of_worker = table.groupby(["run", "worker"], as_index=False)
        sums = of_worker.sum(min_count=1).drop(columns=["step", "mfu"])
        table = of_worker.agg(steps=("step", "nunique"), mfu=("mfu", "mean")).merge(sums)
    return table.loc[:, [not each.endswith("_ms") or table[each].any() for each in table]] if name in _TIMES else table


def for_terminal(table: pd.DataFrame) -> tuple[list[str], list[bool], list[list[str]]]:
    """Returns the titles, whether each column is numeric, and the rows as texts, without empty columns."""
    shown = table.dropna(axis="columns", how="all")
    shown = shown[[name for name in shown.columns if not (shown[name] == "").all()]]
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in shown.dtypes]
    rows = [[cell_text(value) for value in row] for row in shown.itertuples(index=False, name=None)]
    return [title_of(str(name)) for name in shown.columns], numeric, rows


def _csv(table: pd.DataFrame) -> str:
    return str(table.to_csv(index=False, lineterminator="\n"))


def _json(table: pd.DataFrame) -> str:
    return str(table.to_json(orient="records", double_precision=15)) + "\n"


def _markdown(table: pd.DataFrame) -> str:
    titles, numeric, rows = for_terminal(table)
    rule = ["---:" if number else "---" for number in numeric]
    escaped = [[cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, rule, *escaped))


_HTML = """<table>
<thead><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table>
"""


def _html(table: pd.DataFrame) -> str:
    from jinja2 import Template

    titles, _, rows = for_terminal(table)
    return Template(_HTML, autoescape=True, keep_trailing_newline=True).render(titles=titles, rows=rows)


_WRITERS: dict[str, Callable[[pd.DataFrame], str]] = {"csv": _csv, "json": _json, "markdown": _markdown, "html": _html}
