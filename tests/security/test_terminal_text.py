"""Text from files, models, exceptions and logs on a terminal: it is shown, and steers nothing.

Before, a title, a cleared screen or a hidden word from an event, a file name or an exception reached the terminal.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bamboo_cli import app, completion
from bamboo_cli.app import main
from bamboo_cli.echo import echo
from bamboo_cli.inject import _print_case
from bamboo_cli.live import LivePicture
from bamboo_cli.matrix import _print, _write
from bamboo_cli.status_picture import StatusPicture
from bamboo_cli.tables import console, say
from engine.api.scenario_tests import ScenarioFailedError
from engine.core.checks.cell_result import CellResult
from engine.core.errors import CoordinatorUnavailableError
from engine.core.history.run_history import history_of
from engine.core.job.job import Job
from engine.core.protocol.run_status import status_of_history
from engine.core.texts import printable
from engine.files.run_folder import create_run_folder
from engine.runtime.agent.run_state import RunState, RunView, WorkerView
from engine.runtime.process.progress_board import Progress
from tests.core.made_records import records_of
from tests.report.made_up import MadeUpRun, agent, make_run

ROOT = Path(__file__).parents[2]
MARKUP = "[red]x[/red]"
# A title, a cleared screen, a colour in one character, text from right to left, an isolate, no width, markup.
EVIL = f"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200b{MARKUP}"
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # bamboo's own, where it may write styles
FIRST = {"type": "kill", "at": {"step": 1, "action": "F0", "stage": 1}, "target": {"stage": 1}}


def harmless(shown: str, *, styles: bool = False) -> str:
    """Returns a text without bamboo's own styles; fails if a character of it steers a terminal, or if it is not all."""
    text = STYLE.sub("", shown) if styles else shown
    assert [each for each in text if not each.isprintable() and each not in "\n\t"] == []
    assert MARKUP in text
    return text


@pytest.fixture(name="said", params=["plain", "coloured"])
def _said(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., str]:
    """Runs the program in an empty folder and returns its output to both streams, which is harmless."""
    for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "BAMBOO_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if request.param == "coloured":
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.chdir(tmp_path)

    def said(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["bamboo", *map(str, arguments)])
        with pytest.raises(SystemExit):
            main()
        return harmless("".join(capsys.readouterr()), styles=request.param == "coloured")

    return said


def evil_run(results: Path, *, hour: int = 1) -> str:
    """Makes a run whose events have hostile texts in every place, and returns its name."""
    events = MadeUpRun(dead=((5, 2),)).events()
    events[0] |= {"model": f"my:{EVIL}", "model_args": {EVIL: EVIL}, "name": EVIL}
    for each in events:
        if each["event"] == "epoch":
            each["reason"] = EVIL
    check = {"name": EVIL, "result": "failed", "text": EVIL}
    events[-1:] = [agent("check", 1, **check), agent("failed", 2, error=f"{EVIL}\nline 2"), events[-1]]
    events[-1] |= {"outcome": EVIL, "exit_code": 1}
    return make_run(results, events, hour=hour).name


def test_a_report(said: Callable[..., str], tmp_path: Path) -> None:
    run = evil_run(tmp_path / "results")
    said("report", run)
    said("report", run, "--table", "checks")
    said("report", run, "--table", "checks", "--format", "csv")
    said("report", run, "--table", "checks", "--format", "markdown")
    said("report", run, "--table", "checks", "--format", "html")


def test_a_status(said: Callable[..., str], tmp_path: Path) -> None:
    said("status", evil_run(tmp_path / "results"))


def test_a_comparison(said: Callable[..., str], tmp_path: Path) -> None:
    run = evil_run(tmp_path / "results")
    other = make_run(tmp_path / "results", MadeUpRun().events(), hour=3).name
    said("compare", run, other)


def test_a_list_of_runs_and_of_scenarios(said: Callable[..., str], tmp_path: Path) -> None:
    evil_run(tmp_path / "results")
    said("list", "runs")
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "own.yaml").write_text(f"about: {json.dumps(EVIL)}\n")
    (tmp_path / "scenarios" / f"{EVIL.replace('/', '|')}{MARKUP.replace('/', '')}.yaml").write_text("about: x\n")
    said("list", "scenarios")


