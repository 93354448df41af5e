"""Run folders: names, permissions, the link to the newest, the error if none can be made, and the search for one."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from engine.core.errors import ExitCode, NothingMatchedError, StorageError, UserError
from engine.files.atomic_write import write_atomically
from engine.files.run_folder import RunFolder, create_run_folder, find_run, run_json_text

NOON = datetime(2026, 3, 4, 12, 5, 6)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_run_folder_is_private_and_latest_points_at_it(tmp_path: Path) -> None:
    results = tmp_path / "deep" / "results"
    run = create_run_folder(results, "gpt", NOON, "0a1f")
    assert run.path == results / "20260304-120506-gpt-0a1f"
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.logs.is_dir()
    assert os.readlink(results / "latest") == "20260304-120506-gpt-0a1f"
    second = create_run_folder(results, "gpt", NOON, "0a20")
    assert os.readlink(results / "latest") == second.path.name
    assert names(results) == ["20260304-120506-gpt-0a1f", "20260304-120506-gpt-0a20", "latest"]


def test_files_have_their_names(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert [each.name for each in (run.events, run.trajectory, run.run_json, run.logs)] == [
        "events.jsonl",
        "trajectory.csv",
        "run.json",
        "logs",
    ]


def test_a_results_folder_that_cannot_be_used_is_a_storage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        StorageError, match=r"results folder '.*/file' is a file \(choose another with --results\)"
    ) as caught:
        create_run_folder(file, "gpt", NOON, "0a1f")
    assert caught.value.exit_code is ExitCode.STORAGE
    with pytest.raises(StorageError, match=r"cannot be used: Not a directory: '.*/file/x' \(try --results\)"):
        create_run_folder(file / "x", "gpt", NOON, "0a1f")


def test_a_taken_name_is_a_storage_error_and_touches_nothing(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "gpt", NOON, "0a1f")
    run.events.write_text("precious")
    with pytest.raises(StorageError, match="File exists"):
        create_run_folder(tmp_path, "gpt", NOON, "0a1f")
    assert run.events.read_text() == "precious"


def test_a_latest_that_cannot_be_changed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of a shared folder could not run there: another user's link may not be replaced."""
    create_run_folder(tmp_path, "gpt", NOON, "0a1f")

    def is_not_ours(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "replace", is_not_ours)
    told: list[str] = []
    run = create_run_folder(tmp_path, "gpt", NOON, "0a20", told.append)
    about = f"cannot change {str(tmp_path / 'latest')!r}: Operation not permitted"
    assert told == [f"{about}; this run is {run.path.name}"]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_run_json_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run_folder(tmp_path, "gpt", NOON, "0a1f")
    for steps in (1, 2):
        write_atomically(run.run_json, run_json_text({"steps": steps}))
    assert json.loads(run.run_json.read_text()) == {"steps": 2}

    def disk_is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(StorageError, match=r"cannot write '.*/run\.json': No space left on device"):
        write_atomically(run.run_json, run_json_text({"steps": 3}))
    assert json.loads(run.run_json.read_text()) == {"steps": 2}
    assert names(run.path) == ["logs", "run.json"]


def test_run_json_holds_finite_numbers_only() -> None:
    text = run_json_text({"loss": float("nan"), "sets": [{"loss": float("-inf")}, (1.5,)]})
    assert json.loads(text) == {"loss": None, "sets": [{"loss": None}, [1.5]]}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for second, name in enumerate(("gpt", "gpt", "mlp")):
        create_run_folder(tmp_path, name, NOON.replace(second=second), f"000{second}")
    (tmp_path / "bench").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (None, "20260304-120502-mlp-0002"),
        ("latest", "20260304-120502-mlp-0002"),
        ("20260304-120500-gpt-0000", "20260304-120500-gpt-0000"),
        ("20260304-120501", "20260304-120501-gpt-0001"),
    ],
)
def test_a_run_is_found_by_its_name_or_a_unique_beginning(results: Path, run: str | None, found: str) -> None:
    assert find_run(results, run) == RunFolder(results / found)


def test_a_run_is_found_by_the_path_of_its_folder(results: Path) -> None:
    """`bamboo status` refused the path that `bamboo report` takes."""
    folder = results / "20260304-120501-gpt-0001"
    assert find_run(Path("elsewhere"), str(folder)) == RunFolder(folder)


def test_a_beginning_of_several_runs_is_a_user_error(results: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_run(results, "20260304")
    assert str(caught.value) == (
        "run: expected the name of one run, found '20260304' (3 begin so, the newest is '20260304-120502-mlp-0002')"
    )


def test_what_matches_no_run_ends_with_its_own_exit_code(results: Path) -> None:
    with pytest.raises(NothingMatchedError) as caught:
        find_run(results, "20260304-120500-gtp-0000")
    assert str(caught.value) == (
        f"no run '20260304-120500-gtp-0000' in {str(results)!r} (did you mean '20260304-120500-gpt-0000'?)"
    )
    assert caught.value.exit_code is ExitCode.NOTHING_MATCHED
    with pytest.raises(NothingMatchedError, match="did you mean 'latest'"):
        find_run(results, "latst")
    with pytest.raises(
        NothingMatchedError, match=r"no run .bench. in .* \(`bamboo list runs --results .*` shows them\)"
    ):
        find_run(results, "bench")


def test_without_a_run_there_is_no_latest(results: Path) -> None:
    with pytest.raises(NothingMatchedError, match=r"no run in '.*/none' yet"):
        find_run(results / "none")
    last = find_run(results).path
    last.rename(results / "moved")
    with pytest.raises(NothingMatchedError, match=f"no run '{last.name}' in"):
        find_run(results)
