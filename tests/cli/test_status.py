"""`bamboo status` of runs that have ended or whose store is gone, from their events."""

from __future__ import annotations

import io
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bamboo_cli.report import load_run
from bamboo_cli.status import status
from bamboo_cli.status_picture import StatusPicture
from engine.core.errors import CoordinatorUnavailableError, NothingMatchedError, StorageError, UserError
from engine.core.protocol.run_status import RunStatus, WorkerStatus
from engine.files.run_folder import RunFolder, create_run_folder
from engine.runtime.process.locks import folder_used
from tests.core.made_records import lines_of

APP = typer.Typer()
APP.command()(status)

STARTED: list[dict[str, Any]] = [
    {"event": "job", "steps": 9, "stages": 2, "pipelines": 2},
    {"event": "started", "of": 0, "child": 11, "slots": [[0, 0], [1, 0]]},
    {"event": "started", "of": 1, "child": 12, "slots": [[0, 1], [1, 1]]},
    {"event": "epoch", "epoch": 1, "reason": "every worker has joined", "owners": [0, 1, 0, 1]},
    {"event": "commit", "step": 0},
    {"event": "commit", "step": 1},
]
ENDED: list[dict[str, Any]] = [
    *STARTED,
    {"event": "exit", "of": 1, "code": -9, "expected": False},
    {"event": "failed", "error": "worker 1 was killed (SIGKILL)"},
    {"event": "ended", "outcome": "failed", "exit_code": 3},
]
# Nothing listens on port 1.
STORE = {"event": "store", "endpoints": ["127.0.0.1:1"], "run_id": "x", "private": True}


def make_run(results: Path, name: str, events: list[dict[str, Any]], hour: int = 1) -> str:
    """Makes a run folder with events and returns its name."""
    folder = create_run_folder(results, name, datetime(2026, 1, 1, hour), "abcd")
    folder.events.write_text(lines_of(events))
    return folder.path.name


