"""`bamboo report`: from made-up events, from the events of a real run, and its processor time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_cli.report import load_run, report
from engine.core.errors import NothingMatchedError, StorageError, UserError
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.run_folder import RunFolder
from engine.runtime.process.locks import folder_used
from tests.files.made_checkpoints import save
from tests.files.made_evidence import make_evidence
from tests.report.made_up import MadeUpRun, agent, make_run

APP = typer.Typer()
APP.command()(report)
ROOT = Path(__file__).resolve().parents[2]


def say(*arguments: object) -> Result:
    """Runs the command and returns its result."""
    return CliRunner().invoke(APP, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "results", MadeUpRun(dead=((5, 2),)).events())


def test_the_latest_run_is_told_and_its_page_written(folder: Path) -> None:
    said = say("--results", folder.parent)
    first, titles, row = said.stdout.splitlines()
    assert first.startswith(
        f"{folder.name}: Worker 2 was lost in step 5; worker 1 took over; training stalled for 60 ms."
    )
    assert re.split("  +", titles.strip()) == [
        *("what", "outcome", "step", "heirs", "stall ms", "detect ms", "agree ms", "fence ms", "regroup ms"),
        *("inventory ms", "plan ms", "replay ms", "pause ms", "redone actions", "rung"),
    ]
    assert row.startswith("5:2: worker 2 was killed (SIGKILL)")
    assert row.split()[-4:] == ["11", "24", "8", "shadow"]
    page = folder / "report.html"
    assert said.stderr.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_is_opened_in_the_browser_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = folder / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {folder}/opened\n")
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(browser))
    assert say(folder, "--open", "--json").exit_code == 0
    assert (folder / "opened").read_text() == f"{(folder / 'report.html').as_uri()}\n"


def test_without_a_browser_the_path_is_told_and_the_command_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    said = say(folder, "--open")
    told = "no browser can be started here; open this file in one (or set BROWSER)"
    assert (said.exit_code, said.stderr.splitlines()) == (0, [str(folder / "report.html"), told])


def test_exceptions_are_listed_under_the_headline(tmp_path: Path) -> None:
    """A report did not name the exception that a run had survived."""
    events = MadeUpRun(dead=((5, 2),)).events()
    fields = {"error": "RuntimeError: cache is corrupt", "place": "layer 2 (fc2)", "file": "mine.py", "line": 31}
    raised = [agent("raised", 51.0 + of, of=of, step=4, function="forward", **fields) for of in (1, 2)]
    folder = make_run(tmp_path / "results", [*events[:-1], *raised, events[-1]])
    said = say("--results", folder.parent)
    assert said.stdout.splitlines()[1] == (
        "  workers 1, 2 raised RuntimeError: cache is corrupt, in layer 2 (fc2) of step 4 (mine.py:31, in forward)"
    )
    assert load_run(RunFolder(folder)).raised[0].exception.place == "layer 2 (fc2)"


def test_a_run_that_goes_on_does_not_read_like_a_crash(tmp_path: Path) -> None:
    """It said that the end was not recorded, as of a run whose launcher was killed."""
    job, *_ = MadeUpRun().events()
    folder = make_run(tmp_path / "results", [job | {"pid": os.getpid()}])
    with folder_used(folder):
        assert say(folder).stdout == f"{folder.name}: This run is still going: 0 of 10 steps were committed so far.\n"
    assert "The end of this run is not recorded: 0 of 10 steps were committed." in say(folder).stdout


def test_what_takes_long_to_read_is_told_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = sum(each.stat().st_size for each in (folder / "events.jsonl", *(folder / "steps").iterdir()))
    monkeypatch.setattr("bamboo_cli.report._LONG_BYTES", num_bytes)
    assert say(folder, "--json").stderr == ""
    monkeypatch.setattr("bamboo_cli.report._LONG_BYTES", num_bytes - 1)
    assert say(folder, "--json").stderr == f"reading {folder.name}: {num_bytes / 1e6:.0f} MB of events\n"


def test_emptied_records_are_damaged_evidence_and_no_beginning(tmp_path: Path) -> None:
    """They read like a run that has just begun, with 0."""
    run = make_evidence(tmp_path / "run")
    run.events.write_text("")
    said = say(run.path)
    told = "it has no whole record, and files that follow the first one are there"
    assert said.stdout.splitlines()[0] == f"run: Damaged evidence: events.jsonl: {told}. No step is recorded."
    assert said.exit_code == 1
    for each in (run.path / "steps", run.twin.path):
        shutil.rmtree(each)
    run.trajectory.unlink()
    said = say(run.path)
    assert (said.exit_code, said.stdout.splitlines()[0]) == (0, "run: This run has recorded nothing yet.")


def test_the_headline_tells_of_damaged_checkpoints(tmp_path: Path) -> None:
    """It called the weights identical; only the exit code said that a checkpoint was damaged."""
    run = make_evidence(tmp_path / "run")
    names = [save(checkpoints_at(run.checkpoints), step) for step in (3, 7)]
    good = say(run.path, "--verify")
    assert (good.exit_code, good.stderr.splitlines()[0]) == (0, "run: 2 checkpoints read, 0 damaged")
    (part,) = (run.checkpoints / "step-00000003").glob("layer-0001.*")
    part.write_bytes(part.read_bytes()[:-1])
    (run.checkpoints / str(names[1])).write_text("{}")
    assert "Weights identical" in say(run.path).stdout
    said = say(run.path, "--verify")
    first = said.stdout.splitlines()[0]
    assert first.startswith(f"run: Damaged evidence: checkpoints/step-00000003/{part.name}: expected ")
    assert "(1 more flaw)" in first and first.endswith("Weights not verified: 2 flaws in the evidence.")
    assert said.exit_code == 1
    assert said.stderr.splitlines()[2].startswith(f"run: checkpoints/{names[1]}: its SHA-256 begins with ")
    part.unlink()
    assert "checkpoints/step-00000003/manifest" in say(run.path, "--verify").stdout.splitlines()[0]


def test_a_folder_that_is_no_run_is_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(NothingMatchedError, match=r"no run to report in '.*/empty': there is no events.jsonl"):
        say(folder / "empty")
    (folder / "events.jsonl").unlink()  # a run that has only made its folder
    with pytest.raises(NothingMatchedError, match=f"no run to report in '.*{folder.name}'"):
        say(folder.name, "--results", folder.parent)


def test_the_folder_of_a_matrix_is_told_with_its_page_and_its_runs(tmp_path: Path) -> None:
    """It said that there is no events.jsonl."""
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(NothingMatchedError) as error:
        say(tmp_path)
    assert str(error.value) == (
        f"'{tmp_path}' is the folder of a matrix: its page is {tmp_path}/report.html "
        f"(one of the runs that it kept: bamboo report RUN --results {tmp_path}/runs)"
    )


@pytest.mark.parametrize("form", ["csv", "json", "markdown", "html"])
def test_a_form_for_programs_prints_nothing_else(folder: Path, form: str) -> None:
    said = say(folder, "--table", "steps", "--format", form)
    assert said.stderr == ""
    assert not (folder / "report.html").exists()
    begins = {"csv": "run,step,epoch", "json": '[{"run":"', "markdown": "| run | step |", "html": "<table>"}
    assert said.stdout.startswith(begins[form])


def test_json_is_a_form(folder: Path) -> None:
    assert say(folder, "--json").stdout == say(folder, "--format", "json").stdout
    assert say(folder, "--json").stdout == say(folder, "--json", "--format", "json").stdout


def test_tables_pages_and_traces_go_where_they_are_told(folder: Path, tmp_path: Path) -> None:
    table, page, trace = (tmp_path / name for name in ("table.parquet", "page.html", "trace.json"))
    say(folder, "--table", "actions", "--format", "parquet", "--output", table, "--page", page, "--trace", trace)
    assert len(pd.read_parquet(table)) > 1000
    assert "<h1" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_several_runs_are_one_table(folder: Path) -> None:
    other = make_run(folder.parent, MadeUpRun(dead=((2, 0),)).events(), hour=2)
    said = say("--results", folder.parent, folder.name, "latest", "--format", "csv")
    assert [line.split(",")[0] for line in said.stdout.splitlines()] == ["run", folder.name, other.name]


def test_a_condition_that_holds_fails(folder: Path) -> None:
    passed = say(folder, "--format", "csv", "--fail-if", "recovery.stall_ms.p95 > 500")
    assert (passed.exit_code, passed.stderr) == (0, "ok: recovery.stall_ms.p95 is 59.6 ms, not > 500\n")
    conditions = ["--fail-if", "recovery.stall_ms.p95 > 500", "--fail-if", "steps.step.count == 10"]
    failed = say(folder, "--format", "csv", *conditions)
    assert failed.exit_code == 1
    assert failed.stderr.splitlines()[1] == "failed: steps.step.count is 10, == 10"


def test_a_condition_on_nothing_is_no_pass_and_one_that_holds_counts_more(folder: Path) -> None:
    calm = make_run(folder.parent, MadeUpRun().events(), hour=2)
    nothing = ["--fail-if", "recovery.stall_ms.p95 > 500"]
    found = say(calm, "--format", "csv", *nothing, "--fail-if", "steps.step.count < 1")
    assert (found.exit_code, found.stdout.count("\n")) == (5, 1)
    assert found.stderr.splitlines() == [
        "not judged: recovery.stall_ms.p95 > 500: nothing to measure",
        "ok: steps.step.count is 10, not < 1",
    ]
    assert say(calm, "--format", "csv", *nothing, "--fail-if", "steps.step.count > 1").exit_code == 1


def test_a_run_that_never_recovered_meets_a_condition_on_the_time_of_recovery(folder: Path) -> None:
    events = MadeUpRun(dead=((5, 2),)).events()
    death = next(place for place, event in enumerate(events) if event["event"] == "epoch" and event["epoch"] == 2)
    never = make_run(folder.parent, [*events[: death + 1], {**events[-1], "outcome": "x"}], hour=2)
    found = say(never, "--format", "csv", "--fail-if", "recovery.stall_ms.max > 500")
    said = "failed: recovery.stall_ms.max > 500: a recovery did not reach the end of this time\n"
    assert (found.exit_code, found.stderr) == (1, said)


OVER = ["--format", "csv", "--fail-if", "steps.step.count > 99"]


def test_conditions_do_not_pass_a_run_that_failed_or_has_no_verdict(folder: Path) -> None:
    """A run that failed its comparison passed every condition on its times."""
    *told, missing, ended = MadeUpRun(dead=((5, 2),)).events()
    text = "the weights are not those of the fault-free twin"
    checked = [
        {"event": "check", "name": "trajectory", "result": "failed", "text": text, "at_ns": ended["at_ns"]},
        {"event": "verdict", "result": "failed", "exit_code": 1, "at_ns": ended["at_ns"]},
        ended | {"outcome": "failed", "exit_code": 1},
    ]
    red = make_run(folder.parent, [*told, missing, *checked], hour=2)
    found = say(red, *OVER)
    assert found.exit_code == 1
    assert found.stderr.splitlines()[:2] == [
        f"failed: {red.name} has failed: {text}",
        "ok: steps.step.count is 10, not > 99",
    ]
    assert found.stderr.splitlines()[2].startswith(f"{red.name}: Failed: {text}. Worker 2 was lost in step 5;")
    assert say(red, "--json").stderr.startswith(f"{red.name}: Failed: {text}.")  # stdout is for the table
    open_end = make_run(folder.parent, told, hour=3)
    found = say(open_end, *OVER)
    assert (found.exit_code, found.stderr.splitlines()[0]) == (
        5,
        f"not judged: {open_end.name} has no verdict: it is still running, or its launcher is gone",
    )
    stopped = make_run(folder.parent, [*told, ended | {"outcome": "interrupted", "exit_code": 130}], hour=4)
    assert say(stopped, *OVER).exit_code == 1


def test_what_cannot_be_is_refused_before_anything_is_said(folder: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'stall_ms'"):
        say(folder, "--fail-if", "recovery.totl_ms.p95 > 500")
    assert not (folder / "report.html").exists()
    for form in ("csv", "terminal"):
        with pytest.raises(UserError, match=f"--json: expected no other --format with it, found --format {form}"):
            say(folder, "--format", form, "--json")
    with pytest.raises(UserError, match="--output FILE"):
        say(folder, "--format", "parquet")
    with pytest.raises(UserError, match="--page and --trace: expected one run, found 2 runs"):
        say(folder, folder, "--page", "page.html")
    with pytest.raises(NothingMatchedError, match="no run 'nothing'"):
        say("nothing", "--results", folder.parent)
    with pytest.raises(StorageError, match="cannot write"):
        say(folder, "--page", folder / "no" / "page.html")


def test_everything_but_the_events_can_be_deleted(folder: Path) -> None:
    say(folder)
    first = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert sorted(each.name for each in folder.iterdir()) == ["events.jsonl", "steps"]
    say(folder)
    assert (folder / "report.html").read_bytes() == first


PLAIN = """\
import json, sys
import pandas
table = pandas.DataFrame([json.loads(line) for line in open(sys.argv[1])])
print(table.groupby("event").size())
"""


def work_s(*arguments: str) -> float:
    """Returns the seconds of processor time of a program that succeeds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    pid = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment)
    _, status, used = os.wait4(pid, 0)  # of this child alone: one of another test may be reaped meanwhile
    assert os.waitstatus_to_exitcode(status) == 0
    return used.ru_utime + used.ru_stime


