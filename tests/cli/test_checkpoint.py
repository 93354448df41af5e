"""`bamboo checkpoint`: checkpoints are listed, verified to the last byte, and deleted when they are old."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import NothingMatchedError
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.harness.run_list import leftovers
from tests.cli.test_status import make_run
from tests.cli.test_stock import ENDED
from tests.files.made_checkpoints import save

RUN = "gpt"


def said(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def plain(*arguments: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json", code=code))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """The checkpoints of the steps 9, 19 and 29 of a run that has ended."""
    run = tmp_path / make_run(tmp_path, RUN, ENDED)
    kept = checkpoints_at(run / "checkpoints", run)
    for step in (9, 19, 29):
        save(kept, step, run=run.name)
    return kept


def damage(folder: CheckpointFolder, name: CheckpointName) -> str:
    file = folder.manifest(name).parts[1].file
    path = Path(folder.place) / f"step-{name.step:08d}" / file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return file


def test_checkpoints_of_a_run_are_listed(folder: CheckpointFolder, tmp_path: Path) -> None:
    lines = said("list", "--results", tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "9", "19", "29", "3"]
    rows = plain("list", tmp_path / Path(folder.place).parent.name)["checkpoints"]
    assert [(row["step"], row["parts"], row["bytes"], row["problem"]) for row in rows] == [
        (step, 2, 344, "") for step in (9, 19, 29)
    ]
    assert [row["step"] for row in plain("list", f"{folder.place}@19")["checkpoints"]] == [19]


def test_a_damaged_part_is_named_and_ends_with_1(folder: CheckpointFolder, tmp_path: Path) -> None:
    assert plain("verify", "--results", tmp_path)["exit_code"] == 0
    file = damage(folder, folder.names()[1])
    assert file not in said("list", folder.place)
    assert file in said("verify", folder.place, code=1)
    rows = plain("verify", folder.place, code=1)["checkpoints"]
    assert [bool(row["problem"]) for row in rows] == [False, True, False]
    assert "good" in said("verify", "latest@29", "--results", tmp_path)


def test_old_ones_are_deleted_and_damaged_ones_do_not_count(folder: CheckpointFolder, tmp_path: Path) -> None:
    damage(folder, folder.names()[2])
    assert plain("prune", folder.place, "--keep", 3)["deleted"] == []
    assert [row["step"] for row in plain("prune", folder.place, "--keep", 1, "--dry-run")["deleted"]] == [9]
    assert len(folder.names()) == 3
    assert "deleted: 1 checkpoint" in said("prune", "--keep", 1, "--results", tmp_path)
    assert [name.step for name in folder.names()] == [19, 29]


def test_a_place_without_checkpoints_ends_with_5(tmp_path: Path) -> None:
    make_run(tmp_path, RUN, ENDED)
    for where in ("latest", tmp_path, f"memory://{tmp_path.name}", "latest@3"):
        with pytest.raises(NothingMatchedError, match="no checkpoint"):
            said("list", where, "--results", tmp_path)


def test_help_has_examples() -> None:
    for command in ("list", "verify", "prune"):
        assert "Examples:  bamboo checkpoint" in " ".join(said(command, "--help").split()).replace("  ", " ").replace(
            "Examples: ", "Examples:  "
        )


def test_parts_of_an_unfinished_checkpoint_are_cleaned(folder: CheckpointFolder, tmp_path: Path) -> None:
    orphan = folder.write_part(39, 0, [b"x"])
    found, _ = leftovers(tmp_path, None)
    assert [(each.what, each.path.name) for each in found] == [("part of an unfinished checkpoint", orphan.file)]