def say(*arguments: object) -> str:
    """Returns the output of the command."""
    done = CliRunner().invoke(APP, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_ended_run_is_told_from_its_events(tmp_path: Path) -> None:
    name = make_run(tmp_path, "mlp", ENDED)
    assert say("--results", tmp_path).splitlines() == [
        f"{name}: failed, epoch 1, step 2 of 9, loss 0.5000 (from events)",
        "worker  state    stages   pid",
        "     0  at work  0.0 1.0   11",
        "     1  dead     0.1 1.1   12",
        "epoch 1: every worker has joined",
        "epoch 1: worker 1 was killed (SIGKILL)",
        "stages: those that a worker computes, as pipeline.stage; silent: since its last message; "
        "epoch: counts the changes of members",
    ]


def test_the_dead_name_their_heirs_and_one_pipeline_needs_no_number(tmp_path: Path) -> None:
    """Before, a slot was ``0.1`` without a word, and a worker had no step."""
    one = [{"event": "job", "steps": 9, "stages": 2}]
    one += [{"event": "started", "of": each, "child": 11 + each, "slots": [[0, each]]} for each in (0, 1)]
    one += [{"event": "action", "worker": 1, "step": 3, "action": "1F0"}]
    one += [{"event": "exit", "of": 1, "code": -9, "expected": False}]
    one += [{"event": "epoch", "epoch": number, "reason": "why", "owners": [0, 0]} for number in (1, 2)]
    make_run(tmp_path, "mlp", [*one, ENDED[-1]])
    assert say("--results", tmp_path).splitlines()[1:4] == [
        "worker  state    stages  stages before     step  last action  pid",
        "     0  at work  0 1     0                                     11",
        "     1  dead             1 (now worker 0)     3  1F0           12",
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_watching_a_terminal_redraws_and_leaves_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, every second appended one line a worker."""
    screen = _Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    worker = WorkerStatus(0, 11, "", ((0, 0),))
    with StatusPicture(watch=True) as picture:
        for step in range(5):
            picture.show(RunStatus("mine", "running", 1, step, 9, (worker,)), live=True)
    _, *redrawn = screen.getvalue().split("mine: running")
    up = "\x1b[1A\x1b[2K"
    *before, last = [(text.count(up), text.count("\n")) for text in redrawn]
    assert len(before) > 3 and all(num_up == num_lines > 2 for num_up, num_lines in before)
    assert last[0] == 0
    assert "step 5 of 9" in redrawn[-1]


def test_a_pipe_that_watches_gets_only_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusPicture(watch=True) as picture:
        for step, age in ((1, 0.1), (1, 0.7), (2, 0.1)):
            workers = (WorkerStatus(0, 11, "", ((0, 0),), heard_s_ago=age),)
            picture.show(RunStatus("mine", "running", 1, step, 9, workers), live=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mine")] == [
        f"mine: running, epoch 1, step {number} of 9" for number in (2, 3)
    ]


def test_who_cannot_leave_is_told(tmp_path: Path) -> None:
    text = "is to leave within 120 s, but no other worker can take over stage 1"
    stays = {"event": "stays", "of": 1, "text": text}
    make_run(tmp_path, "mlp", [*STARTED, stays, {"event": "ended", "outcome": "finished", "exit_code": 0}])
    lines = say("--results", tmp_path).splitlines()
    assert lines[3:-1] == [
        "     1  cannot leave  0.1 1.1   12",
        "epoch 1: every worker has joined",
        f"epoch 1: worker 1 {text}",
    ]
    make_run(tmp_path, "mlp", [STARTED[0], STORE, *STARTED[1:], stays], hour=2)
    assert lament(tmp_path, "last committed step 1")[3].split()[:2] == ["1", "gone"]


def test_json_is_one_object_and_watching_an_ended_run_ends(tmp_path: Path) -> None:
    name = make_run(tmp_path, "mlp", ENDED)
    said = json.loads(say("--json", "--watch", "--results", tmp_path))
    assert (said["run_id"], said["phase"], said["epoch"], said["committed"]) == (name, "failed", 1, 1)
    assert (said["num_steps"], said["live"]) == (9, False)
    assert [each["state"] for each in said["workers"]] == ["in", "dead"]


def test_a_run_is_named_by_the_beginning_of_its_name_and_the_latest_is_the_default(tmp_path: Path) -> None:
    early = make_run(tmp_path, "early", ENDED, hour=1)
    late = make_run(tmp_path, "late", [STARTED[0]], hour=2)
    assert say("--results", tmp_path).startswith(f"{late}: starting, epoch 0, step 0 of 9 (from events)")
    assert say(early[:13], "--results", tmp_path).startswith(f"{early}: failed, epoch 1, step 2 of 9")


def lament(results: Path, last: str) -> list[str]:
    """Returns the output about a run whose launcher is gone, up to the message with which the command fails."""
    done = CliRunner().invoke(APP, ["--watch", "--results", str(results)])
    assert isinstance(done.exception, CoordinatorUnavailableError)
    assert str(done.exception) == f"the launcher is gone and did not record the end of the run; {last}"
    return done.stdout.splitlines()


def test_a_run_that_trains_is_told_from_its_events_where_its_store_is_not_asked(tmp_path: Path) -> None:
    """A host of several names no store to the others, and its pid may be one of a namespace: its lock counts."""
    host = {
        "event": "host",
        "cpu": "x",
        "cores": 2,
        "python": "3",
        "torch": "2",
        "began": "",
        "node": "b",
        "run_id": "t",
    }
    name = make_run(tmp_path, "mlp", [STARTED[0] | {"pid": 2**22 + 1}, host, *STARTED[1:]])
    lament(tmp_path, "last committed step 1; other hosts may continue it: bamboo status --wait t --etcd HOST:PORT")
    with folder_used(tmp_path / name):
        assert say("--results", tmp_path).splitlines()[0].startswith(f"{name}: running, epoch 1, step 2 of 9")


def test_a_run_whose_store_is_gone_has_lost_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment describes an external etcd, so it is read only for a run that used one."""
    monkeypatch.setenv("BAMBOO_ETCD_CA", "no such file")
    name = make_run(
        tmp_path, "mlp", [STARTED[0], STORE, *STARTED[1:], {"event": "exit", "of": 1, "code": -9, "expected": False}]
    )
    assert lament(tmp_path, "last committed step 1")[:-1] == [
        f"{name}: launcher gone, epoch 1, step 2 of 9, loss 0.5000 (from events)",
        "worker  state  stages   pid",
        "     0  gone   0.0 1.0   11",
        "     1  dead   0.1 1.1   12",
        "epoch 1: every worker has joined",
    ]
    done = CliRunner().invoke(APP, ["--json", "--results", str(tmp_path)])
    assert (done.exit_code, json.loads(done.stdout)["phase"]) == (
        69,
        "launcher gone",
    )  # one object, no refusal beside it
    assert "the launcher is gone" in done.stderr
    make_run(tmp_path, "mlp", [STARTED[0], STORE | {"private": False}, *STARTED[1:]], hour=2)
    monkeypatch.setenv("BAMBOO_ETCD", "127.0.0.1:1")
    with pytest.raises(UserError, match="BAMBOO_ETCD_CA"):
        say("--results", tmp_path)


def test_watching_waits_for_a_run_to_start_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run makes its folder, then records its beginning, then the place of its store; then it is silent too long."""
    name = make_run(tmp_path, "mlp", [])
    folder = tmp_path / name
    events = folder / "events.jsonl"
    events.unlink()

    def say_more(event: dict[str, Any]) -> None:
        with events.open("a") as file:
            file.write(lines_of([event]))

    turns = iter([lambda: say_more(STARTED[0]), lambda: say_more(STORE), lambda: os.utime(folder, (1, 1))])
    sleep = time.sleep  # the client of the store needs it too
    monkeypatch.setattr(time, "sleep", lambda seconds: next(turns)() if seconds == 1.0 else sleep(seconds))
    assert lament(tmp_path, "no step was committed") == [
        f"{name}: starting, epoch 0, no step yet (from events)",
        f"{name}: starting, epoch 0, step 0 of 9 (from events)",
        f"{name}: launcher gone, epoch 0, step 0 of 9 (from events)",
    ]
    assert next(turns, None) is None


def test_what_cannot_be_found_or_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(NothingMatchedError, match="no run in"):
        say("--results", tmp_path)
    name = make_run(tmp_path, "mlp", STARTED)
    with pytest.raises(NothingMatchedError, match="did you mean"):
        say(name[:-1] + "f", "--results", tmp_path)
    (tmp_path / name / "events.jsonl").write_text("garbage\n")
    with pytest.raises(StorageError, match=r"events\.jsonl:1"):
        say("--results", tmp_path)


HOST = {
    "event": "host",
    "cpu": "c",
    "cores": 1,
    "python": "3",
    "torch": "2",
    "began": "",
    "node": "a",
    "run_id": "4711",
}


def test_who_waits_for_a_run_gets_its_outcome_and_its_exit_code(tmp_path: Path) -> None:
    name = make_run(tmp_path, "mlp", ENDED)
    done = CliRunner().invoke(APP, ["--wait", "--results", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (3, f"{name}: failed; exit code 3\n")
    done = CliRunner().invoke(APP, ["--wait", "--json", "--results", str(tmp_path)])
    assert (done.exit_code, json.loads(done.stdout)) == (3, {"run": name, "outcome": "failed", "exit_code": 3})


def test_a_wait_for_what_cannot_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingMatchedError, match="no run '4711' in"):
        say("--wait", "4711", "--results", tmp_path)
    with pytest.raises(UserError, match="--watch"):
        say("--wait", "--watch", "--results", tmp_path)
    gone = make_run(tmp_path, "gone", [STARTED[0] | {"pid": 1 << 22}, *STARTED[1:]])
    with pytest.raises(CoordinatorUnavailableError, match=r"did not record the end of the run$"):
        say("--wait", gone, "--results", tmp_path)
    left = make_run(tmp_path, "left", [STARTED[0], HOST, {"event": "ended", "outcome": "left", "exit_code": 0}])
    with pytest.raises(CoordinatorUnavailableError, match=r"continues without it; .* --wait 4711 --etcd"):
        say("--wait", left, "--results", tmp_path)


def test_the_folder_of_a_host_that_does_not_coordinate_tells_what_it_has_heard(tmp_path: Path) -> None:
    heard = [{"event": "heard", "of": "b", "line": line} for line in lines_of(STARTED[1:]).splitlines()]
    ended = {"event": "ended", "outcome": "finished", "exit_code": 0}
    name = make_run(tmp_path, "mlp", [STARTED[0], HOST, *heard, ended])
    told = say("--results", tmp_path).splitlines()
    assert told[0] == f"{name}: finished, epoch 1, step 2 of 9, loss 0.5000 (from events)"
    assert "these are the records of host a; host b coordinated the run, and its run folder has the report" in told
    gone = make_run(tmp_path, "gone", [STARTED[0] | {"pid": 1 << 22}, HOST, *heard])
    with pytest.raises(CoordinatorUnavailableError, match=r"last committed step 1; other hosts .* --wait 4711 --etcd"):
        say(gone, "--results", tmp_path)


def test_the_report_of_the_host_that_coordinates_names_the_records_that_it_does_not_merge(tmp_path: Path) -> None:
    run = tmp_path / make_run(tmp_path, "mlp", ENDED)
    (run / "hosts" / "b").mkdir(parents=True)
    (run / "hosts" / "b" / "events.jsonl").write_text(lines_of([STARTED[0], HOST]))
    found = load_run(RunFolder(run))
    assert found.gaps[-1:] == (f"the actions of host b are not in it; bamboo collect {run} merges them",)