def test_200_000_events_take_as_much_work_as_a_plain_table_of_them(tmp_path: Path) -> None:
    """Other processes lengthen wall-clock time, and on a busy machine also processor time, of both alike."""
    events = MadeUpRun(stages=8, microbatches=16, steps=360, dead=((50, 3), (120, 5))).events()
    assert len(events) > 200_000
    folder, plain = make_run(tmp_path, events), tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(each) + "\n" for each in events[::4]))
    ours_s, theirs_s = work_s("-m", "bamboo_cli", "report", str(folder)), work_s("-c", PLAIN, str(plain))
    print(f"{len(events)} events in {ours_s:.2f} s of work; a plain table of a quarter in {theirs_s:.2f} s")
    assert ours_s < 4 * theirs_s  # that is 5 s on a quiet machine


@pytest.mark.e2e
def test_the_events_of_a_real_recovery(tmp_path: Path) -> None:
    job = "--model mlp --data synthetic --stages 3 --steps 6 --validate-every 0 --audit 0".split()
    command = [sys.executable, "-m", "bamboo_cli", "run", *job, "--kill", "3:1:B:4", "--no-twin"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "--results", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (folder,) = [each for each in tmp_path.iterdir() if each.is_dir() and not each.is_symlink()]
    for each in folder.iterdir():
        if each.name not in ("events.jsonl", "steps"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    tables = {}
    for name in ("recovery", "steps", "workers", "actions"):
        said = say("--results", tmp_path, "--table", name, "--format", "json")
        assert (said.exit_code, "run.json: it is gone" in said.stderr) == (1, True), "files that were sealed are gone"
        tables[name] = json.loads(said.stdout)
    (row,) = tables["recovery"]
    assert (row["outcome"], row["who"], row["step"], row["slots"], row["lost_steps"]) == ("recovered", "1", 3, "0.1", 0)
    assert row["what"].startswith("3:1:B:4: worker 1 was killed (SIGKILL)")
    for phase in ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay", "merged", "heal"):
        assert row[f"{phase}_ms"] >= 0, phase
    assert row["redone_actions"] > 0
    assert [each["step"] for each in tables["steps"]] == list(range(6))
    assert [each["state"] for each in tables["workers"]] == ["finished", "dead", "finished"]
    assert {each["worker"] for each in tables["actions"] if each["replayed"]} == {int(row["heirs"])}
    assert all(each["step"] == 3 for each in tables["actions"] if each["replayed"])
