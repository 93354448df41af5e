"""`bamboo list` and `bamboo clean`: the parts and runs by name, and the deletion of leftovers, as text and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import UserError
from engine.core.program.schedules import SCHEDULES
from engine.files.jobs.library import scenario_names
from engine.models.model_registry import DATA, MODELS
from tests.cli import test_status
from tests.cli.test_status import make_run

GONE = {"pid": 2**22 + 1}  # above the largest pid of Linux: no process has the launcher's pid
STARTED, ENDED = ([{**events[0], **GONE}, *events[1:]] for events in (test_status.STARTED, test_status.ENDED))
KINDS = ("scenarios", "matrices", "models", "data", "schedules", "optimizers", "lr-schedules", "runs")


def say(*arguments: object) -> str:
    """Returns the output of a command."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def listed(*arguments: object) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(say("list", "--json", *arguments))
    return found


@pytest.mark.parametrize(
    ("kind", "names"), [("scenarios", scenario_names()), ("models", [*MODELS]), ("schedules", [*SCHEDULES])]
)
def test_every_part_is_listed_with_a_line_about_it(kind: str, names: list[str], tmp_path: Path) -> None:
    rows = listed(kind)[kind]
    assert [row["name"] for row in rows if not row["name"].startswith("scenarios/")] == names
    assert all(10 < len(row["about"]) < 120 for row in rows)
    told = say("list", kind)
    assert all(name in told for name in names)


def test_data_are_listed_with_the_sample_that_they_yield() -> None:
    rows = listed("data")["data"]
    assert [(row["name"], row["task"]) for row in rows] == [(name, task) for name in DATA for task in DATA[name]]
    assert "digits     classify  float32 1x8x8, 10 classes" in say("list", "data")


def test_without_a_name_the_command_says_what_can_be_listed(tmp_path: Path) -> None:
    lines = say("list", "--results", tmp_path).splitlines()
    assert [line.split()[2] for line in lines] == list(KINDS)
    assert tuple(listed("--results", tmp_path)) == KINDS


def test_scenarios_of_the_user_are_listed_with_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "mine.yaml").write_text("version: 1\nname: mine\nabout: my own\nfaults: []\n")
    (tmp_path / "scenarios" / "bad.yaml").write_text("a: [\n")
    by_name = {row["name"]: row["about"] for row in listed("scenarios")["scenarios"]}
    assert by_name["scenarios/mine.yaml"] == "my own"
    assert "cannot be read" in by_name["scenarios/bad.yaml"] or by_name["scenarios/bad.yaml"] == "no scenario"


def test_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    failed = make_run(tmp_path, "mlp", ENDED)
    many_actions = [{"event": "action", "worker": 0, "epoch": 1, "step": 1, "action": "0F1"}] * 3000
    gone = make_run(tmp_path, "gpt", [STARTED[0], *many_actions, *STARTED[1:]], hour=2)
    damaged = make_run(tmp_path, "old", [], hour=3)
    (tmp_path / damaged / "events.jsonl").write_text('{"event": "job"}\n\n')
    rows = listed("runs", "--results", tmp_path)["runs"]
    assert [row["name"] for row in rows] == [damaged, gone, failed]
    assert [row["outcome"] for row in rows] == ["unknown", "launcher gone", "failed"]
    assert [(row["steps"], row["num_steps"], row["started"]) for row in rows[1:]] == [
        (2, 9, "2026-01-01 02:00:00"),
        (2, 9, "2026-01-01 01:00:00"),
    ]
    assert f"{failed}  gpt, 2x2 stages  failed" in say("list", "runs", "--results", tmp_path)


def test_a_long_verdict_pads_no_other_line_of_a_pipe(tmp_path: Path) -> None:
    """The steps and the date of every run stood behind more than 400 columns."""
    make_run(tmp_path, "mlp", ENDED)
    failed = {"event": "failed", "error": "a long reason " * 40}
    make_run(tmp_path, "mlp", [*STARTED, failed, {"event": "ended", "outcome": "failed", "exit_code": 3}], hour=2)
    titles, long, short = say("list", "runs", "--results", tmp_path).splitlines()
    assert max(map(len, (titles, short))) < 200 < len(long)


