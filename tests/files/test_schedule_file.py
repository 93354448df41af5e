"""A user's schedule is read from a file or made by a generator, checked, and passed on as text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.program.schedule_csv import lists_from_csv, rows_to_csv
from engine.core.program.schedules import SCHEDULES
from engine.files.jobs.job_file import resolve_job
from engine.files.jobs.user_files import own_schedule

SIZES = {"stages": "4", "stages_per_worker": "2", "microbatches": "4"}


def schedule_of(schedule: str) -> str:
    return resolve_job(None, {}, (), {**SIZES, "schedule": schedule}).job.schedule


def test_a_file_and_a_generator_become_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = SCHEDULES["zbv"](2, 4, 2)
    path = tmp_path / "mine.csv"
    path.write_text(rows_to_csv(lists))
    (tmp_path / "my_schedules.py").write_text(
        "from engine.core.program.schedules import SCHEDULES\n"
        "def whole(p, v, m):\n    return SCHEDULES['zbv'](p, m, v)\n"
        "def broken(p, v, m):\n    raise ValueError('no idea')\n"
        "def short(p, v, m):\n    return [['0F0']]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert lists_from_csv(schedule_of(str(path))) == lists == lists_from_csv(schedule_of("my_schedules:whole"))
    with pytest.raises(UserError, match="no idea"):
        schedule_of("my_schedules:broken")
    with pytest.raises(UserError, match=r"hole in my_schedules.*did you mean 'whole'"):
        schedule_of("my_schedules:hole")
    with pytest.raises(UserError, match="one row per worker of a pipeline: 2"):
        schedule_of("my_schedules:short")


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.csv"
    told = f"--schedule: expected a file or a generator that can be read, found '{path}' (No such file or directory)"
    with pytest.raises(UserError) as caught:
        schedule_of(str(path))
    assert str(caught.value) == told


def test_a_file_of_other_bytes_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"expected a CSV file with compute lists, found .* \(it is not UTF-8 text\)$"):
        schedule_of(str(tmp_path / "x.csv"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_schedule_that_never_ends_is_refused(tmp_path: Path, kind: str) -> None:
    """A pipe held `validate` for ever, and a link to /dev/zero took all memory of the host."""
    path = tmp_path / "lists.csv"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    found = own_schedule(Job(schedule=str(path)))
    assert isinstance(found, Problem)
    assert "not a regular file" in str(found)


def test_a_long_schedule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lists.csv"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert "longer than" in str(own_schedule(Job(schedule=str(path))))