@pytest.mark.parametrize(
    "text",
    [
        f"{json.dumps(EVIL)}: 1\n",  # the name of a field
        f"version: 1\nname: a\nabout: {json.dumps(EVIL)}\njob: {{model: {json.dumps(EVIL)}}}\nfaults: []\n",
        f"stages: 2\nmodel: {json.dumps(EVIL)}\n",
        f"stages: !{MARKUP.replace('[', '').replace(']', '')}\u202e {MARKUP}\n",  # the words of the reader of YAML
    ],
)
def test_an_error_in_a_file(said: Callable[..., str], tmp_path: Path, text: str) -> None:
    name = tmp_path / f"a{EVIL.replace('/', '|')}"
    name.mkdir()
    (name / "job.yaml").write_text(text)
    said("validate", f"{name}/job.yaml", f"{MARKUP}.yaml")


def test_the_name_of_a_folder_in_an_error_of_the_system(said: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file, not a folder")
    said("run", "--results", f"results/{EVIL}", "--steps", "1", "--stages", "1", "--model", "mlp")


def test_the_origin_of_values(said: Callable[..., str], tmp_path: Path) -> None:
    name = f"job{EVIL.replace('/', '|')}.yaml"
    (tmp_path / name).write_text(f"name: {json.dumps('x')}\nmodel_args: {{width: 8}}\nmodel: mlp\n")
    said("run", name, "--explain", "--set", f"results={EVIL}")


def test_a_mistake_in_the_command_line(said: Callable[..., str]) -> None:
    for arguments in (
        ["run", f"--redundancy=x{MARKUP}\u202e"],
        ["run", f"--{EVIL}"],
        [f"--{EVIL}"],
        ["report", "--format", EVIL],
    ):
        said(*arguments)


@pytest.mark.parametrize(
    "error",
    [
        CoordinatorUnavailableError(f"the store has ended; its last words: {EVIL}"),
        OSError(5, f"Input/output error {EVIL}", f"{EVIL}/events.jsonl"),
        RuntimeError(f"{EVIL} of a library"),
    ],
)
def test_an_error_that_ends_a_command(
    said: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def ends(name: str) -> Any:
        raise error

    monkeypatch.setattr(app, "load", ends)
    said("doctor")


def test_the_exception_of_a_model_beside_the_live_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_state = RunState(Job(stages=1, steps=9), losses=[0.5])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text(f"{EVIL}\n")
    worker = WorkerView(0, 100, ((0, 0),), EVIL, Progress(1, 0, EVIL), 9, 9)
    with LivePicture(run_state.job, tmp_path / "events.jsonl", tee=True) as picture:
        run_state.note(f"worker 0 raised RuntimeError: {EVIL}")
        picture.show(RunView(run_state, (worker,)))
        picture.close()
        drawn = picture._picture(RunView(run_state, (worker,)))
    told = harmless(capfd.readouterr().err)
    assert f"RuntimeError: {printable(EVIL)}" in told
    assert "[0] " in told
    shown = console()
    with shown.capture() as screen:
        shown.print(drawn)  # as on a terminal
    harmless(screen.get())


def test_the_status_of_a_run_that_lives(capsys: pytest.CaptureFixture[str]) -> None:
    events = MadeUpRun().events()
    found = status_of_history(EVIL, history_of(records_of(events)))
    with StatusPicture(watch=False) as picture:
        picture.show(found, live=True)
    harmless(capsys.readouterr().out)


def test_the_results_of_a_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal, in GitHub's commands and summary, and in JUnit, which CI servers print."""
    failed = CellResult(EVIL, "failed", "mismatch", EVIL, EVIL, 1.0, 1, EVIL, {"action": EVIL, "fault": EVIL})

    class Cell:
        name, labels = EVIL, failed.labels

    class Found:
        name, path, foreign = EVIL, Path(EVIL), ()

    class Run:
        folder, settings = tmp_path, (f"name={EVIL}",)

    class Planned:
        cell = Cell

    found: Any = Found
    run: Any = Run
    chosen: Any = [Planned]
    _print(found, chosen, [failed], run, None, 1, as_json=False)
    harmless(capsys.readouterr().out)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setattr("bamboo_cli.matrix._page", lambda *_: "")
    _write(found, chosen, [failed], run, tmp_path / "junit.xml", tmp_path / "page.html")
    assert harmless(capsys.readouterr().err).startswith("::error file=")
    harmless((tmp_path / "summary").read_text())
    harmless((tmp_path / "junit.xml").read_text())
    ET.fromstring((tmp_path / "junit.xml").read_text())  # noqa: S314 - it is our own


def test_the_checks_of_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    class Check:
        result, name, text = "failed", EVIL, EVIL

    class Case:
        verdict_word, checks, recoveries, folder = "failed", (Check,), (EVIL,), EVIL

    class Scenario:
        name = EVIL

    class Loaded:
        scenario = Scenario

    loaded: Any = Loaded
    case: Any = Case
    _print_case(loaded, case, as_json=False)
    harmless(capsys.readouterr().out)


def test_a_shell_is_offered_no_name_that_steers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good.yaml", "a\x1b[2J.yaml", "b\u202e.yaml", "c\n.yaml"):
        (tmp_path / name).write_text("")
    assert completion.job_files("") == ["good.yaml"]


def test_a_failure_of_the_pytest_plugin() -> None:
    harmless(str(ScenarioFailedError(EVIL)))


def test_a_line_of_events_that_cannot_be_read(said: Callable[..., str], tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "results", "mlp", datetime(2026, 1, 1, 1), "abcd")
    folder.events.write_text(f"{EVIL}\n")  # the first line: a later one would be skipped and counted
    said("report", folder.path)


def test_styles_stay_and_markup_is_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    say((f"a{EVIL}\x1b[32m[link=http://a]b[/link]", "red"))
    assert capsys.readouterr().out == f"\x1b[31ma0;owned?31m???{MARKUP}[link=http://a]b[/link]\x1b[0m\n"
    echo(f"a{EVIL}")
    assert capsys.readouterr().out == f"a?31m???{MARKUP}\n"


@pytest.mark.parametrize(
    "name", ["ESC", "CSI", "BEL", "CR", "BS", "DEL", "NEL", "line", "isolate", "mark", "BOM", "half"]
)
def test_no_character_that_steers_is_printable(name: str) -> None:
    character = {
        "ESC": "\x1b",
        "CSI": "\x9b",
        "BEL": "\x07",
        "CR": "\r",
        "BS": "\x08",
        "DEL": "\x7f",
        "NEL": "\x85",
        "line": "\u2028",
        "isolate": "\u2067",
        "mark": "\u061c",
        "BOM": "\ufeff",
        "half": "\ud800",
    }[name]
    assert printable(f"a{character}\nb\tc") in ("a?\nb\tc", "a\nb\tc")


PRINTING = {"print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write", "Console"}
# The border, the user's own program, and processes whose output is a pipe to bamboo or a log.
MAY_PRINT = (
    "bamboo/progress_lines.py",  # in the user's own program
    "bamboo_cli/echo.py",
    "bamboo_cli/tables.py",
    "engine/api/run.py",
    "engine/bench/",
    "engine/harness/matrix_lane.py",
    "engine/harness/slow_switch.py",
    "engine/observers/kubeflow.py",  # into the log of its own process
    "engine/runtime/device/torch_probe.py",
    "engine/models/user_code.py",
    "engine/runtime/worker/worker.py",
)


def printing(path: str, text: str) -> list[str]:
    """Returns the calls in a module that print beside the border to the terminal."""
    calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
    return [f"{path}:{each.lineno}" for each in calls if ast.unparse(each.func) in PRINTING]


def test_everything_is_printed_at_the_border() -> None:
    paths = [path for room in ("bamboo", "bamboo_cli", "engine") for path in sorted((ROOT / room).rglob("*.py"))]
    found = [each for path in paths for each in printing(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    assert [each for each in found if not each.startswith(MAY_PRINT)] == []


def test_the_rule_of_the_border_can_fail() -> None:
    assert printing("bamboo_cli/a.py", "import typer\ntyper.echo('x')\nprint(1)\n") == [
        "bamboo_cli/a.py:2",
        "bamboo_cli/a.py:3",
    ]
