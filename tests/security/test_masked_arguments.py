"""Arguments named like token, key, secret or password: workers get their values, and no file or message has them.

Before, ``data_args.token`` stood in run.json, in the events, on the page and in every replay command.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_cli.app import main
from bamboo_cli.matrix import _print, _replay
from bamboo_cli.run_result import _next_commands
from engine.api.scenario_tests import _failure
from engine.codec.records import decoded, encoded
from engine.core.checks.cell_result import CellResult
from engine.core.errors import MASK, Problem, UserError, is_secret
from engine.core.history.run_records import JobRecord
from engine.core.job.job import Job
from engine.core.job.job_rules import ANYTHING
from engine.core.messages import CaseMessage
from engine.files.jobs.job_file import resolve_job
from engine.files.jobs.job_layers import masked_setting, masked_words
from engine.files.jobs.resolved_job import ResolvedJob, explain, secret_arguments
from engine.files.jobs.scenario_file import LoadedScenario, load_scenario
from engine.harness.case import scenario_record, whole_text
from engine.harness.matrix_lane import run_cell
from engine.harness.matrix_runner import MatrixRun
from engine.report.headline import command
from engine.runtime.faults.registry import kinds
from tests.core.made_records import made
from tests.e2e.launcher import ROOT, Launcher
from tests.report.made_up import MadeUpRun, load
from tests.security.secret_data import TOKEN

SET = f"data_args.token={TOKEN}"
JOB = Job(model="mine:model", data="mine:data", data_args={"token": TOKEN, "rows": 5}, model_args={"key_dim": 8})
SCENARIO = f"""\
version: 1
name: gated
about: A job whose data needs a token.
job: {{model: mlp, stages: 2, steps: 6, data: 'mine:data', data_args: {{token: {TOKEN}}}}}
faults:
  - {{at: {{step: 1, stage: 0}}, do: kill}}
"""


@pytest.mark.parametrize(
    "name",
    """
    token hf_token TOKEN accessToken token_hf auth_token token2 key api_key apiKey APIKey apikey openai_key_2 keys
    secret client_secret secretName secrets password db_password password_file passwd passphrase pwd credential
    credentials aws_credentials auth
    """.split(),
)
def test_text_of_these_names_is_secret(name: str) -> None:
    assert is_secret(name, "x")
    assert Job(data_args={name: "x"}).masked.data_args == {name: MASK}


@pytest.mark.parametrize(
    "name", "max_tokens keyword monkey tokenizer tokens width donkey turkey hockey secretary authors keyed".split()
)
def test_text_of_other_names_is_not(name: str) -> None:
    assert not is_secret(name, "x")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("token", 1234567, True),
        ("api_key", 1.5, True),
        ("key_dim", 64, False),
        ("pad_token_id", 0, False),
        ("num_key_value_heads", 4, False),
        ("max_tokens", 128, False),
        ("token", True, False),
        ("use_token", False, False),
        ("token", "", False),
        ("token", None, False),
    ],
)
def test_numbers_of_sizes_and_switches_are_shown(name: str, value: object, expected: bool) -> None:
    assert is_secret(name, value) == expected


def test_an_event_has_the_job_without_its_secrets() -> None:
    line = encoded(replace(made("job"), job=JOB))
    assert TOKEN not in line
    record = decoded(line)
    assert isinstance(record, JobRecord)
    assert (record.job.data_args, record.job.model_args) == ({"token": MASK, "rows": 5}, {"key_dim": 8})


def test_a_job_without_secrets_is_itself() -> None:
    assert Job().masked == Job()
    assert JOB.masked != JOB
    assert JOB.data_args["token"] == TOKEN


def test_a_new_field_of_arguments_is_masked_everywhere() -> None:
    """Before, three lists named the five fields: a sixth one would have written its secrets into each run."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.security.sixth_arguments", TOKEN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert TOKEN not in told.stdout
    shown = json.loads(told.stdout)
    for name in ("record", "event", "values", "setting", "words", "command", "differences"):
        assert MASK in shown[name], name
    assert shown["to give"] == "sixth_args.api_key, sixth_args.token"
    assert "--set 'sixth_args.token=***'" in shown["command"]


