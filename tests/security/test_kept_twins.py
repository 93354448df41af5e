"""A kept twin decides whether a run is correct: one that another user, or a torn write, has made does not count."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import StorageError
from engine.core.job.job import Job
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import keep_twin, kept_twin
from engine.harness.case_runner import twin_rows
from engine.runtime.agent.run_state import Ending, RunState, RunView
from engine.runtime.agent.scribe_work import scribe_for

NOBODY = 65534
ROWS = [TrajectoryRow(step, layer, "ab" * 32, "cd" * 32, 0.1) for step in range(3) for layer in range(2)]
FORGED = [TrajectoryRow(step, layer, "ff" * 32, "cd" * 32, 0.1) for step in range(3) for layer in range(2)]


def _rewritten(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def _made_for_another_job(path: Path) -> None:
    keep_twin(path.parents[1], "other", FORGED)
    path.with_name("other.csv").replace(path)


def _behind_a_link(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to("away")


def _as_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILT: dict[str, Callable[[Path], object]] = {
    "forged row": lambda path: _rewritten(path, lambda text: text.replace("ab", "ff", 1)),
    "torn": lambda path: _rewritten(path, lambda text: text[: len(text) // 2]),
    "cut between rows": lambda path: _rewritten(path, lambda text: "".join(text.splitlines(keepends=True)[:3])),
    "row taken out": lambda path: _rewritten(path, lambda text: "\n".join(text.split("\n")[:2] + text.split("\n")[3:])),
    "without a hash": lambda path: _rewritten(path, lambda text: text[: text.index("sha256")]),
    "empty": lambda path: path.write_text(""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "made for another job": _made_for_another_job,
    "writable by others": lambda path: path.chmod(0o666),
    "readable by others": lambda path: path.chmod(0o644),
    "behind a link": _behind_a_link,
    "as a pipe": _as_a_pipe,
    "as a folder": _as_a_folder,
}
if os.geteuid() == 0:
    SPOILT["of another user"] = lambda path: os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("kind", SPOILT)
def test_a_kept_twin_that_is_not_this_users_whole_file_does_not_count(kind: str, tmp_path: Path) -> None:
    """Before, any rows in a file of that name were believed, so another user could make a wrong run pass."""
    keep_twin(tmp_path, "a", ROWS)
    assert kept_twin(tmp_path, "a") == ROWS
    SPOILT[kind](tmp_path / "twins" / "a.csv")
    with pytest.raises(StorageError, match=r"a\.csv"):
        kept_twin(tmp_path, "a")


def test_a_kept_twin_is_of_its_user_alone_under_any_umask(tmp_path: Path) -> None:
    """Before, it had the mode of the umask, so others could write into it."""
    before = os.umask(0)
    try:
        keep_twin(tmp_path, "a", ROWS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "twins" / "a.csv").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "twins") == ["a.csv"]


class _Twins:
    """Trains no twin: gives the true rows, and counts."""

    def __init__(self, results: Path):
        self.job = Job(results=str(results))
        self.num_made = 0
        self.told: list[str] = []

    def rows(self) -> list[TrajectoryRow]:
        """Returns the rows of the twin of a new run."""
        folder = RunFolder(Path(self.job.results) / f"run-{self.num_made}-{len(self.told)}")
        folder.path.mkdir(parents=True)
        with scribe_for(is_in_process=True) as scribe:
            found = twin_rows(self.job, folder, scribe, self._make, self.told.append)
        shutil.rmtree(folder.path)
        return found

    def _make(self, job: Job, folder: RunFolder) -> Ending:
        self.num_made += 1
        folder.events.touch()
        assert asdict(job)["results"] == ""
        run_state = RunState(job)
        run_state.rows.extend(ROWS)
        return Ending("finished", 0, None, RunView(run_state, ()), 0, 0)


def test_a_forged_twin_is_made_anew_and_told(tmp_path: Path) -> None:
    """Before, the forged rows were taken for those of the job, without a word."""
    twins = _Twins(tmp_path)
    assert (twins.rows(), twins.num_made) == (ROWS, 1)
    assert (twins.rows(), twins.num_made) == (ROWS, 1), "a kept twin is used again"
    (path,) = (tmp_path / "twins").iterdir()
    _rewritten(path, lambda text: text.replace("ab", "ff"))
    assert (twins.rows(), twins.num_made) == (ROWS, 2)
    assert twins.told == [
        f"the kept twin does not count: {path}: the hash in its last line is not that of its rows",
    ]
    assert (twins.rows(), twins.num_made) == (ROWS, 2), "the new one was kept in its place"


def test_a_twin_that_cannot_be_kept_ends_no_run(tmp_path: Path) -> None:
    """Before, a folder of twins that this user may not write into ended a run after all of its training."""
    twins = _Twins(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "twins").symlink_to(tmp_path / "elsewhere")
    assert (twins.rows(), twins.num_made) == (ROWS, 1)
    (told,) = twins.told
    assert told.startswith("the twin is not kept for later runs: cannot make") and "'twins' is a link" in told
    assert os.listdir(tmp_path / "elsewhere") == []
