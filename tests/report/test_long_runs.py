"""The tables of a long run, of whose actions only a part is read as rows, are those of the whole."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from engine.core.history import step_files
from engine.core.history.run_records import ActionRecord, UnreadLine
from engine.core.history.step_files import FOLDER
from engine.files.events_file import read_history
from engine.report.load import RunTables, load
from tests.core.made_records import made_history
from tests.report.made_up import MadeUpRun, write_run

EVENTS = MadeUpRun(steps=40, dead=((10, 2), (30, 1))).events()
TABLES = ("recovery", "steps", "workers", "history", "exposure", "takeovers", "bars", "outcome")


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two recoveries, in ranges of two steps."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_files, "_RANGE_BYTES", 20_000)
        write_run(folder, EVENTS)
    return folder


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_files, "_RANGE_BYTES", 20_000)


def same(one: RunTables, other: RunTables, tables: tuple[str, ...] = TABLES) -> None:
    for name in tables:
        pd.testing.assert_frame_equal(*(_in_order(getattr(run, name)) for run in (one, other)), obj=name)
    assert one.end_ms == other.end_ms


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    keys = [each for each in ("worker", "step", "epoch") if each in table]
    return table.sort_values(keys, kind="stable", ignore_index=True) if keys else table


def test_files_of_steps_say_what_lines_said(run: Path) -> None:
    of_lines = load(made_history(EVENTS))
    found = load(read_history(run / "events.jsonl"))
    same(of_lines, found, (*TABLES, "actions"))
    assert len(found.recovery) == 2


def test_a_part_of_the_actions_gives_the_same_tables(run: Path) -> None:
    whole = load(read_history(run / "events.jsonl", every_action=True))
    history = read_history(run / "events.jsonl")
    assert {each.step for each in history.of(ActionRecord)} == {*range(8, 14), *range(28, 34)}
    part = load(history, most_actions=3000)
    same(whole, part)
    assert 2000 < len(part.actions) <= 3000 < len(whole.actions)
    assert {10, 11, 30, 31, 0, 1, 38, 39} <= {*part.actions["step"]}
    few = load(history, most_actions=200)
    same(whole, few)
    assert len(few.actions) <= 200


def test_entries_that_cannot_be_read_cost_themselves(run: Path, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for each in (run / FOLDER).iterdir():
        data = each.read_bytes()
        (tmp_path / FOLDER / each.name).write_bytes(data[:32] + b"\0" * 32 + data[64:] + data[:7])
    (tmp_path / "events.jsonl").write_bytes((run / "events.jsonl").read_bytes())
    num_files = len(list((run / FOLDER).iterdir()))
    found = load(read_history(tmp_path / "events.jsonl"))
    assert len(found.actions) == len(load(read_history(run / "events.jsonl")).actions) - num_files
    assert found.gaps == (f"{num_files} actions could not be read",)
    assert not read_history(tmp_path / "events.jsonl").of(UnreadLine)
