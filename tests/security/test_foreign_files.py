"""Code and folders that a stranger's file names: nothing is imported, called or written without ``--trust-code``.

A foreign file is a scenario, a matrix, the job file that one of them names, or a ``bamboo.yaml`` that lies in the
current folder. The commands run in this process; where they would start a run, the test opens the job instead, as a
worker would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from bamboo_cli.matrix import _replay
from engine.api import scenario_tests
from engine.core.errors import Problem, UserError
from engine.core.faults.matrix import SmallestScenario
from engine.core.history.run_records import ScenarioRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.files.jobs.matrix_file import read_matrix
from engine.harness import case_runner, matrix_runner
from engine.harness.job_checks import offered
from engine.runtime.faults.registry import kinds
from engine.runtime.process import fork_client
from engine.runtime.process.fork_client import Lane
from tests.e2e.launcher import ROOT

FAULTS = "faults: [{at: {step: 1, stage: 1}, do: kill}]\n"
HEAD = "version: 1\nname: x\nabout: z\n"
CELLS = HEAD + "job: JOB\naxes: AXES\ncases:\n  - name: a\n    " + FAULTS
# A package of a stranger: each import and each call leaves a mark.
MODULE = """\
from pathlib import Path
FOLDER = Path(__file__).parents[1]
(FOLDER / f"imported-{__name__}").touch()
def called(name):
    (FOLDER / f"called-{name}").touch()
def net():
    called("model")
def rows(seed):
    called("data")
def lists(num_workers, stages_per_worker, num_microbatches):
    called("schedule")
    from engine.core.program.schedules import SCHEDULES
    return SCHEDULES["gpipe"](num_workers, num_microbatches, stages_per_worker)
