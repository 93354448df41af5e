"""The program as a whole: its overview is true, and nobody waits for what a help text does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import COMMANDS, app, load

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pandas", "numpy", "plotly", "pydantic", "yaml", "grpc", "psutil")
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
    assert {each for each in modules if each.startswith("bamboo_cli")} == {"bamboo_cli", "bamboo_cli.app"}
    assert not modules & {*HEAVY}


@pytest.mark.parametrize("arguments", [("run",), ("inject",), ("report",), ("schedule", "show"), ("bench", "launch")])
def test_the_help_of_a_command_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not loaded_by(*arguments, "--help") & {*HEAVY}


BAMBOO = [sys.executable, "-c", "from bamboo_cli.app import main; main()"]


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
