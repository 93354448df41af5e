"""The job's argument and flags in the commands that share them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from bamboo_cli.agent import _case
from bamboo_cli.app import app as bamboo
from bamboo_cli.job_options import FLAG_FIELDS, OFF, takes_job
from engine.core.errors import UserError
from engine.core.faults.fault import At
from engine.core.faults.kill_text import kill_moment
from engine.core.job.job import Job
from engine.files.accelerators import Accelerators
from engine.files.jobs import job_file
from engine.files.jobs.job_value import FIELD_HELP
from engine.files.jobs.resolved_job import ResolvedJob
from tests.files.test_checkpoint_choice import keep

seen: list[tuple[ResolvedJob, object]] = []
app = typer.Typer()


@app.command()
@takes_job
def run(resolved: ResolvedJob, dry_run: Annotated[bool, typer.Option("--dry-run")] = False) -> None:
    """Trains."""
    seen.append((resolved, dry_run))


@app.command()
@takes_job
def show(resolved: ResolvedJob) -> None:
    """Shows."""
    seen.append((resolved, "show"))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(job_file, "accelerators", Accelerators)  # a host without a GPU
    seen.clear()


def invoke(*arguments: str) -> tuple[ResolvedJob, object]:
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    return seen.pop()


def test_hf_stands_for_a_model_and_its_arguments() -> None:
    resolved, _ = invoke(
        "run", "--hf", "org/a: b", "--hf-random", "--data", "a.txt", "--set", "model_args.attention=eager"
    )
    job = resolved.job
    assert job.model == "engine.models.hugging_face:pretrained"
    assert job.model_args == {"path": "org/a: b", "random": True, "attention": "eager"}
    assert (job.data, job.data_args["tokenizer"]) == ("engine.models.hugging_face:text", "org/a: b")
    with pytest.raises(UserError, match="--hf: expected no other model with it, found 'gpt'"):
        invoke("run", "--hf", "gpt2", "--model", "gpt")


def test_a_command_gets_the_job_and_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.yaml").write_text("stages: 2\nsteps: 3\n")
    monkeypatch.setenv("BAMBOO_SEED", "5")
    resolved, dry_run = invoke(
        "run",
        "job.yaml",
        "--steps",
        "4",
        "--dry-run",
        "--set",
        "model_args.width=8",
        "--set",
        "optimizer_args.eps=1e-3",
    )
    args: dict[str, Any] = {"model_args": {"width": 8}, "optimizer_args": {"eps": 1e-3}}
    assert resolved.job == Job(stages=2, steps=4, seed=5, elastic=True, device="cpu", **args)
    assert dry_run is True
    assert resolved.origins["steps"] == "--steps"
    assert resolved.origins["seed"] == "BAMBOO_SEED"
    assert invoke("run")[1] is False


def test_every_command_takes_the_same_job() -> None:
    resolved, own = invoke("show", "--lr-schedule", "linear")
    assert (resolved.job, own) == (Job(lr_schedule="linear", elastic=True, device="cpu"), "show")


def test_mistakes_of_flags_are_user_errors_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        invoke("show", "none.yaml", "--lr", "fast", "--stages", "0")
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == ["none.yaml", "--lr", "--stages"]


def test_problems_of_all_flags_are_told_at_once() -> None:
    """Those of the command's own flags came in a second run of the command."""
    own = "--kill 5 --kill 3:x --grace never --notice-every 1ms --notice-url ftp://host --in-process".split()
    told = ["--kill", "--kill 3:x", "--grace", "--notice-url", "--notice-every", "--notice-url"]
    more = ["--etcd", "nowhere"]
    job = ["--stages", "0", "--hang-after", "soon", "--set", "lr=fast"]
    of_job = ["lr", "stages", "hang_after"]
    also = ["--etcd"]
    assert [each.partition(" found")[0] for each in fields_of("run", *own, *more, *job)] == [*of_job, *told, *also]
    assert fields_of("run", *own, *more) == [*told, *also]
    assert fields_of("run", *own, *job, "--dry-run") == [*of_job, *told]
    assert fields_of("run", "--kill", "99:0", "--kill", "3:99", "--grace", "0") == [
        "--kill 99:0",
        "--kill 3:99",
        "--grace",
    ]
    assert fields_of("run", "--other-bits", "--stages", "0") == ["--other-bits", "stages"]
    struck = fields_of("inject", "kill-middle-stage", "--set", "stages=0", "--run", "x", "--tee")
    assert (struck[0], struck[-1]) == ("job.stages", "--tee")
    assert fields_of("inject", "--etcd", "nowhere") == ["inject", "--etcd"]


