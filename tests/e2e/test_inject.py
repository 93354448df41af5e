"""`bamboo inject` as its users see it: verdicts, exit codes, output and kept files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.files.jobs.job_file import resolve_job
from tests.e2e.launcher import Done, Launcher
from tests.security.test_requests_bounded import places

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., Launcher]

JOB = {"model": "mlp", "stages": 3, "microbatches": 4, "steps": 6, "validate_every": 0, "check_pure": False}
KILL = {"id": "first", "at": {"step": 2, "stage": 1}, "do": "kill"}
EXPECT = {
    "outcome": "recovered",
    "trajectory": "identical",
    "steps_lost": 0,
    "samples": "exactly-once",
    "culprit": "exact",
    "leftovers": "none",
    "recovery": {"max": "10s"},
}


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes a variant of the default scenario and returns its path."""

    def scenario(*faults: dict[str, Any], expect: dict[str, Any] | None = None, **job: Any) -> str:
        path = tmp_path / "mine.yaml"
        expected = {**EXPECT, **(expect or {})}
        document = {
            "version": 1,
            "name": "mine",
            "about": "A case of the tests.",
            "job": {**JOB, **job},
            "faults": list(faults or (KILL,)),
            "expect": {name: value for name, value in expected.items() if value is not None},
        }
        path.write_text(json.dumps(document))  # which is YAML too
        return str(path)

    return scenario


Write = Callable[..., str]


def checks_of(done: Done) -> dict[str, str]:
    (run,) = json.loads(done.stdout)["runs"]
    return {each["name"]: each["result"] for each in run["checks"]}


def test_first_stages_that_heal_each_other_do_not_stand_still(launch: Launch, scenario: Write) -> None:
    """A regression: both last stages die; with few microbatches both first stages received before they sent."""
    kills = [{"at": {"step": 2, "stage": 2, "pipeline": each, "action": "B"}, "do": "kill"} for each in (0, 1)]
    launcher = launch("inject", "--scenario", scenario(*kills, pipelines=2, microbatches=2, redundancy="eager"))
    done = launcher.wait()
    assert done.code == 0, done.stderr
    assert all("SIGKILL" in each["reason"] for each in launcher.events("epoch")[1:])


def test_a_case_passes_and_leaves_a_whole_folder(launch: Launch, scenario: Write) -> None:
    launcher = launch("inject", "--scenario", scenario(), "--json")
    done = launcher.wait()
    said = json.loads(done.stdout)
    assert (done.code, said["exit_code"], said["verdict"]) == (0, 0, "passed"), done.stderr
    assert set(checks_of(done).values()) == {"passed"}
    assert checks_of(done).keys() == {"faults", *(EXPECT.keys() - {"recovery"}), "recovery.max", "precision"}
    (recovery,) = said["runs"][0]["recoveries"]
    assert said["stall_ms"]["max"] == recovery["stall_ms"]
    assert min(recovery["stall_ms"], recovery["pause_ms"]) > 0
    lines = done.stderr.splitlines()
    assert "mine: passed" in lines
    assert any(re.match("passed  trajectory +identical in 6 of 6 steps", line) for line in lines)
    folder = launcher.run_folder
    assert (folder / "scenario.yaml").read_bytes() == (launcher.folder.parent / "mine.yaml").read_bytes()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["scenario"]["seed"] == 0
    assert facts["origins"]["stages"].startswith(f"{launcher.folder.parent / 'mine.yaml'}:1:")
    assert resolve_job(folder / "run.json", {}).with_faults.endswith(
        f"--scenario {folder.resolve()}/scenario.yaml --seed 0"
    )
    assert [each["id"] for each in facts["scenario"]["faults"]] == ["first"]
    assert facts["result"]["case"]["verdict"] == "passed"
    last = launcher.events()[-1]
    assert (last["event"], last["outcome"], last["exit_code"]) == ("ended", "passed", 0)
    assert (facts["result"]["outcome"], facts["result"]["exit_code"]) == ("passed", 0)
    (again,), (twin,) = launcher.events("scenario"), launcher.events("twin")
    assert (again["scenario"], again["text"]) == ("scenario.yaml", (folder / "scenario.yaml").read_text())
    assert [step for step, _ in twin["losses"]] == [*range(6)]
    assert launcher.leftovers() == []


def test_the_library_is_reached_by_bare_names_and_a_dry_run_starts_nothing(launch: Launch) -> None:
    launcher = launch("inject", "--scenario", "kill-middle-stage", "--dry-run")
    done = launcher.wait()
    assert done.code == 0
    assert " kill before 2B" in done.stdout
    assert not (launcher.folder / "results").exists()


