"""Faults for a running job: the requests to its launcher, the end of the wait for them, and the judgement."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_cli.inject import inject
from engine.core.action import parse_action
from engine.core.errors import BambooError, NothingMatchedError, StorageError, UserError
from engine.core.faults.fault import After, At, Fault, When, Worker
from engine.core.history.process_records import CheckRecord, RequestRecord, VerdictRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.files.run_folder import RunFolder
from engine.harness import attach
from engine.harness.attach import have_shown, pace, skipped
from engine.harness.dead_runs import live_runs
from engine.runtime.process.locks import folder_used
from tests.core.made_records import lines_of, made_history


def at(name: str, step: int, when: When = "before") -> Fault:
    return Fault(name, At(step, parse_action("1B0"), when), (Worker(1),))


def after(name: str, fault: str) -> Fault:
    return Fault(name, After(fault, "plan"), (Worker(2),))


def test_all_that_came_too_late_are_named_and_all_that_wait_for_them() -> None:
    faults = [after("d", "c"), after("c", "a"), at("a", 1, "during"), at("b", 9), after("e", "b"), at("f", 1)]
    assert [each.id for each in skipped(faults, {"a", "f"})] == ["d", "c", "a", "f"]
    assert skipped(faults, set()) == []


def event(kind: str, at_ns: int, fault: str = "") -> dict[str, Any]:
    return {"event": kind, "at_ns": at_ns} | ({"fault": fault} if fault else {})


def shown(faults: list[Fault], events: list[dict[str, Any]]) -> bool:
    return have_shown(faults, made_history(events))


SHOWN = [event("fault", 1, "a"), event("confirmed", 2, "a"), event("commit", 3), event("commit", 4)]


def test_nobody_waits_for_one_that_was_not_there_when_the_other_was_recovered_from() -> None:
    assert shown([at("a", 1)], SHOWN)
    assert not shown([at("a", 1)], SHOWN[:3])
    assert not shown([at("a", 1)], SHOWN[2:])
    assert not shown([at("a", 1), at("b", 2)], SHOWN)
    both = [at("a", 1), after("c", "a")]
    assert shown(both, SHOWN)
    assert not shown(both, [*SHOWN, event("fault", 5, "c")])
    late = Fault("d", After("a", None, delay_ns=2), (Worker(2),))
    assert not shown([at("a", 1), late], SHOWN)
    assert shown([at("a", 1), late], [*SHOWN, event("commit", 5), event("commit", 6)])


def test_the_pace_is_that_of_the_last_steps() -> None:
    slow_start = [0, 5 * 10**9]
    assert pace([*slow_start, *(6 * 10**9 + step * 10**8 for step in range(4))]) == 10
    assert pace(slow_start) == 0
    assert pace([7]) == pace([]) == 0
    assert pace([7, 7]) == 10**9  # of steps that take no time it says something, too


APP = typer.Typer()
APP.command()(inject)
SCENARIO = """
version: 1
name: mine
about: A case of the tests.
job: {stages: 3, microbatches: 1, steps: 4}
faults: [{id: first, at: {step: 1, stage: 1, action: B, microbatch: 0}, do: kill}]
expect: {trajectory: identical, leftovers: none, culprit: exact, steps_lost: 0}
"""


def of_agent(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "worker": -1, "pid": os.getpid(), "at_ns": time.monotonic_ns(), **fields}


def death(worker: int, fault: str, epoch: int, owners: list[int], step: int) -> list[dict[str, Any]]:
    """Returns the launcher's records of a fault that strikes in a step, and of the steps after it."""
    return [
        of_agent("fault", fault=fault, of=worker, do="kill", slot=None, step=step),
        of_agent("exit", of=worker, code=-9, expected=False, seen_ns=time.monotonic_ns()),
        of_agent("confirmed", fault=fault, how="exit: -9"),
        of_agent("epoch", epoch=epoch, owners=owners, members=[], verdict=[[worker, "was ended"]], reason="x"),
        of_agent("go", epoch=epoch),
        *(of_agent("commit", step=step + later) for later in range(3)),
    ]


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Iterator[RunFolder]:
    """Yields a run whose launcher is this process: worker 2 was killed in step 4, and step 6 is committed."""
    folder = RunFolder(tmp_path / "20260101-000000-mine-abcd")
    folder.path.mkdir()
    write(
        folder,
        of_agent("job", **asdict(Job(stages=3, microbatches=1, steps=10**6))),
        *(of_agent("started", of=worker, slots=[[0, worker]]) for worker in range(3)),
        of_agent("epoch", epoch=1, owners=[0, 1, 2], members=[], verdict=[], reason="all have joined"),
        of_agent("go", epoch=1),
        *(of_agent("commit", step=step) for step in range(4)),
        *death(2, "first.0000", 2, [0, 1, 1], 4),
    )
    with folder_used(folder.path):  # as a launcher does
        yield folder