def test_the_values_of_a_job_are_explained_without_secrets() -> None:
    resolved = resolve_job(None, {"BAMBOO_MODEL_ARGS__API_KEY": TOKEN}, [SET, "model=m:f", "data=m:d"])
    assert resolved.job.data_args["token"] == resolved.job.model_args["api_key"] == TOKEN
    assert TOKEN not in repr(explain(resolved))
    assert secret_arguments(resolved.job) == ["model_args.api_key", "data_args.token"]


@pytest.mark.parametrize("text", [f"[{TOKEN}]", f"'{TOKEN}", f"!{TOKEN}", f"a: {TOKEN}"])
def test_a_wrong_value_is_not_repeated(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        resolve_job(None, {}, [f"data_args.token={text}", "data_args.api_key.x=1", "data=m:d"])
    assert "data_args.token" in str(refusal.value)
    assert TOKEN not in str(refusal.value)
    assert TOKEN not in json.dumps([asdict(each) for each in refusal.value.problems])


def test_the_problem_of_an_argument_has_no_secret() -> None:
    assert Problem("data_args.token", "a number", repr(TOKEN)).found == MASK
    assert Problem("cases.0.job.data_args.api_key", "a number", repr(TOKEN)).found == MASK
    assert Problem("data_args.token", "no arguments", "'token'").found == "'token'"
    assert Problem("faults.0.key", "a field", "'x'").found == "'x'"


def test_settings_of_a_command_are_masked() -> None:
    assert masked_setting(SET) == "data_args.token=***"
    assert masked_setting("model_args.max_tokens=7") == "model_args.max_tokens=7"
    assert masked_setting("model_args.pad_token_id=0") == "model_args.pad_token_id=0"
    assert masked_setting("steps=7") == "steps=7"
    words = ["matrix", "m.yaml", "--set", SET, f"--set={SET}", "--shard", "1/2"]
    masked = ["matrix", "m.yaml", "--set", "data_args.token=***", "--set=data_args.token=***", "--shard", "1/2"]
    assert masked_words(words) == masked


TRUSTING = ANYTHING.trusting(True)


def loaded(folder: Path, text: str = SCENARIO, *settings: str) -> LoadedScenario:
    (folder / "gated.yaml").write_text(text)
    return load_scenario(str(folder / "gated.yaml"), kinds(), settings=settings, offered=TRUSTING)


def test_the_copy_and_the_record_of_a_scenario_have_no_secret(tmp_path: Path) -> None:
    found = loaded(tmp_path, SCENARIO, f"model_args.api_key={TOKEN}")
    assert found.scenario.job.data_args["token"] == TOKEN
    copy = tmp_path / "copy.yaml"
    copy.write_text(whole_text(found))
    record = scenario_record(found, copy.read_text())
    assert TOKEN not in copy.read_text() + encoded(record)
    assert "--set 'model_args.api_key=***'" in shlex.join(["--set", *record.settings])
    with pytest.raises(UserError) as refusal:
        load_scenario(str(copy), kinds(), offered=TRUSTING)
    assert "data_args.token: expected its value, which is secret and was not recorded" in str(refusal.value)
    again = load_scenario(str(copy), kinds(), settings=[SET, f"model_args.api_key={TOKEN}"], offered=TRUSTING)
    assert again.scenario.job == found.scenario.job


def test_a_scenario_without_secrets_is_copied_as_it_is(tmp_path: Path) -> None:
    text = SCENARIO.replace(f", data_args: {{token: {TOKEN}}}", "") + "# a remark\n"
    assert whole_text(loaded(tmp_path, text)) == text


def test_replay_commands_have_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MatrixRun(tmp_path, (SET, "steps=9"), 1.0)
    failed = CellResult("c", "failed", "mismatch", "t")

    class Found:
        name, path, cells, foreign = "m", tmp_path / "m.yaml", (), ()

    found: Any = Found
    told = _replay(found, "m.yaml", run, "c")
    assert told == "bamboo matrix m.yaml --cell c --set 'data_args.token=***' --set steps=9"
    assert "'data_args.token=***'" in "\n".join(_failure(failed, found, run.settings, tmp_path))
    _print(found, [], [failed], run, None, 1, as_json=False)
    events = MadeUpRun().events()
    events[0] |= {"data_args": {"token": MASK}}
    told = command(load(events))
    assert "'data_args.token=***'" in told
    assert TOKEN not in told + capsys.readouterr().out


def test_the_next_command_names_the_value_to_give() -> None:
    class Result:
        recoveries = ()

    result: Any = Result
    (_, again) = _next_commands({"run_dir": "r", "outcome": "finished"}, result, ResolvedJob(JOB, {}))
    assert again == "bamboo run r/run.json --set data_args.token=VALUE --kill 40:2"
    for cannot_be_killed in ({"audit": 0}, {"deterministic": False}, {"workers": 1}):
        job = ResolvedJob(replace(JOB, **cannot_be_killed), {})
        assert len(_next_commands({"run_dir": "r", "outcome": "finished"}, result, job)) == 1


def test_the_cell_of_a_matrix_puts_no_secret_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a lane wrote the whole scenario into the folder of the results."""
    seen: list[LoadedScenario] = []

    def refuse(cell: str, loaded: LoadedScenario, *_: object, **__: object) -> tuple[Any, ...]:
        seen.append(loaded)
        raise UserError([Problem("x", "y")])

    monkeypatch.setattr("engine.harness.matrix_lane._checked", refuse)
    monkeypatch.setattr("engine.harness.job_checks.offered", ANYTHING)
    values = {
        "version": 1,
        "name": "a",
        "about": "b",
        "job": {"model": "mlp", "optimizer_args": {}, "data_args": {"token": TOKEN}, "data": "tests.security.x:y"},
        "faults": [{"at": {"step": 1, "stage": 0}, "do": "kill"}],
    }
    task = MatrixRun(tmp_path, (), 1.0).task("c/d", values)
    server: Any = None
    run_cell(CaseMessage(task).task, server)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (found,) = seen
    assert found.scenario.job.data_args["token"] == TOKEN
    assert TOKEN not in whole_text(found)


def files_with(text: str, folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
            yield path


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_run_trains_with_the_secret_and_writes_it_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its fault-free twin has the true value; the record of the run asks for it by name."""
    run = Launcher(
        tmp_path / "launch",
        [
            *("run", "--model", "tests.e2e.user_batches:flat", "--data", "tests.security.secret_data:Gated"),
            *("--stages", "2", "--microbatches", "4", "--microbatch-size", "4", "--steps", "6", "--kill", "3:1"),
            *("--validate-every", "0", "--set", SET, "--set", "data_args.key_dim=8"),
        ],
        {"PYTHONPATH": str(ROOT)},
    )
    done = run.wait()
    assert done.code == 0, done.stderr
    assert "weights identical" in done.stdout
    record = run.run_folder / "run.json"
    assert json.loads(record.read_text())["job"]["data_args"] == {"token": MASK, "key_dim": 8}
    monkeypatch.chdir(run.folder)

    def told(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bamboo", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), "".join(capsys.readouterr())

    said = [told("report"), told("compare", "latest", "latest"), told("status"), told("list", "runs")]
    said.append(told("run", str(record), "--set", SET, "--explain", "--dry-run"))
    said.append(told("run", str(record), "--set", SET, "--explain", "--json"))
    assert [code for code, _ in said] == [0] * len(said)
    assert [text for _, text in said if TOKEN in text] == []
    assert list(files_with(TOKEN, run.folder)) == []
    code, refusal = told("run", str(record))
    assert code == 2
    assert "data_args.token: expected its value, which is secret and was not recorded" in refusal
    assert "(give it: --set data_args.token=VALUE)" in refusal
    run.kill_all()