def test_a_dry_run_says_exactly_what_would_happen(launch: Launch, scenario: Write) -> None:
    path = scenario({"id": "any", "every": {"mtbf": "2 steps", "count": 3}, "target": {"role": "random"}, "do": "kill"})
    plans = [
        json.loads(launch("inject", "--scenario", path, *more, "--dry-run", "--json").wait().stdout) for more in SEEDS
    ]
    assert plans[0] == plans[1]
    assert plans[0]["faults"] != plans[2]["faults"]
    assert (plans[1]["seed"], plans[2]["seed"]) == (4, 5)
    for fault in plans[0]["faults"]:
        moment = fault["moment"]
        assert f"kill {moment['when']} {moment['action']} of step {moment['step']}" in fault["text"]


SEEDS = (("--seed", "4"), ("--seed", "4"), ("--seed", "5"))


def test_an_expectation_that_is_not_met_ends_with_1(launch: Launch, scenario: Write) -> None:
    done = launch(
        "inject", "--scenario", scenario(expect={"recovery": {"max": "1us"}, "trajectory": None}), "--json"
    ).wait()
    assert (done.code, json.loads(done.stdout)["verdict"]) == (1, "failed")
    assert [name for name, result in checks_of(done).items() if result != "passed"] == ["recovery.max"]


@pytest.mark.soak
def test_a_fault_that_never_strikes_is_an_invalid_case(launch: Launch, scenario: Write) -> None:
    faults = ({**KILL, "do": "noop"}, {"id": "second", "after": {"fault": "first", "phase": "plan"}, "do": "kill"})
    done = launch(
        "inject", "--scenario", scenario(*faults, expect={"recovery": None, "trajectory": None}), "--json"
    ).wait()
    assert (done.code, json.loads(done.stdout)["verdict"]) == (6, "invalid")
    assert checks_of(done)["faults"] == "invalid"
    assert "second did not strike" in done.stderr


def test_a_job_that_does_not_survive_says_so(launch: Launch, scenario: Write) -> None:
    shadow = {"at": {"step": 2, "stage": 0}, "do": "kill"}  # of stage 1, before it can hand the stage on
    done = launch("inject", "--scenario", scenario(KILL, shadow, expect={"recovery": None}), "--json").wait()
    assert (done.code, json.loads(done.stdout)["verdict"]) == (80, "failed")
    wanted = scenario(expect={"recovery": None, "outcome": "state-lost"}, redundancy="none")
    done = launch("inject", "--scenario", wanted, "--json").wait()
    assert (done.code, json.loads(done.stdout)["verdict"]) == (0, "passed"), done.stderr


def test_repeated_runs_give_quantiles_of_the_stall(launch: Launch, scenario: Write) -> None:
    launcher = launch("inject", "--scenario", scenario(), "--repeat", "2", "--json")
    done = launcher.wait()
    said = json.loads(done.stdout)
    assert (done.code, len(said["runs"])) == (0, 2)
    stalls = sorted(run["recoveries"][0]["stall_ms"] for run in said["runs"])
    assert said["stall_ms"] == {"p50": stalls[0], "p95": stalls[1], "max": stalls[1]}
    assert "2 of 2 passed; training stalled for p50 " in done.stderr
    assert done.stderr.count("running the fault-free twin") == 1
    assert launcher.leftovers() == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--scenario", "kill-middel-stage"), 5, "did you mean 'kill-middle-stage'"),
        (("--scenario", "missing.yaml"), 2, "missing.yaml"),
        (("--scenario", "kill-middle-stage", "--run", "latest"), 5, "no run in 'results' yet"),
    ],
)
def test_what_cannot_be_done_says_why(launch: Launch, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = launch("inject", *arguments, "--json").wait()
    assert (done.code, json.loads(done.stdout)["exit_code"]) == (code, code)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_running_job_is_struck_and_goes_on(launch: Launch, scenario: Write) -> None:
    job = launch(
        *("run", "--model", "timed", "--stages", "3", "--microbatches", "4", "--steps", "5000"),
        *("--set", "model_args.forward_ms=10", "--validate-every", "0", "--no-check-pure"),
    )
    job.wait_until(lambda: len(job.events("commit")) >= 2)
    results = ("--results", str(job.folder / "results"))
    done = launch("inject", "--scenario", scenario(), "--run", "latest", *results, "--json").wait()
    assert (done.code, json.loads(done.stdout)["verdict"]) == (0, "passed"), done.stderr
    assert checks_of(done).keys() == {
        *("faults", "outcome", "steps_lost", "samples", "culprit", "recovery.max", "precision")
    }
    (struck,) = job.events("fault")
    assert struck["of"] == 1
    before = next(event["step"] for event in reversed(job.events("commit")) if event["at_ns"] < struck["at_ns"])
    assert struck["step"] == before + 1
    bad = {each.name for each in places(job.run_folder)}  # requests that no launcher may take, nor end by
    job.wait_until(lambda: {event["request"] for event in job.events("refused")} == bad)
    job.process.terminate()
    assert job.wait().code == 143
    assert job.leftovers() == []
    assert list(job.run_folder.glob("request-*")) == []
    done = launch("inject", "--scenario", scenario(), "--run", "latest", *results).wait()
    assert done.code == 5
    assert "has ended" in done.stderr
