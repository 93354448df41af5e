"""The tutorial is true: its files are written, its commands run in their order, and print the lines that it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

from tests.e2e.warm_start import ROOT, start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-run.md"
FILE = re.compile(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", re.DOTALL)
SESSION = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"(?:starting:|step \d+/\d+).*\n|worker \d .*, 0 steps lost\n")  # as many lines as it takes long
VARYING = [
    (r"\d{8}-\d{6}-(\w+)-[0-9a-f]{4}", r"TIME-\1-HEX"),
    (r"trajectory [0-9a-f]{12}", "trajectory HASH"),
    (r"weights [0-9a-f]{12}", "weights HASH"),
    (r"in step (\d+) after \d\w+", r"in step \1 after ACTION"),
    (r"\d+(?:\.\d+)? m?s\b", "DURATION"),
    (r"\d+\.\d+", "FIGURE"),
]


def masked(text: str) -> list[str]:
    """Returns the lines of a command's output without progress, and without the figures that vary."""
    text = PROGRESS.sub("", text)
    for pattern, mask in VARYING:
        text = re.sub(pattern, mask, text)
    return text.splitlines()


def in_a_shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Returns the exit code and the output of a command."""
    ended = subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout


def forked(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Returns the same of a `bamboo` whose imports are made already."""
    program, *arguments = shlex.split(command)
    assert program == "bamboo"
    with Path(os.devnull).open() as nothing, TemporaryFile("w+") as output:
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        code = start(arguments, folder, environment | {"PYTHONPATH": str(ROOT)}, streams).wait(120)
        output.seek(0)
        return code, output.read()


def test_the_tutorial_shows_the_output_of_its_commands(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in FILE.findall(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    own = {name: os.environ[name] for name in ("HOME", "XDG_STATE_HOME")}
    environment = own | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    trajectories, is_installed = [], True  # the command as a shell finds it, the first time and in pipes
    for session in SESSION.findall(page):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
            code, output = (in_a_shell if is_installed or "|" in command else forked)(command, tmp_path, environment)
            is_installed = False
            assert (code, masked(output)) == (0, masked(shown)), (command, output)
            trajectories += re.findall(r"trajectory ([0-9a-f]{12})", output)
    assert len(trajectories) == 2 and len(set(trajectories)) == 1


def test_a_changed_word_of_a_page_is_found() -> None:
    line = "20261126-224813-model-a4eb: Worker 1 was lost in step 20; training stalled for 45 ms."
    assert masked(line) == masked(line.replace("45 ms", "7 ms").replace("a4eb", "0123"))
    assert masked(line) != masked(line.replace("step 20", "step 21"))
