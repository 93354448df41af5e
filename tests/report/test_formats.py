"""Tables as text and as parquet, the trace, and two runs compared."""

from __future__ import annotations

import json
from io import BytesIO, StringIO

import pandas as pd
import pytest

from engine.core.errors import EnvironmentLacksError
from engine.report import formats
from engine.report.compare import compare_figures, figures_of
from engine.report.load import RunTables
from engine.report.trace import trace
from tests.report.made_up import MadeUpRun, load

TABLE = pd.DataFrame({"what": ["a|b", "<b>\\"], "n": [1.23456, float("nan")], "empty": [None, None]})


@pytest.fixture(scope="module", name="run")
def _run() -> RunTables:
    return load(MadeUpRun(dead=((5, 2),)).events(), "made-up")


def test_csv_and_json_hold_every_digit(run: RunTables) -> None:
    read = pd.read_csv(StringIO(formats.as_text(run.steps, "csv")))
    pd.testing.assert_frame_equal(read, run.steps)
    rows = json.loads(formats.as_text(run.steps, "json"))
    assert [row["samples_per_s"] for row in rows] == pytest.approx(list(run.steps["samples_per_s"]), rel=1e-14)
    assert rows[0]["validation_loss"] is None


def test_markdown_and_html_are_escaped_and_leave_out_what_is_empty() -> None:
    assert formats.as_text(TABLE, "markdown").splitlines() == [
        "| what | n |",
        "| --- | ---: |",
        "| a\\|b | 1.23 |",
        "| <b>\\\\ |  |",
    ]
    assert "<td>&lt;b&gt;\\</td>" in formats.as_text(TABLE, "html")
    assert "<b>" not in formats.as_text(TABLE, "html")


def test_parquet_comes_back_as_it_was(run: RunTables) -> None:
    for name in ("recovery", "steps", "workers", "actions"):
        table = run.table(name)
        pd.testing.assert_frame_equal(pd.read_parquet(BytesIO(formats.as_parquet(table))), table, check_dtype=False)


def test_without_pyarrow_parquet_says_what_to_install(monkeypatch: pytest.MonkeyPatch, run: RunTables) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacksError, match=r"bamboo-train\[parquet\]"):
        formats.as_parquet(run.steps)


def test_a_trace_has_every_action_and_an_arrow_for_every_transfer(run: RunTables) -> None:
    found = json.loads(json.dumps(trace(run)))["traceEvents"]
    slices = [each for each in found if each["ph"] == "X" and each["cat"] != "recovery"]
    assert len(slices) == len(run.actions)
    assert [each["name"] for each in found if each.get("cat") == "recovery"][:4] == [
        "detect",
        "agree",
        "fence",
        "regroup",
    ]
    starts = {each["id"]: each for each in found if each["ph"] == "s"}
    ends = {each["id"]: each for each in found if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    received = run.actions["op"].str.startswith("RECV")
    assert len(ends) == received.sum()
    by_place = {(each["pid"], round(each["ts"], 3)): each["name"] for each in slices}
    for number, start in starts.items():
        end = ends[number]
        name = by_place[start["pid"], round(start["ts"], 3)]
        (there,) = [
            each["name"]
            for each in slices
            if each["pid"] == end["pid"] and abs(each["ts"] + each["dur"] - end["ts"]) < 1e-6
        ]
        stage, _, rest = name.partition("SEND_")
        ahead = 1 if rest.startswith("F") else -1
        assert there == f"{int(stage) + ahead}RECV_{rest}"
        assert start["ts"] <= end["ts"]


def _compared(a: RunTables, b: RunTables) -> pd.DataFrame:
    return compare_figures(figures_of(a), figures_of(b))


def test_a_run_is_the_same_as_itself(run: RunTables) -> None:
    table = _compared(run, run)
    assert set(table["verdict"]) <= {"same", "too few"}
    assert (table["ratio"].dropna() == 1).all()


def test_what_got_slower_stands_first(run: RunTables) -> None:
    slow = load([_slower(event) for event in MadeUpRun(dead=((5, 2),)).events()])
    table = _compared(run, slow)
    assert (table.iloc[0]["figure"], table.iloc[0]["verdict"]) == ("action F", "slower")
    assert table.iloc[0]["ratio"] == pytest.approx(3.0)
    back = _compared(slow, run)
    assert dict(zip(back["figure"], back["verdict"], strict=True))["action F"] == "faster"


def test_a_figure_with_few_values_on_one_side_has_no_verdict(run: RunTables) -> None:
    short = load([_slower(event) for event in MadeUpRun(steps=3).events()])
    for table in (_compared(run, short), _compared(short, run)):
        assert dict(zip(table["figure"], table["verdict"], strict=True))["step"] == "too few"


def _slower(event: dict[str, object]) -> dict[str, object]:
    """Makes a forward take three times as long by an earlier start."""
    action = str(event.get("action", ""))
    if action[1:2] != "F":
        return event
    start, end = event["start_ns"], event["end_ns"]
    assert isinstance(start, int)
    assert isinstance(end, int)
    return event | {"start_ns": start - 2 * (end - start)}
