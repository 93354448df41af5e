"""Two runs side by side: quantiles of each figure, the ratio of the medians, and a verdict: slower, faster or same.

Rules: B is compared with A. A figure is slower, or faster, if the ratio of the medians lies outside of `SAME` and the
95 % intervals of the medians do not overlap. With fewer than `FEWEST` values on a side there is no verdict.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from engine.core.errors import ExitCode, Problem, UserError, nearest
from engine.core.job.job import Job
from engine.report.load import RunTables
from engine.report.tables import PHASE_COLUMNS

SAME = (0.95, 1.05)
FEWEST = 5
COLUMNS = ["figure", "a_n", "b_n", "a_p50", "b_p50", "a_p95", "b_p95", "ratio", "verdict"]


def compare_figures(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Returns one row per figure that both runs have, in milliseconds; the figure that slowed down most comes first."""
    rows = [_row(name, ours[name], theirs[name]) for name in ours if name in theirs]
    return pd.DataFrame(rows, columns=COLUMNS).sort_values("ratio", ascending=False, ignore_index=True)


def different_fields(a: Job, b: Job) -> dict[str, tuple[Any, Any]]:
    """Returns the values of each field, or argument, in which two jobs differ; the name and the folder do not count."""
    return different_values(_flat(a), _flat(b))


def different_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values of two jobs that differ, but for names, folders, and the scenario that holds them."""
    names = [name for name in {**ours, **theirs} if name not in ("name", "results", "scenario")]
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def _flat(job: Job) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in asdict(job).items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def figures_of(run: RunTables) -> dict[str, np.ndarray]:
    """Returns the values of each figure of a run, in milliseconds."""
    columns = {"step": run.steps["duration_ms"].iloc[1:]}  # without the first step, which warms up
    for column in ("stall_ms", *PHASE_COLUMNS, "pause_ms"):
        columns[f"recovery: {column.removesuffix('_ms')}"] = run.recovery[column]
    lengths_ms = (run.actions["end_ns"] - run.actions["start_ns"]) / 1e6
    columns |= {f"action {op}": lengths for op, lengths in lengths_ms.groupby(run.actions["op"])}
    figures = {name: series.dropna().to_numpy(dtype="float64") for name, series in columns.items()}
    return {name: values for name, values in figures.items() if len(values)}


def _row(name: str, a: np.ndarray, b: np.ndarray) -> tuple[str | int | float, ...]:
    a50, b50 = float(np.median(a)), float(np.median(b))
    ratio = b50 / a50 if a50 else float("nan")
    p95 = float(np.quantile(a, 0.95)), float(np.quantile(b, 0.95))
    return name, len(a), len(b), a50, b50, *p95, ratio, _verdict(a, b, ratio)


def _verdict(a: np.ndarray, b: np.ndarray, ratio: float) -> str:
    if min(len(a), len(b)) < FEWEST or np.isnan(ratio):
        return "too few"
    if SAME[0] <= ratio <= SAME[1]:
        return "same"
    (a_low, a_high), (b_low, b_high) = _median_interval(a), _median_interval(b)
    if a_high < b_low:
        return "slower"
    return "faster" if b_high < a_low else "same"


def _median_interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median, by ranks of the binomial distribution."""
    ordered, half_width = np.sort(values), 0.98 * np.sqrt(len(values))
    low = max(0, int(np.floor(len(values) / 2 - half_width)))
    return float(ordered[low]), float(ordered[len(values) - 1 - low])


# Conditions on tables, such as ``recovery.stall_ms.p95 > 500``; a condition that is met fails the check of a run.
#
# Rules: a condition is a table, a column, a figure, a comparison and a number. Missing values are ignored, except that
# a time of an unfinished recovery fails the check; so does a time known only within bounds, if it may meet the
# condition. A column without values does not pass: there is nothing to measure. The figure ``count`` is 0 there. A run
# that failed, or was interrupted, fails the check anyway.

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_FIGURES: dict[str, Callable[[pd.Series], float]] = {
    "min": pd.Series.min,
    "max": pd.Series.max,
    "mean": pd.Series.mean,
    "median": pd.Series.median,
    "sum": pd.Series.sum,
    "count": pd.Series.count,
}
_FORM = "TABLE.COLUMN.FIGURE OPERATOR NUMBER, such as 'recovery.stall_ms.p95 > 500'"
_TEXT = re.compile(r"\s*(\w+)\.(\w+)\.(\w+)\s*(>=|<=|==|!=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")
_QUANTILE = re.compile(r"p(\d{1,2}|100)")
_AT_MOST = {"stall_ms": "stall_most_ms"}  # a condition is met if it may be met within the bounds
_FORMER = dict.fromkeys(("total_ms", "gap_ms", "extra_ms"), "stall_ms")  # of the recoveries
_NOT_OVER = ("not recovered", "under way")  # outcomes of recoveries


