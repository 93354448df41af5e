"""Hostile checkpoints cost a refusal: no code, no traceback. More: `python -m tests.security.hostile_checkpoints`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import StorageError
from engine.core.job.job import Job
from engine.files.checkpoint_folder import checkpoints_at
from engine.harness import case_runner
from tests.files.made_checkpoints import save
from tests.files.test_checkpoint_choice import keep
from tests.security.hostile_checkpoints import KINDS, answers, harm, make

NUMBERS = range(len(KINDS))  # each kind once


@pytest.mark.parametrize("number", NUMBERS)
def test_a_hostile_checkpoint_is_answered_in_words(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a part of a terabyte, a number of a job and code in it were an internal error, or ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(case_runner, "run_case", case_runner.run_case)
    made = make(tmp_path, number)
    assert [(answer.words, wrong) for answer in answers(made) if (wrong := harm(made, answer))] == []


def test_a_file_that_is_mostly_holes_is_refused_and_a_smaller_one_is_read(tmp_path: Path) -> None:
    folder = checkpoints_at(tmp_path)
    name = save(folder, 1)
    path = tmp_path / f"step-{1:08d}" / folder.manifest(name).parts[0].file
    os.truncate(path, 65 << 20)
    with pytest.raises(StorageError, match=f"of its {65 << 20} bytes only 4096 are on the disk"):
        folder._storage.read(f"step-{1:08d}/{path.name}", 1 << 40)
    os.truncate(path, 63 << 20)
    assert len(folder._storage.read(f"step-{1:08d}/{path.name}", 1 << 40)) == 63 << 20


def test_refused_checkpoints_are_counted_behind_the_first_ones(tmp_path: Path) -> None:
    place = keep(tmp_path, "20261122-100000-a-0000", (3,), Job())
    for number in range(20):
        (place / "step-00000003" / f"manifest-{number:016x}.json").write_text(json.dumps(number))
    lines = CliRunner().invoke(app, ["export", str(place), "--output", str(tmp_path / "x.pt")]).output.splitlines()
    assert (len(lines), lines[10]) == (12, f"10 more checkpoints in {place} are refused")
