"""Names and arguments of built-in models, data and optimizers are checked before a run starts, at their places."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import ExitCode, UserError
from engine.core.job.job import Job
from engine.core.program.schedules import SCHEDULES
from engine.files.jobs.job_file import resolve_job
from engine.files.jobs.matrix_file import read_matrix
from engine.files.jobs.scenario_file import load_document
from engine.files.strict_yaml import read_text
from engine.harness.job_checks import offered
from engine.models.arguments import argument_problems
from engine.models.model_registry import DATA, MODELS, Builtin
from engine.runtime.faults.registry import kinds

ROOT = Path(__file__).parents[2]
BAMBOO = [sys.executable, "-m", "bamboo_cli"]
FACTORIES = [entry.factory for entry in MODELS.values()] + [each for tasks in DATA.values() for each in tasks.values()]
WRONG = """\
model_args:
  widht: 3
  depth: 0
data_args: {seqence: 4}
optimizer_args: {weight_deacy: 1}
steps: -2
"""
SCENARIO = "version: 1\nname: x\nabout: z\nfaults:\n  - {at: {step: 1, stage: 1}, do: kill}\n"
TOLD = [
    "2:10: model_args.widht: expected one of depth, dropout, fused, heads, tied, width, found 'widht' "
    "(did you mean 'width'?)",
    "3:10: model_args.depth: expected a whole number >= 1, found 0",
    "4:22: data_args.seqence: expected one of sequence, found 'seqence' (did you mean 'sequence'?)",
    "5:32: optimizer_args.weight_deacy: expected one of beta1, beta2, eps, weight_decay, found 'weight_deacy' "
    "(did you mean 'weight_decay'?)",
    "6:8: steps: expected a whole number >= 1, found -2",
]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def problems(text: str) -> list[str]:
    Path("job.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        resolve_job(Path("job.yaml"), {}, offered=offered)
    return [str(each).removeprefix("job.yaml:") for each in caught.value.problems]


def test_all_that_is_wrong_comes_at_once_each_at_its_place() -> None:
    assert problems(WRONG) == TOLD


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: gtp", ["1:8: model: expected one of alexnet, bert, gpt, gpt-100m, gpt-1b, mlp, "]),
        ("data: syntetic", ["1:7: data: expected one of auto, digits, synthetic, text, a file, a folder, or "]),
        ("model: resnet18\ndata: text", ["2:7: data: expected data that resnet18 can learn, such as digits, "]),
        ("model: resnet18\nmicrobatch_size: 1", ["2:18: microbatch_size: expected a whole number >= 2 for batch norm"]),
        ("model_args: {width: 7}", ["1:21: model_args.width: expected a multiple of heads 4, found 7"]),
        ("model_args:\n  heads: 3", ["2:10: model_args.heads: expected a divisor of width 128, found 3"]),
        ("stages: 7", ["1:9: stages: expected at most 6, the layers of the model, found 7"]),
        (
            "model: alexnet\npartition: '3,5,8'",
            ["2:12: partition: expected 3 rising layer numbers from 1 to 7, found "],
        ),
        ("model_args: {depth: 8191}", ["1:21: model_args.depth: expected a whole number <= 8190, found 8191"]),
        ("model_args: {depth: x}\nstages: 7", ["1:21: model_args.depth: expected a whole number >= 1"]),
        ("partition: '3,2,8'", ["1:12: partition: expected 3 rising layer numbers from 1, found '3,2,8'"]),
        ("model: json:own\ndata_args: {featurs: 3}", ["2:22: data_args.featurs: expected one of features, outputs, "]),
        ("model: gtp\ndata: digits\ndata_args: {x: 1}", ["1:8: model: "]),  # who learns from it is not known
        (
            "optimizer: sdg\noptimizer_args: {momentum: 0.9}",
            ["1:12: optimizer: expected one of adadelta, adafactor, adagrad, adam, adamax, adamw, "],
        ),
    ],
)
def test_a_wrong_name_is_told(text: str, told: list[str]) -> None:
    found = problems(text)
    assert len(found) == len(told)
    assert all(each.startswith(start) for each, start in zip(found, told, strict=True)), found


@pytest.mark.parametrize(
    "job",
    [
        Job(model="json:own", model_args={"x": 1}),
        Job(model="json:own", stages=100),
        Job(model_args={"depth": 8190}),
        Job(stages=6),
        Job(data="json:own", data_args={"x": 1}),
        Job(data="not/here.txt", data_args={"sequence": 8}),
        Job(model="mlp", data_args={"features": 8}),
        Job(model="mlp", data="digits", data_args={"size": 8}, optimizer="sgd", optimizer_args={"momentum": 0.9}),
    ],
)
def test_what_cannot_be_known_yet_and_what_is_good_pass(job: Job) -> None:
    assert not offered.problems(job)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda each: each.name)
def test_the_source_says_what_the_signature_says(factory: Builtin) -> None:
    found = getattr(importlib.import_module(f"engine.models.{factory.module}"), factory.name)
    parameters = inspect.signature(found).parameters.values()
    names = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    (problem,) = factory.problems("args", {"zzz": 1})
    assert problem.expected == (f"one of {', '.join(sorted(names))}" if names else "no arguments")


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_go_by_the_names_of_their_functions(name: str) -> None:
    from engine.runtime.stage.optimizer import OPTIMIZERS

    assert OPTIMIZERS[name].__name__ == name
    assert argument_problems("optimizer_args", "engine.runtime.stage.optimizer", name, {"zzz": 1})


def test_the_job_of_a_scenario_and_of_a_matrix_is_checked_too() -> None:
    text = SCENARIO + "job:\n  model_args: {widht: 3}\n"
    place = f":{len(text.splitlines())}:23: job.model_args.widht: expected one of depth, "
    with pytest.raises(UserError, match=f"x.yaml{place}"):
        load_document(Path("x.yaml"), read_text(text, "x.yaml"), kinds(), offered=offered)
    Path("x.yaml").write_text(text)
    with pytest.raises(UserError, match=f"x.yaml{place}"):
        read_matrix("x.yaml", kinds(), offered=offered)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BAMBOO, *arguments], check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--explain",)])
def test_a_run_with_a_typo_starts_nothing(more: tuple[str, ...]) -> None:
    Path("job.yaml").write_text(WRONG)
    done = run("run", "job.yaml", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"bamboo: job.yaml:{each}" for each in TOLD]
    assert not Path("results").exists()


def test_a_run_without_its_data_starts_nothing_and_can_be_planned() -> None:
    Path("job.yaml").write_text("data: data/none.txt\n")
    done = run("run", "job.yaml", "--json")
    (problem,) = json.loads(done.stdout)["problems"]
    assert (done.returncode, problem["source"]) == (2, "job.yaml:1:7")
    assert (problem["found"], problem["hint"]) == ("'data/none.txt'", "No such file or directory")
    assert done.stderr.startswith("bamboo: job.yaml:1:7: data: expected a file or a folder that can be read, found ")
    assert not Path("results").exists()
    assert run("run", "job.yaml", "--dry-run").returncode == 0


def test_a_plan_needs_the_layers_and_a_program_does_not() -> None:
    done = run("run", "--dry-run", "--stages", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bamboo: --stages: expected at most 6, the layers of the model, found 7\n"
    assert run("schedule", "check", "--stages", "7").returncode == 0


def test_a_place_that_is_none_for_checkpoints_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    Path("dangling").symlink_to("nowhere")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    of_url = "a URL is SCHEME://PLACE, such as s3://bucket/folder or file:///data/kept; a folder with a colon is ./A:B"
    for place, found, reason in (
        *((each, "file", "it is not a folder") for each in ("file", "file/below")),
        ("pipe", "pipe", "it is not a folder"),
        ("dangling/below", "dangling", "its target is not a folder"),
        *((each, each, of_url) for each in ("file://folder", "file://", "s3:/bucket", "S3://", "://x", "a:b")),
    ):
        told = [str(each) for each in offered.problems(Job(checkpoints=place))]
        assert told == [f"checkpoints: expected a folder or a URL, found {found!r} ({reason})"]
    good = ("new/folder", "folder", f"file://{Path.cwd()}/new", "s3://bucket", "memory://a/b", "./a:b", "")
    assert [each for each in good if offered.problems(Job(checkpoints=each))] == []
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "folder")
    (told_of,) = offered.problems(Job(checkpoints="folder/below"))
    assert (told_of.found, told_of.hint) == ("'folder'", "no permission to write there")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/kept", "cannot write '/proc/kept/"),
        ("x" * 300, "File name too long"),
        ("a\0b", "embedded null byte" if sys.version_info < (3, 13) else "embedded null character"),
        ("foo://x", "Protocol not known: foo"),
        ("data://x", "cannot write 'data://x/"),
        ("s3://user:word@bucket/x", "the store's own files and variables have them"),
        ("memory://x/y", "each worker would write into its own memory"),
        ("simplecache::memory://x", "each worker would write into its own memory"),
    ],
)
def test_a_run_begins_with_a_place_that_it_can_write(place: str, reason: str) -> None:
    ended = CliRunner().invoke(app, ["run", "--model", "mlp", "--checkpoints", place])
    assert isinstance(ended.exception, UserError)
    assert ended.exception.exit_code == ExitCode.USAGE
    assert reason in str(ended.exception)
    assert not Path("results").exists()


@pytest.mark.parametrize("look", ["--explain", "--dry-run"])
@pytest.mark.parametrize("given", [("--checkpoints", "s3://u:word@h/b"), ("--set", "checkpoints=s3://u:word@h/b")])
def test_a_plan_does_not_show_the_credentials_of_a_place(look: str, given: tuple[str, str]) -> None:
    ended = CliRunner().invoke(app, ["run", look, *given])
    assert isinstance(ended.exception, UserError)
    assert "expected a URL without credentials" in str(ended.exception)
    assert "word" not in str(ended.exception) + ended.output


def test_help_names_the_schedules() -> None:
    done = run("run", "--help")
    words = set(done.stdout.replace(",", " ").split())
    assert SCHEDULES.keys() <= words, SCHEDULES.keys() - words


def test_nothing_heavy_is_loaded_for_it() -> None:
    code = (
        "import sys; from engine.harness.job_checks import offered; from engine.core.job.job import Job\n"
        "assert offered.problems(Job(model_args={'widht': 1}, data_args={'x': 1}, optimizer_args={'x': 1}))\n"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