def fields_of(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(bamboo, arguments, catch_exceptions=False)
    return [each.field for each in caught.value.problems]


def test_what_is_true_has_a_flag_that_denies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_CHECK_PURE", "false")
    resolved, _ = invoke("run")
    assert (resolved.job.check_pure, resolved.origins["check_pure"]) == (False, "BAMBOO_CHECK_PURE")
    assert invoke("run", "--set", "check_pure=true")[0].job.check_pure is True
    resolved, _ = invoke("run", "--set", "check_pure=true", "--no-check-pure")
    assert (resolved.job.check_pure, resolved.origins["check_pure"]) == (False, "--no-check-pure")
    with pytest.raises(UserError, match="expected true or false, found 1"):
        invoke("run", "--set", "check_pure=1")


@pytest.mark.parametrize("name", FLAG_FIELDS)
def test_every_plain_field_is_a_flag_with_its_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    text = CliRunner().invoke(app, ["show", "--help"], catch_exceptions=False).output
    assert f"--{'no-' if name in ('check_pure', 'deterministic') else ''}{name.replace('_', '-')} " in text
    assert OFF.get(name, FIELD_HELP[name]) in text


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, bamboo_cli.job_options; "
    code += "assert not {'torch', 'pandas', 'numpy', 'pydantic', 'yaml'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--resume", ""), "--resume: expected auto, latest, a run, or a folder or URL of checkpoints, found ''"),
        (("--other-bits",), "--other-bits: expected --resume with it"),
    ],
)
def test_no_new_job_begins_where_a_checkpoint_was_meant(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        CliRunner().invoke(bamboo, ["run", "--dry-run", *arguments], catch_exceptions=False)


def test_one_line_begins_a_job_resumes_it_and_says_that_it_is_complete(tmp_path: Path) -> None:
    """`--resume latest` had no first start, and no end that a script could tell from a failure."""
    line = ["run", "--steps", "9", "--resume", "auto"]

    def said(*more: str) -> str:
        done = CliRunner().invoke(bamboo, [*line, *more], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert said("--dry-run").startswith("no run of this job yet: it begins with step 0\n")
    job = invoke("run", "--steps", "9")[0].job
    keep(tmp_path / "results", "20261123-100000-a-0000", (3,), job)
    assert said("--dry-run", "--stages", "2").startswith("resuming after step 3 of run 20261123-100000-a-0000 (")
    keep(tmp_path / "results", "20261124-100000-a-0000", (8,), job)
    complete = "complete: all 9 steps of this job are committed in run 20261124-100000-a-0000"
    assert said() == f"{complete}; there is nothing to resume\n"
    asked = CliRunner().invoke(bamboo, [*line, "--json"], catch_exceptions=False)
    place = {"run_dir": "results/20261124-100000-a-0000"}
    expected = place | {"outcome": "complete", "exit_code": 0, "error": None, "steps": 9}
    assert json.loads(asked.stdout) == expected
    called = CliRunner().invoke(bamboo, [*line, "--json", "--keywords"], input="{}\n", catch_exceptions=False)
    assert [json.loads(each) for each in called.stdout.splitlines()] == [place, expected]
    with pytest.raises(UserError, match="checkpoint_every: expected checkpoints with --resume auto, found 0"):
        CliRunner().invoke(bamboo, [*line, "--checkpoint-every", "0"], catch_exceptions=False)


def test_a_resumed_run_names_its_origin_at_the_start(tmp_path: Path) -> None:
    """Only the last line of the run named it."""
    run = "20261122-100000-a-0000"
    place = keep(tmp_path / "results", run, (3,), Job(device="cpu"))
    said = CliRunner().invoke(bamboo, ["run", "--dry-run", "--json", "--resume", "latest"], catch_exceptions=False)
    assert said.stderr.splitlines() == [f"resuming after step 3 of run {run} ({place})"]


@pytest.fixture(name="parsed")
def _parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the kills that are parsed from now on."""
    found: list[str] = []

    def moment(text: str, job: Job) -> At:
        found.append(text)
        return kill_moment(text, job)

    monkeypatch.setattr("engine.core.faults.kill_text.kill_moment", moment)
    return found


def test_kills_are_parsed_and_checked_once(parsed: list[str]) -> None:
    """Before, a run and an agent checked their kills, threw them away and made them again."""
    kills = ["--kill", "5:2", "--kill", "9:1:B:1"]
    told = CliRunner().invoke(bamboo, ["run", "--dry-run", *kills], catch_exceptions=False)
    assert (told.exit_code, parsed) == (0, ["5:2", "9:1:B:1"])
    parsed.clear()
    given = {"kill": kills[1::2], "no_twin": False, "grace": "2m", "injectable": True, "run_id": "r"}
    values = dict.fromkeys(FLAG_FIELDS) | {"job_file": None, "set": None, "trust_code": False}
    _, case = _case(values, given)
    assert ([each.id for each in case.faults], parsed) == (["5:2", "9:1:B:1"], kills[1::2])


def test_an_agent_takes_the_flags_of_a_job_and_of_a_scenario() -> None:
    given = {"kill": [], "no_twin": False, "grace": "2m", "injectable": True, "run_id": "r"}
    values = dict.fromkeys(FLAG_FIELDS) | {"job_file": None, "set": ["seed=7"], "trust_code": False}
    _, plain = _case({**values, "steps": "9", "audit": None}, given)
    assert (plain.scenario.job.steps, plain.scenario.job.seed) == (9, 7)
    _, scenario = _case({**values, "job_file": Path("kill-middle-stage"), "lr": "0.25"}, given)
    assert (scenario.scenario.job.lr, scenario.scenario.job.seed, len(scenario.faults)) == (0.25, 7, 1)


def test_a_worker_that_is_added_has_no_job_of_its_own() -> None:
    told = CliRunner().invoke(
        bamboo, ["agent", "--join", "latest", "--no-check-pure", "--load-ahead", "2", "--set", "seed=7"]
    )
    assert isinstance(told.exception, UserError)
    assert [each.field for each in told.exception.problems] == ["--load-ahead", "--no-check-pure", "--set"]


def test_wrong_kills_are_told_with_the_other_mistakes(parsed: list[str]) -> None:
    wrong = ["run", "--dry-run", "--kill", "5:99", "--kill", "5", "--grace", "soon"]
    told = CliRunner().invoke(bamboo, wrong)
    assert isinstance(told.exception, UserError)
    assert [each.field for each in told.exception.problems] == ["--kill", "--kill 5:99", "--grace"]
    assert parsed == ["5:99", "5"]


def test_a_flag_and_its_opposite_are_refused() -> None:
    assert (invoke("run", "--elastic")[0].job.elastic, invoke("run", "--no-elastic")[0].job.elastic) == (True, False)
    with pytest.raises(UserError, match="--no-elastic: expected either this or --elastic, found both"):
        invoke("run", "--elastic", "--no-elastic")