def write(folder: RunFolder, *events: dict[str, Any]) -> None:
    with folder.events.open("a") as file:
        file.write(lines_of(events))


def answered(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Sequence[Fault]], list[dict[str, Any]]]) -> None:
    """Makes a launcher answer each request at once by its name and faults; the request stays in the folder."""
    ask = attach._request

    def asked(folder: RunFolder, faults: tuple[Fault, ...]) -> Path:
        path = ask(folder, faults)
        write(folder, *answer(path.name, faults))
        return path

    monkeypatch.setattr(attach, "_request", asked)


def say(run: RunFolder, *arguments: str, text: str = SCENARIO) -> Result:
    scenario = run.path.parent / "mine.yaml"
    scenario.write_text(text)
    where = ["--run", run.path.name, "--results", str(run.path.parent)]
    return CliRunner().invoke(APP, ["--scenario", str(scenario), *where, *arguments], catch_exceptions=False)


def taken(name: str, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    request = of_agent("request", request=name, faults=[each.id for each in faults])
    return [request, *death(1, faults[0].id, 3, [0, 0, 0], 10**5)]


def test_a_run_that_takes_no_faults_is_not_asked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "20260101-000000-mine-abcd")
    folder.path.mkdir()
    write(folder, of_agent("job", **asdict(Job(stages=3, microbatches=1, steps=9)), injectable=False))
    with folder_used(folder.path):
        for more in ([], ["--dry-run"]):
            with pytest.raises(UserError, match=r"a run that takes faults, found 20260101-000000-mine-abcd"):
                say(folder, *more)
    assert list(folder.path.glob("request-*")) == []