@dataclass(frozen=True, slots=True)
class FailCondition:
    """A comparison of one figure of a column with a number."""

    text: str
    table: str
    column: str
    figure: str
    comparison: str
    number: float

    def judge(self, tables: Mapping[str, pd.DataFrame]) -> tuple[ExitCode, str]:
        """Returns the exit code of the check and a sentence, such as ``steps.loss.max is 2.31, not > 3``."""
        if self.figure != "count" and self._never_over(tables[self.table]):
            return ExitCode.EXPECTATION_FAILED, f"{self.text}: a recovery did not reach the end of this time"
        if tables[self.table][self.column].isna().all() and self.figure != "count":
            return ExitCode.NOTHING_MATCHED, f"{self.text}: nothing to measure"
        least = self._value(tables[self.table][self.column])
        most = least if self.figure == "count" else self._value(tables[self.table][self._most])
        is_met = [self._holds(value) for value in (least, most)]
        shown = self._text(least) if least == most else f"at least {self._text(least)}, at most {self._text(most)}"
        relation = f"{'not' if not any(is_met) else '' if all(is_met) else 'perhaps'} {self.comparison} {self.number:g}"
        text = f"{self.table}.{self.column}.{self.figure} is {shown}, {relation.strip()}"
        return ExitCode.EXPECTATION_FAILED if any(is_met) else ExitCode.OK, text

    @property
    def _most(self) -> str:
        """The column of the upper bounds of the values."""
        return _AT_MOST.get(self.column, self.column)

    def _value(self, column: pd.Series) -> float:
        values = column.dropna().astype("float64")
        quantile = _QUANTILE.fullmatch(self.figure)
        return float(values.quantile(int(quantile[1]) / 100) if quantile else _FIGURES[self.figure](values))

    def _holds(self, value: float) -> bool:
        return _COMPARISONS[self.comparison](value, self.number)

    def _text(self, value: float) -> str:
        """Returns a figure in the unit of its column, with the digits that the comparison needs."""
        short = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        text = short if self._holds(float(short)) == self._holds(value) else f"{value:.9g}"
        return f"{text} ms" if self.column.endswith("_ms") and self.figure != "count" else text

    def _never_over(self, table: pd.DataFrame) -> bool:
        """Says whether the column is a time whose end an unfinished recovery lacks."""
        if self.table != "recovery" or not self.column.endswith("_ms"):
            return False
        return bool((table["outcome"].isin(_NOT_OVER) & table[self._most].isna()).any())


def judge_run(run: RunTables) -> tuple[ExitCode, str]:
    """Returns the exit code of the check for a run itself, and the reason; an empty reason if the run has passed."""
    judged = run.judgement
    if judged.proof.flaws:
        return ExitCode.EXPECTATION_FAILED, f"{run.name}: {judged.damage()}"
    if judged.exit_code is None:
        return ExitCode.NOTHING_MATCHED, f"{run.name} has no verdict: it is still running, or its launcher is gone"
    if judged.is_interrupted:
        return ExitCode.EXPECTATION_FAILED, f"{run.name} was interrupted"
    if judged.is_unverified:
        return ExitCode.NOTHING_MATCHED, f"{run.name}: {judged.weights()}"
    if not judged.is_red:
        return ExitCode.OK, ""
    why = judged.findings[0].text if judged.findings else run.error or judged.outcome
    return ExitCode.EXPECTATION_FAILED, f"{run.name} has failed: {why.splitlines()[0]}"


def parse_condition(text: str, tables: Mapping[str, pd.DataFrame]) -> FailCondition:
    """Returns the condition in `text`; its table, column and figure exist.

    Raises:
        UserError: `text` is no condition, or its table, column or figure is unknown.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _refusal(_FORM, text)
    table, column, figure, comparison, number = match.groups()
    if table not in tables:
        raise _refusal(f"a table: one of {', '.join(tables)}", text, nearest(table, tables))
    columns = [name for name in tables[table].columns if pd.api.types.is_numeric_dtype(tables[table][name].dtype)]
    if column not in columns:
        hint = nearest(_FORMER.get(column, column), columns)
        raise _refusal(f"a column of numbers of {table}: one of {', '.join(columns)}", text, hint)
    if figure not in _FIGURES and not _QUANTILE.fullmatch(figure):
        raise _refusal(f"a figure: one of {', '.join(_FIGURES)}, or p0 to p100", text, nearest(figure, _FIGURES))
    try:
        return FailCondition(text.strip(), table, column, figure, comparison, float(number))
    except ValueError:
        raise _refusal("a number after the operator", text) from None


def _refusal(expected: str, text: str, hint: str = "") -> UserError:
    return UserError([Problem("--fail-if", expected, repr(text), hint)])
