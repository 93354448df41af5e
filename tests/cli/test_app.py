"""The program as a whole: its overview is true, and a help text imports only the modules that it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.__main__ import main
from bamboo_cli.app import COMMANDS, app, asks_for_json, load
from bamboo_cli.bench import _BENCHMARKS, _chosen
from engine.bench.figures import Cases

STRUCK_AT = """
import os, signal, sys

def strike(event, arguments):
    if event == "import" and arguments[0] == "{module}":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(strike)
"""
ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pandas", "numpy", "pydantic", "yaml", "grpc", "psutil")
HELP = """
import sys
from typer.testing import CliRunner
from bamboo_cli.app import app
done = CliRunner().invoke(app, {arguments!r}, catch_exceptions=False)
assert done.exit_code == 0 and "Usage" in done.output, done.output
print(*sorted(sys.modules))
"""


def loaded_by(*arguments: str) -> set[str]:
    code = HELP.format(arguments=[*arguments])
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_says_how_the_help_of_each_command_begins(name: str) -> None:
    assert " ".join(load(name).help.split()).startswith(COMMANDS[name])


def test_the_overview_has_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"], catch_exceptions=False).output
    assert all(f" {name} " in text for name in COMMANDS)
    assert CliRunner().invoke(app, ["--version"]).output == f"{version('bamboo-train')}\n"
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2


def test_the_overview_loads_no_command() -> None:
    modules = loaded_by("--help")
    own = {each for each in modules if each.startswith("bamboo_cli")}
    assert own == {"bamboo_cli", "bamboo_cli.app", "bamboo_cli.echo"}
    assert not modules & {*HEAVY}


@pytest.mark.parametrize("arguments", [("run",), ("inject",), ("report",), ("schedule", "show"), ("bench", "launch")])
def test_the_help_of_a_command_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not loaded_by(*arguments, "--help") & {*HEAVY}


BAMBOO = [sys.executable, "-m", "bamboo_cli"]


@pytest.mark.parametrize(
    ("arguments", "stream"),
    [
        (("schedule", "show"), "stdout"),
        (("run", "--help"), "stdout"),  # which another library prints
        (("run", "--stages", "0"), "stderr"),
    ],
)
def test_a_program_to_which_nobody_listens_ends_quietly_as_by_sigpipe(arguments: tuple[str, ...], stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: write}
        done = subprocess.run([*BAMBOO, *arguments], cwd=ROOT, check=False, timeout=60, **streams)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert not done.stdout and not done.stderr


def test_what_cannot_be_written_is_said_and_the_end_of_a_run_too(tmp_path: Path) -> None:
    job = ("--model", "mlp", "--stages", "1", "--steps", "1", "--validate-every", "0", "--results", str(tmp_path))
    for arguments in (("schedule", "show"), ("run", "--json", *job)):
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [*BAMBOO, *arguments], cwd=ROOT, check=False, timeout=60, stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 74
        assert "bamboo: output: No space left on device" in done.stderr
    assert "finished: 1 steps" in done.stderr
    assert json.loads((tmp_path / "latest" / "run.json").read_text())["result"]["outcome"] == "finished"


@pytest.mark.parametrize("module", ["typer", "yaml"])
def test_ctrl_c_is_answered_while_the_program_is_being_loaded(tmp_path: Path, module: str) -> None:
    """A run died by the raw signal, without a word, with --json too."""
    (tmp_path / "sitecustomize.py").write_text(STRUCK_AT.format(module=module))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def struck(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [*BAMBOO, *arguments],
            cwd=tmp_path,
            check=False,
            timeout=60,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    code, shown, told = struck("run", "--steps", "0", "--json")
    assert (code, told) == (130, "stopping; Ctrl-C again kills\n")
    assert json.loads(shown)["outcome"] == "interrupted"
    assert struck("schedule", "show", "--data", "none") == (-signal.SIGINT, "", "")  # which a shell calls 130
    assert not (tmp_path / "results").exists()


def test_the_installed_command_and_the_module_are_the_same() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"bamboo": f"{main.__module__}:{main.__name__}"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run", "--json", "--stgaes", "2"), "No such option: --stgaes"),
        (("inject", "--json", "--device", "cpu"), "No such option: --device (Possible options: --set device=VALUE)"),
        (("compare", "one", "--json"), "Missing argument 'B'"),
        (("run", "--json", "--stages", "0"), "--stages: expected a whole number >= 1, found 0"),
    ],
)
def test_whoever_asks_for_json_gets_one_object_whatever_is_wrong(arguments: tuple[str, ...], error: str) -> None:
    done = subprocess.run([*BAMBOO, *arguments], cwd=ROOT, check=False, timeout=60, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["error"].startswith(error)
    assert (done.returncode, said["exit_code"], said["outcome"]) == (2, 2, "refused")
    assert error.split(maxsplit=1)[0] in done.stderr


def test_json_as_the_value_of_an_option_gets_a_refusal_in_words_only() -> None:
    arguments = ("run", "--name", "--json", "--stages", "0")
    done = subprocess.run([*BAMBOO, *arguments], cwd=ROOT, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--stages: expected a whole number >= 1, found 0" in done.stderr


def test_a_case_is_chosen_by_its_whole_name_or_by_a_part() -> None:
    cases: Cases = {name: lambda folder: [] for name in ("1f1b P=4", "eager-1f1b P=4", "1f1b P=8")}
    assert [*_chosen("1f1b P=4", cases)] == ["1f1b P=4"]
    assert [*_chosen("P=4", cases)] == ["1f1b P=4", "eager-1f1b P=4"]
    assert [*_chosen("", cases)] == [*cases]


def test_every_benchmark_names_a_function_of_the_engine() -> None:
    for function, _ in _BENCHMARKS.values():
        module, _, cases = function.partition(".")
        source = (ROOT / "engine" / "bench" / f"{module}.py").read_text(encoding="utf-8")
        assert f"def {cases}(quick: bool) -> Cases:" in source


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("run --json", True),
        ("run --name x --json", True),
        ("run --name --json", False),
        ("run --name=--json", False),
        ("run -- --json", False),
        ("schedule compare --forward --json", False),
        ("schedule compare --forward 2 --json", True),
        ("nonsense --json", True),
        ("run --nonsense --json", True),
        ("validate a b --json", True),
    ],
)
def test_json_is_a_flag_and_no_value(line: str, asks: bool) -> None:
    assert asks_for_json(line.split()) is asks