def test_latest_is_refused_while_several_runs_go_on(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a request could strike another run than the one that was meant: the newest by then."""
    answered(monkeypatch, taken)
    (run.path.parent / "latest").symlink_to(run.path.name)
    done = say(run, "--run", "latest")
    assert done.exit_code == 0
    assert f"strikes the run {run.path.name}, which has committed 7 steps\n" in done.stderr
    other = RunFolder(run.path.parent / "20260102-000000-other-abcd")
    other.path.mkdir()
    write(other, of_agent("job", **asdict(Job(stages=3, microbatches=1, steps=9))))
    assert say(run, "--run", "latest", "--dry-run").exit_code == 0  # the other one has no launcher
    with folder_used(other.path):
        assert live_runs(run.path.parent) == [run.path.name, other.path.name]
        with pytest.raises(UserError) as refusal:
            say(run, "--run", "latest")
        assert say(run, "--run", run.path.name, "--dry-run").exit_code == 0
    assert "expected the name of one run, found latest, and 2 runs go on" in str(refusal.value)
    assert f"(running now: {run.path.name}, {other.path.name})" in str(refusal.value)


def test_what_came_of_an_earlier_scenario_is_not_judged_again(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, taken)
    done = say(run, "--json")
    (case,) = json.loads(done.stdout)["runs"]
    checks = {each["name"]: (each["result"], each["text"]) for each in case["checks"]}
    assert checks["culprit"] == ("passed", "evicted: worker 1")
    assert [each["culprits"] for each in case["recoveries"]] == [[1]]
    assert (done.exit_code, case["verdict"]) == (0, "passed")
    assert "not judged: trajectory, leftovers (the job keeps running)\n" in done.stderr
    (request,) = read_history(run.events).of(RequestRecord)
    judged = read_history(run.events)
    found = {each.name: each.result for each in judged.of(CheckRecord) if each.request == request.request}
    assert found == {name: result for name, (result, _) in checks.items()}
    assert [(each.result, each.exit_code, each.request) for each in judged.of(VerdictRecord)] == [
        ("passed", 0, request.request)
    ]


def test_a_refusal_of_somebody_elses_request_is_none(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, of_agent("refused", request="request-other.json", reason="it is no good"))
    answered(monkeypatch, taken)
    assert say(run).exit_code == 0


def test_faults_that_came_too_late_are_an_invalid_case_of_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(name: str, faults: Sequence[Fault]) -> list[dict[str, Any]]:
        return [of_agent("request", request=name, faults=[faults[0].id]), of_agent("commit", step=10**5)]

    monkeypatch.setattr(attach, "pace", lambda _: 0)
    answered(monkeypatch, too_late)
    with pytest.raises(BambooError, match="these did not strike; try again"):
        say(run)
    history = read_history(run.events)
    (check,), (verdict,) = history.of(CheckRecord), history.of(VerdictRecord)
    assert (check.name, check.result, check.request) == ("faults", "invalid", verdict.request)
    assert (verdict.result, verdict.exit_code) == ("invalid", 6)


@pytest.mark.parametrize("reason", ["it is no good", ""])
def test_whoever_is_refused_or_not_heard_withdraws_the_request(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(attach, "_HEARD_WITHIN_S", 0.0)
    answered(monkeypatch, lambda name, _: [of_agent("refused", request=name, reason=reason)] if reason else [])
    with pytest.raises(BambooError, match=reason or "did not take the faults"):
        say(run)
    assert list(run.path.glob("request-*")) == []


def test_a_dry_run_says_which_steps_of_the_running_job_are_meant(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "pace", lambda _: 20)
    said = say(run, "--dry-run").stdout
    assert "kill before 1B0 of step 29;" in said  # 1 of the scenario, from 2 after the last committed one, and 20
    (fault,) = json.loads(say(run, "--dry-run", "--json").stdout)["faults"]
    assert fault["moment"]["step"] == 29
    assert list(run.path.glob("request-*")) == []


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_faults_are_checked_against_the_job_that_runs(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The scenario has no job: before, its steps and microbatches were those of the default job."""
    monkeypatch.setattr(attach, "pace", lambda _: 0)
    answered(monkeypatch, taken)
    text = SCENARIO.replace("job: {stages: 3, microbatches: 1, steps: 4}\n", "").replace(", microbatch: 0", "")
    assert "kill before 1B0 of step 508" in say(run, *more, text=text.replace("step: 1", "step: 500")).output
    with pytest.raises(UserError, match=r"mine\.yaml:5:43: faults\.0\.at\.stage: expected a stage from 0 to 2"):
        say(run, *more, text=text.replace("stage: 1", "stage: 3"))


def test_a_run_that_has_only_made_its_folder_is_waited_for(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    coming = [run.events.read_text(), ""]
    run.events.unlink()

    def sleep(_: float) -> None:  # first an empty file, then a launcher's record
        run.events.write_text(coming.pop())

    monkeypatch.setattr(time, "sleep", sleep)
    assert "kill before 1B0 of step" in say(run, "--dry-run").stdout
    assert coming == []


def test_a_run_that_does_not_begin_is_not_waited_for_for_ever(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_BEGINS_WITHIN_S", 0.2)
    run.events.unlink()
    with pytest.raises(NothingMatchedError, match=f"{run.path.name} has not begun .* or name a live run"):
        say(run)


def test_a_file_that_holds_no_events_is_named(run: RunFolder) -> None:
    run.events.write_text("garbage\n")
    with pytest.raises(StorageError, match=r"events.jsonl:1: expected one event as JSON, found 'garbage'"):
        say(run)


def test_the_process_that_has_the_pid_of_a_launcher_now_is_no_launcher(run: RunFolder, tmp_path: Path) -> None:
    """The kernel has released the lock of the folder, so no request is made."""
    gone = RunFolder(tmp_path / "20260101-000001-mine-abcd")
    gone.path.mkdir()
    write(gone, *map(json.loads, run.events.read_text().splitlines()))
    with pytest.raises(NothingMatchedError):
        say(gone)
    assert list(gone.path.glob("request-*")) == []
