"""Messages about files and fields name the mistake in plain words, and the nearest right spelling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launcher import ROOT

HEAD = "version: 1\nname: x\nabout: z\n"
FAULTS = "faults: [{at: {step: 1, stage: 1}, do: kill}]\n"


def told(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Returns the exit code of a command and the lines of its errors."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    command = [sys.executable, "-m", "bamboo_cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "run --set widht=3",
            "bamboo: --set widht=3: widht: expected a field of the job (did you mean 'model_args.width'?)",
        ),
        (
            "run --set foo=1",
            "bamboo: --set foo=1: foo: expected a field of the job (there is model, model_args, data, ",
        ),
        ("run --set mirobatches=1", "(did you mean 'microbatches'?)"),
        ("run --set momentun=1 --optimizer sgd", "(did you mean 'optimizer_args.momentum'?)"),
        ("run --schedule 1F1B", "found '1F1B' (did you mean '1f1b'?)"),
        (
            "run --model nothere:small",
            "bamboo: --model: expected a module that Python finds, found 'nothere:small' (in this folder or ",
        ),
        ("run --model mien:small", "found 'mien:small' (did you mean 'mine'?)"),
        ("run --data rosw.data:Sums", "bamboo: --data: expected a module that Python finds, found 'rosw.data:Sums' ("),
        (
            "run --microbatch-size 0 --model resnet18",
            "bamboo: --microbatch-size: expected a whole number >= 1, found 0",
        ),
        ("validate s.yaml", "bamboo: s.yaml:1:1: version: expected 'version: 1' in the first line, found nothing ("),
        (
            "validate own.yaml",
            "bamboo: own.yaml:4:14: job.model: expected a module that Python finds, found 'nomod:fac' (",
        ),
    ],
)
def test_one_line_says_what_to_do(tmp_path: Path, command: str, line: str) -> None:
    """Each of them had no advice, a second line about the same value, or came after processes had started."""
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "s.yaml").write_text("name: x\nabout: z\n" + FAULTS)
    (tmp_path / "own.yaml").write_text(HEAD + "job: {model: nomod:fac}\n" + FAULTS)
    code, lines = told(tmp_path, *command.split())
    assert (code, len(lines)) == (2, 1), lines
    assert line in lines[0]
    assert not (tmp_path / "results").exists()


def test_validate_finds_modules_and_imports_none(tmp_path: Path) -> None:
    """A model without a module was valid; a generator of a schedule was called."""
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\ndef small(): ...\ndef lists(): ...\n")
    (tmp_path / "job.yaml").write_text("model: mine:small\nstages: 2\nschedule: mine:lists\n")
    (tmp_path / "s.yaml").write_text(HEAD + "job: job.yaml\n" + FAULTS)
    (tmp_path / "m.yaml").write_text(HEAD + "job: job.yaml\ncases:\n  - name: a\n    " + FAULTS)
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_cli", "validate", "job.yaml", "s.yaml", "m.yaml"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "job.yaml: valid: a job: mine:small in 1 x 2 stages, 80 steps; not imported: mine:small, mine:lists",
        "s.yaml: valid: 1 fault, expects recovered; job: ./job.yaml; not imported: mine:small, mine:lists; "
        "to run it, pass --trust-code",
        "m.yaml: valid: a matrix of 1 cells; job: ./job.yaml; not imported: mine:small, mine:lists; "
        "to run it, pass --trust-code",
    ], done.stderr


@pytest.mark.parametrize("command", ["report --table foo", "init --ci foo", "schema foo"])
def test_no_library_is_quoted(tmp_path: Path, command: str) -> None:
    """The message began with the words `Value error,` of the library that checks values."""
    code, lines = told(tmp_path, *command.split())
    text = "\n".join(lines)
    assert code == 2 and "'foo' is not one of" in text and "Value error" not in text
