"""Runs of other launchers' jobs, as made-up records: their report, conditions, comparison, list and deletion."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bamboo_cli.app import app
from engine.core.checks.external_report import (
    CommandEnded,
    EffectSeen,
    ExternalEvent,
    LauncherLine,
    RankBegan,
    RankEnded,
    StrikeMade,
)
from engine.core.checks.external_verdict import StepReport
from engine.core.errors import UserError
from engine.files.linked_lines import add_lines
from engine.files.run_folder import run_json_text

MS = 1_000_000
NAMES = ("20261128-120000-kill-rank-0001", "20261128-130000-kill-rank-0002")


def _events(back_ms: int) -> list[ExternalEvent]:
    """Returns two ranks with steps of 10 ms, of which rank 1 is killed after step 9; step 5 follows `back_ms` later."""
    began = [RankBegan(0, rank, 100 + rank) for rank in (0, 1)]
    steps = [
        StepReport(step, (step + 1) * 10 * MS + rank, rank, str(100 + rank), 1.0)
        for step in range(10)
        for rank in (0, 1)
    ]
    effect = EffectSeen(102 * MS, "first", "the process has ended")
    strike: list[ExternalEvent] = [StrikeMade(101 * MS, "first", (1,), (101,)), effect]
    line = LauncherLine(110 * MS, "<b>failed</b> local_rank: 1", 1)
    ended = [RankEnded(103 * MS, 1, 101), RankEnded(115 * MS, 0, 100)]
    again = [RankBegan(120 * MS, rank, 200 + rank) for rank in (0, 1)]
    later = [
        StepReport(step, (101 + back_ms + (step - 5) * 10) * MS + rank, rank, str(200 + rank), 1.0)
        for step in range(5, 20)
        for rank in (0, 1)
    ]
    return [*began, *steps, *strike, line, *ended, *again, *later, CommandEnded((300 + back_ms) * MS, 0)]


@pytest.fixture(name="results")
def _results(tmp_path: Path) -> Path:
    for name, back_ms in zip(NAMES, (200, 900), strict=True):
        run = tmp_path / "external" / name
        (run / "logs").mkdir(parents=True)
        for folder in ("job", "progress"):
            (run / folder).mkdir()
        (run / "job" / "state.pt").write_bytes(b"12")
        (run / "logs/command.log").touch()
        texts = []
        for event in _events(back_ms):
            fields = event._asdict() if isinstance(event, StepReport) else asdict(event)
            texts.append(json.dumps({"event": type(event).__name__, **fields}, separators=(",", ":")))
        add_lines(run / "events.jsonl", texts, os.getpid())
        job = {"name": "kill-rank", "about": "a test", "command": ["torchrun", "a.py"], "launcher": "torchrun"}
        verdict = {
            "verdict": "passed",
            "exit_code": 0,
            "checks": [{"name": "outcome", "result": "passed", "text": "ok"}],
        }
        parts = {"evidence": {"weights": {"status": "same", "text": "the same bits in 3 steps"}, "steps_lost": []}}
        facts = {"external": job | {"faults": ["kill rank 1 at step 9"]}, "started": "2026-11-28T12:00:00+00:00"}
        (run / "run.json").write_text(run_json_text(facts | {"result": verdict | parts}))
    (tmp_path / "external/latest").symlink_to(NAMES[1])
    return tmp_path


def _bamboo(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_page_shows_stall_phases_blame_and_steps_of_each_rank(results: Path) -> None:
    done = _bamboo("report", "--results", results)  # the newest one: there is no run of bamboo's own
    assert done.exit_code == 0, done.output
    assert f"{NAMES[1]}: passed" in done.output
    text = (results / "external" / NAMES[1] / "report.html").read_text()
    assert text.count("<polyline") == 4 and text.count("stroke-dasharray") == 1  # processes, strikes
    assert "&lt;b&gt;failed&lt;/b&gt; local_rank: 1" in text and "<b>failed" not in text
    assert "Weights: the same bits in 3 steps." in text and "<script" not in text


def test_tables_and_conditions(results: Path) -> None:
    words = ("report", f"external/{NAMES[0]}", "--results", results, "--json")
    (row,) = json.loads(_bamboo(*words).stdout)
    told = [row[name] for name in ("struck", "ended", "blamed", "lost_steps")]
    assert told == ["rank 1", "rank 1", "rank 1", 5]
    assert row["stall_ms"] == pytest.approx(191, abs=1) and row["notice_ms"] == pytest.approx(9, abs=1)
    (outcome,) = json.loads(_bamboo(*words, "--table", "outcome").stdout)
    assert outcome["num_steps"] == 20 and outcome["step_ms"] == 10
    assert outcome["goodput"] == pytest.approx(19 * 10 / 431, rel=0.01)
    assert len(json.loads(_bamboo(*words, "--table", "workers").stdout)) == 4
    assert _bamboo(*words, "--fail-if", "recovery.stall_ms.max > 500").exit_code == 0
    assert _bamboo(*words, "--fail-if", "recovery.stall_ms.max > 100").exit_code == 1
    refused = _bamboo(*words, "--table", "memory")
    assert isinstance(refused.exception, UserError)


def test_a_changed_line_is_told_and_is_no_pass(results: Path) -> None:
    events = results / "external" / NAMES[0] / "events.jsonl"
    events.write_text(events.read_text().replace('"step":3', '"step":4', 1))
    done = _bamboo("report", f"external/{NAMES[0]}", "--results", results)
    assert done.exit_code == 1 and "events.jsonl:" in done.output


def test_two_runs_are_compared(results: Path) -> None:
    done = json.loads(
        _bamboo("compare", *(f"external/{name}" for name in NAMES), "--results", results, "--json").stdout
    )
    assert done["different_fields"] == done["not_passed"] == {}
    figures = {row["figure"]: row["ratio"] for row in done["figures"]}
    assert figures["step"] == pytest.approx(1, rel=0.01) and figures["recovery: stall"] > 4


def test_list_and_clean_know_them(results: Path) -> None:
    rows = json.loads(_bamboo("list", "runs", "--results", results, "--json").stdout)["runs"]
    assert [(row["name"], row["outcome"], row["command"]) for row in rows] == [
        (f"external/{name}", "passed", "torchrun a.py") for name in reversed(NAMES)
    ]
    (results / "external" / NAMES[0] / "mine.txt").touch()
    (results / "external/latest").unlink()
    (results / "external/latest").symlink_to(NAMES[0])
    done = _bamboo("clean", "--keep", "1", "--results", results)
    assert done.exit_code == 0, done.output
    left = {path.name for path in (results / "external" / NAMES[0]).iterdir()}
    assert left == {"mine.txt"} and (results / "external" / NAMES[1] / "job/state.pt").exists()