"""
CODE = {"model": "stranger.inner:net", "data": "stranger.inner:rows", "schedule": "stranger.inner:lists"}
BUILT_IN = ("os:dup2", "signal:setitimer")
ELSEWHERE = ("/srv/app/releases", "runs")  # a relative folder can be a link of the stranger


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: it holds a stranger's files and package, and Python finds the package."""
    here = tmp_path / "here"
    (here / "stranger").mkdir(parents=True)
    for name in ("__init__.py", "inner.py"):
        (here / "stranger" / name).write_text(MODULE)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.syspath_prepend(here)
    yield here
    for name in ("stranger", "stranger.inner"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have been run; each is opened as a worker opens it."""
    jobs: list[Job] = []

    def take(found: Iterable[Job]) -> None:
        from engine.models.data_sources import open_data
        from engine.models.user_factory import user_model

        for job in found:
            jobs.append(job)
            for opens in (open_data, user_model):
                with contextlib.suppress(UserError):  # the factories return nothing
                    opens(job)
        raise InterruptedError

    monkeypatch.setattr(fork_client, "ForkServer", contextlib.nullcontext)
    monkeypatch.setattr(case_runner, "run_case", lambda case, *rest, **more: take([case.scenario.job]))
    run = lambda self, lanes, cells, *rest: take(each.loaded.scenario.job for each in cells)  # noqa: E731
    monkeypatch.setattr(matrix_runner.MatrixRun, "run", run)
    return jobs


def call(words: str, **environment: str) -> tuple[int, tuple[Problem, ...], str]:
    """Returns the exit code, the problems and the output of a command; 99 if it would have started a run."""
    done = CliRunner().invoke(app, shlex.split(words), env=environment)
    if isinstance(done.exception, InterruptedError):
        return 99, (), done.output
    if isinstance(done.exception, UserError):
        return int(done.exception.exit_code), done.exception.problems, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, (), done.output


def marks() -> set[str]:
    return {each.name for pattern in ("imported-*", "called-*") for each in Path().glob(pattern)}


def flow(values: dict[str, str]) -> str:
    return json.dumps(values)  # which is YAML too


def lying(job: dict[str, str]) -> None:
    Path("bamboo.yaml").write_text("".join(f"{name}: {value}\n" for name, value in job.items()))


def scenario(job: dict[str, str]) -> None:
    Path("s.yaml").write_text(HEAD + f"job: {flow(job)}\n" + FAULTS)


def scenario_of_a_file(job: dict[str, str]) -> None:
    Path("job.yaml").write_text(flow(job))
    Path("s.yaml").write_text(HEAD + "job: job.yaml\n" + FAULTS)


def scenario_from_a_file(job: dict[str, str]) -> None:
    Path("job.yaml").write_text(flow(job))
    Path("s.yaml").write_text(HEAD + "job: {from: job.yaml, steps: 8}\n" + FAULTS)


def scenario_of_a_record(job: dict[str, str]) -> None:
    Path("run.json").write_text(json.dumps({"job": job, "origins": {}, "host": {}}))
    Path("s.yaml").write_text(HEAD + "job: run.json\n" + FAULTS)


def scenario_without_a_job(job: dict[str, str]) -> None:
    lying(job)
    Path("s.yaml").write_text(HEAD + FAULTS)


def matrix(job: dict[str, str]) -> None:
    text = HEAD + f"job: {flow(job)}\naxes: {{n: [4, 8]}}\ncases:\n  - name: a\n    job: {{steps: $n}}\n    {FAULTS}"
    Path("s.yaml").write_text(text)


def matrix_axis(job: dict[str, str]) -> None:
    text = (
        HEAD + f"axes: {{n: {{one: {flow(job)}}}}}\ncases:\n  - name: a\n    job: {{with: $n, steps: 9}}\n    {FAULTS}"
    )
    Path("s.yaml").write_text(text)


def matrix_cases(job: dict[str, str]) -> None:
    cases = [f"  - name: {name}\n    job: {flow(job)}\n    {FAULTS}" for name in ("a", "b")]
    Path("s.yaml").write_text(HEAD + "cases:\n" + "".join(cases))


def matrix_of_a_file(job: dict[str, str]) -> None:
    Path("job.yaml").write_text(flow(job))
    Path("s.yaml").write_text(HEAD + f"job: job.yaml\ncases:\n  - name: a\n    {FAULTS}")


JOBS = ("run", "run --dry-run", "run --dry-run --json --kill 3:1", "run --explain")
SCENARIOS = ("inject s.yaml", "inject s.yaml --dry-run", "inject --scenario s.yaml --dry-run --json")
MATRICES = ("matrix s.yaml", "matrix s.yaml --format list", "matrix s.yaml --format github")
CHECKS = ("validate FILE", "validate --json FILE", "list scenarios", "list matrices")
# the writer of the file -> the file that holds the values, the command that runs, the commands that only show
KINDS: dict[Callable[[dict[str, str]], None], tuple[str, tuple[str, ...]]] = {
    lying: ("bamboo.yaml", JOBS),
    scenario: ("s.yaml", SCENARIOS),
    scenario_of_a_file: ("job.yaml", SCENARIOS),
    scenario_from_a_file: ("job.yaml", SCENARIOS),
    scenario_of_a_record: ("run.json", SCENARIOS),
    scenario_without_a_job: ("bamboo.yaml", (*SCENARIOS, *MATRICES[1:])),
    matrix: ("s.yaml", MATRICES),
    matrix_axis: ("s.yaml", MATRICES),
    matrix_cases: ("s.yaml", MATRICES),
    matrix_of_a_file: ("job.yaml", MATRICES),
}
each_kind = pytest.mark.parametrize("write", KINDS, ids=lambda each: each.__name__)


@each_kind
def test_code_of_a_foreign_file_waits_for_the_user(write: Callable[..., None]) -> None:
    """Before, a generator of a schedule ran in `validate` and in dry runs, and the other code in a run."""
    write(CODE)
    file, (runs, *shows) = KINDS[write]
    code, problems, _ = call(runs)
    assert (code, {each.source for each in problems}) == (2, {file})
    assert {each.field.removeprefix("job.") for each in problems} == CODE.keys()
    assert all(each.line and each.column for each in problems)
    for each in problems:
        module, _, attribute = CODE[each.field.removeprefix("job.")].partition(":")
        assert each.found == repr(f"{module}:{attribute}") and "--trust-code" in each.hint
        assert f"bamboo would import {module} and call {attribute}" in each.hint
    checked = "s.yaml" if Path("s.yaml").exists() else file
    for flag in ("", " --trust-code"):
        for words in shows:
            code, problems, output = call(words + flag)
            assert (code, problems) == (0, ()), words
            assert (f"a run needs --trust-code: {file}:" in output) == (not flag)
    for words in CHECKS:
        assert call(words.replace("FILE", checked))[0] == 0
    assert marks() == set() and not Path("results").exists()
    assert call(f"{runs} --trust-code")[0] == 99
    assert marks() == {"imported-stranger", "imported-stranger.inner", *(f"called-{each}" for each in CODE)}


@each_kind
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_function_of_python_in_a_foreign_file_is_not_called(
    write: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `schedule: os:dup2` was called in `validate`, in dry runs and in a run."""
    write(dict.fromkeys(CODE, name))
    file, (runs, *shows) = KINDS[write]
    module, _, attribute = name.partition(":")
    calls: list[tuple[object, ...]] = []
    with monkeypatch.context() as patch:  # not around the test: pytest calls os.dup2 too
        patch.setattr(sys.modules[module], attribute, lambda *args: calls.append(args))
        for words in (runs, *shows, *(f"{each} --trust-code" for each in shows)):
            assert call(words)[0] == (2 if words == runs else 0), words
        call(f"validate {'s.yaml' if Path('s.yaml').exists() else file}")
    assert calls == []


@each_kind
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_foreign_file_does_not_choose_the_folder_of_results(
    write: Callable[..., None], where: str, opened: list[Job]
) -> None:
    """Before, a scenario with `results: /srv/app/releases` replaced the link `latest` there."""
    write({"results": where})
    file, (runs, *shows) = KINDS[write]
    code, (problem, *_), _ = call(runs)
    assert (code, problem.field.removeprefix("job."), problem.source) == (2, "results", file)
    assert "--trust-code" in problem.hint and not opened
    assert all(call(words)[0] == 0 for words in shows)
    assert call(f"{runs} --trust-code")[0] == 99
    assert {each.results for each in opened} == {where}


@pytest.mark.parametrize("words", ["run job.yaml", "run run.json", "run --set schedule=S --set model=M --data D"])
def test_code_that_the_command_line_names_needs_no_word(words: str) -> None:
    Path("job.yaml").write_text(flow(CODE | {"results": "runs"}))
    Path("run.json").write_text(json.dumps({"job": CODE, "origins": {}, "host": {}}))
    for letter, field in {"S": "schedule", "M": "model", "D": "data"}.items():
        words = words.replace(f"={letter}", f"={CODE[field]}").replace(f" {letter}", f" {CODE[field]}")
    assert call(f"{words} --dry-run")[0] == 0
    assert marks() == set()
    assert call(words)[0] == 99
    assert len(marks()) == 5


def test_the_environment_and_the_file_of_the_user_may_name_code(folder: Path) -> None:
    own = folder.parent / ".config" / "bamboo"
    own.mkdir(parents=True)
    (own / "job.yaml").write_text(flow(CODE))
    assert call("run")[0] == 99
    (own / "job.yaml").unlink()
    assert call("run", **{f"BAMBOO_{name.upper()}": value for name, value in CODE.items()})[0] == 99


def test_the_file_that_lies_there_counts_when_it_is_named() -> None:
    lying(CODE | {"results": "runs"})
    code, problems, _ = call("run")
    assert code == 2 and all("name the file on the command line" in each.hint for each in problems)
    assert call("run bamboo.yaml")[0] == 99


def test_a_value_that_the_command_line_replaces_needs_no_word(opened: list[Job]) -> None:
    lying(CODE | {"results": "runs"})
    assert call("run --model mlp --data synthetic --schedule gpipe --results other")[0] == 99
    scenario(CODE)
    assert call("inject s.yaml --set model=mlp --set data=synthetic --set schedule=gpipe --results o")[0] == 99
    assert marks() == set() and [each.results for each in opened] == ["other", "o"]


def test_the_environment_can_give_the_word_for_ci() -> None:
    scenario(CODE)
    assert call("inject s.yaml", BAMBOO_TRUST_CODE="0")[0] == 2
    assert call("inject s.yaml", BAMBOO_TRUST_CODE="maybe")[0] == 2
    assert call("inject s.yaml", BAMBOO_TRUST_CODE="1")[0] == 99
    assert call("run --model mlp", BAMBOO_TRUST_CODE="1")[0] == 99  # it is no field of a job


@pytest.mark.parametrize("words", ["show", "check", "export"])
def test_a_program_calls_the_generator_of_a_lying_file_with_the_flag_only(words: str) -> None:
    """Before, `bamboo schedule show` called it. It never opens the model, which needs no word."""
    lying(CODE)
    code, problems, _ = call(f"schedule {words}")
    assert (code, [each.field for each in problems], marks()) == (2, ["schedule"], set())
    assert call(f"schedule {words} --trust-code")[0] == 0
    assert "called-schedule" in marks() and "called-model" not in marks()
    assert call("schedule compare")[0] == 0  # it has no schedule of the job's


def test_a_dry_run_shows_what_it_knows_without_the_generator() -> None:
    faults = FAULTS.replace("]", ", {every: {mtbf: 2 steps, count: 2}, target: {role: random}, do: kill}]")
    Path("s.yaml").write_text(HEAD + f"job: {flow(CODE)}\n" + faults)
    _, _, output = call("inject s.yaml --dry-run --trust-code")
    assert "fault-1: kill before 1B4 of step 1; worker 1, unless the stage has moved" in output
    assert (
        "the schedule's generator is not called in a dry run (stranger.inner:lists): "
        "its actions and the moments of fault-2 are not known" in output
    )
    assert json.loads(call("inject s.yaml --dry-run --json --trust-code")[2])["not_called"] == CODE["schedule"]
    _, _, output = call(f"run --dry-run --kill 3:1 --schedule {CODE['schedule']}")
    assert "the schedule's generator is not called in a dry run" in output
    assert "redundancy lazy; shadows: stage 0 on worker 3, stage 1 on worker 0" in output
    assert "3:1: kill before 1B4 of step 3; worker 1, unless the stage has moved" in output
    assert marks() == set()
    for words, field in (("--kill 3:9", "--kill 3:9"), ("--stages-per-worker 3", "stages_per_worker")):
        assert [each.field for each in call(f"run --dry-run --schedule {CODE['schedule']} {words}")[1]] == [field]


def test_a_scenario_for_a_running_job_needs_no_word_for_code() -> None:
    """The job that runs has its own code; only the folder in which its run is looked up is the scenario's."""
    scenario(CODE)
    done = CliRunner().invoke(app, ["inject", "s.yaml", "--run", "latest"])
    assert "no run in 'results' yet" in str(done.exception)
    scenario({"results": "../elsewhere"})
    assert [each.field for each in call("inject s.yaml --run latest --dry-run")[1]] == ["job.results"]
    assert marks() == set()


def test_a_test_of_the_user_names_its_scenario_itself(folder: Path, tmp_path: Path) -> None:
    """The plugin runs in the user's own process of tests, which imports the user's code anyway."""
    from engine.core.checks.cell_result import CellResult

    scenario(CODE)
    found = scenario_tests._read("s.yaml", folder, ())
    assert "called-schedule" in marks()
    lines = scenario_tests._failure(CellResult("x", "failed", "", "no", run=""), found, ("seed=3",), tmp_path)
    assert list(lines)[-1] == "again: bamboo inject s.yaml --set seed=3 --trust-code"


def test_commands_that_repeat_a_cell_have_the_word_if_they_need_it(tmp_path: Path) -> None:
    run = matrix_runner.MatrixRun(tmp_path, ("steps=9",), 1.0)
    for job, end in ((CODE, " --trust-code"), ({"model": "mlp"}, "")):
        matrix(job)
        found = read_matrix("s.yaml", kinds(), (), offered.trusting(True))
        assert _replay(found, "s.yaml", run, "a/4") == f"bamboo matrix s.yaml --cell a/4 --set steps=9{end}"
        smallest = SmallestScenario(found.cells[0].loaded.scenario, 1, True)
        assert matrix_runner.shrunk_command(Path("x.yaml"), smallest) == f"bamboo matrix x.yaml{end}"


def bamboo(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the program as its script does: the current folder is not on Python's path."""
    command = [sys.executable, "-P", "-m", "bamboo_cli", *words]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)


def test_a_process_of_bamboo_takes_no_module_from_the_folder(folder: Path) -> None:
    """Before, `./engine.py` or `./torch.py` of a stranger ran in lanes and fork servers, with built-in names too."""
    shadow(folder)
    lane = Lane(matrix_runner.LANE, folder / "log")
    assert (lane.close(), marks()) == (0, set()), (folder / "log").read_text()


SHADOWS = ("torch", "numpy", "engine")


def shadow(folder: Path) -> None:
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open('{folder}/imported-{name}', 'w')\nraise SystemExit(3)\n")


OWN = """\
import torch
def net():
    return [torch.nn.Linear(8, 8) for _ in range(3)]
"""


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_real_run_with_the_flag_and_its_replays(folder: Path, opened: list[Job]) -> None:
    """Before, the job of a scenario ran the code of a file that lay in the folder."""
    shadow(folder)
    (folder / "own.py").write_text(OWN)
    sizes: dict[str, Any] = {"stages": 3, "microbatches": 2, "steps": 3, "validate_every": 0}
    lying(sizes | {"model": "own:net", "data_args": "{features: 8, outputs: 8}"})
    Path("s.yaml").write_text(HEAD + "job: {from: bamboo.yaml, microbatches: 4}\n" + FAULTS)
    done = bamboo("inject", "s.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bamboo: bamboo.yaml:5:8: model: expected no code from this file, found 'own:net' (" in done.stderr
    assert not (folder / "results").exists()
    done = bamboo("inject", "s.yaml", "--trust-code")
    assert (done.returncode, marks()) == (0, set()), done.stderr
    (run,) = (each for each in (folder / "results").iterdir() if not each.is_symlink() and each.is_dir())
    assert "own:net" in (run / "scenario.yaml").read_text()
    again = bamboo("run", str(run / "run.json"), "--dry-run").stderr.partition("with them: bamboo ")[2].strip()
    assert again == f"inject --scenario results/{run.name}/scenario.yaml --seed 0 --trust-code"
    (record,) = read_history(run / "events.jsonl").of(ScenarioRecord)
    assert record.needs_trust and "own:net" in record.text
    for name in SHADOWS:  # this process has the folder on its path
        (folder / f"{name}.py").unlink()
    assert call(again)[0] == 99
    assert call(again.removesuffix(" --trust-code"))[0] == 2
    assert [each.model for each in opened] == ["own:net"]