def test_a_listed_run_tells_its_verdict(tmp_path: Path) -> None:
    compared = {"event": "comparison", "compared": 8, "steps": 9, "difference": None}
    check = {"event": "check", "name": "culprit", "result": "failed"}
    ended = {"event": "ended", "outcome": "failed", "exit_code": 1}
    ends: list[list[dict[str, Any]]] = [[compared], [compared, check], [{"event": "not_compared"}], []]
    for hour, told in enumerate(ends):
        make_run(tmp_path, "mlp", [*STARTED, *told, ended], hour=hour)
    assert [row["verdict"] for row in listed("runs", "--results", tmp_path)["runs"]] == [
        "",
        "weights not compared: no twin was asked for",
        "culprit failed",
        "compared with its twin at the end, 8 of 9 steps: no difference",
    ]


def test_a_listed_run_has_the_outcome_of_its_command(tmp_path: Path) -> None:
    """A run that was interrupted in its twin, or whose validation failed, was listed as finished."""
    trained = {"event": "training_ended", "outcome": "finished", "exit_code": 0}
    failed = {"event": "failed", "error": "the validation failed"}
    not_compared = {"event": "not_compared", "why": "interrupted in the twin"}
    for hour, (told, outcome, code) in enumerate([(not_compared, "interrupted", 130), (failed, "failed", 3)]):
        ended = {"event": "ended", "outcome": outcome, "exit_code": code}
        make_run(tmp_path, "mlp", [*STARTED, trained, told, ended], hour=hour)
    assert [(row["outcome"], row["verdict"]) for row in listed("runs", "--results", tmp_path)["runs"]] == [
        ("failed", "the validation failed"),
        ("interrupted", "weights not compared: interrupted in the twin"),
    ]


def test_a_run_without_events_has_no_job_yet(tmp_path: Path) -> None:
    name = make_run(tmp_path, "mlp", [])
    (row,) = listed("runs", "--results", tmp_path)["runs"]
    assert (row["name"], row["model"], row["verdict"]) == (name, "", "nothing recorded yet")


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    assert say("list", "runs", "--results", tmp_path / "none") == f"no runs in '{tmp_path}/none'\n"


def test_clean_says_what_it_would_delete_and_deletes_that(tmp_path: Path) -> None:
    name = make_run(tmp_path, "mlp", ENDED)
    store = tmp_path / name / "logs" / "etcd"
    store.mkdir()
    (store / "wal").write_bytes(bytes(3 << 20))
    assert say("clean", "--results", tmp_path, "--dry-run").splitlines() == [
        "what                   where                               MiB",
        f"store of a killed run  {name}/logs/etcd  3.0",
        "to delete: 3.0 MiB in 1 place",
    ]
    assert store.exists()
    assert say("clean", "--results", tmp_path).endswith("deleted: 3.0 MiB in 1 place\n")
    assert not store.exists()
    assert say("clean", "--results", tmp_path) == f"nothing to delete in '{tmp_path}'\n"


def test_clean_deletes_runs_only_on_request(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "mlp", ENDED), make_run(tmp_path, "mlp", ENDED, hour=2)
    (tmp_path / old / "notes.txt").write_text("mine")
    os.utime(tmp_path / old / "events.jsonl", (1, 1))
    assert json.loads(say("clean", "--results", tmp_path, "--json"))["leftovers"] == []
    done = json.loads(say("clean", "--results", tmp_path, "--json", "--older-than", "7d"))
    (found,) = done["leftovers"]
    assert (found["what"], found["kept"]) == ("run", [str(tmp_path / old)])
    assert done["bytes"] == found["bytes"] > 0
    assert [path.name for path in (tmp_path / old).iterdir()] == ["notes.txt"]
    assert (tmp_path / new).is_dir()


def test_clean_with_keep_leaves_the_newest_runs_and_none_with_0(tmp_path: Path) -> None:
    names = [make_run(tmp_path, "mlp", ENDED, hour=hour) for hour in (1, 2, 3)]
    for keep in (2, 1, 0):
        say("clean", "--results", tmp_path, "--keep", keep)
        assert [path.name for path in sorted(tmp_path.glob("2*"))] == names[3 - keep :]


def test_a_wrong_age_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--older-than: expected an age such as 7d, 12h or 30m, found '7 days'"):
        say("clean", "--results", tmp_path, "--older-than", "7 days")
