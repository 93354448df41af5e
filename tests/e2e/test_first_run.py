"""The tutorial is true: its files are written, its commands run in their order, and print the lines that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_the_tutorial_shows_the_output_of_its_commands(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in FILE.findall(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("BAMBOO_", "GITHUB_"))}
    environment = own | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    trajectories = []
    for session in SESSION.findall(page):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
            ended = subprocess.run(
                ["/bin/bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=120,
                check=False,
            )
            assert (ended.returncode, masked(ended.stdout)) == (0, masked(shown)), (command, ended.stdout)
            trajectories += re.findall(r"trajectory ([0-9a-f]{12})", ended.stdout)
    assert len(trajectories) == 2 and len(set(trajectories)) == 1


def test_a_changed_word_of_a_page_is_found() -> None:
    line = "20261126-224813-model-a4eb: Worker 1 was lost in step 20; training stalled for 45 ms."
    assert masked(line) == masked(line.replace("45 ms", "7 ms").replace("a4eb", "0123"))
    assert masked(line) != masked(line.replace("step 20", "step 21"))
