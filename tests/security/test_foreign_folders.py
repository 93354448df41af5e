"""A folder from elsewhere: nothing is written or deleted through a link, and its names are only names.

Each test plants real links, pipes or folders, and then does what a command does.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from bamboo_cli.app import app
from engine.bench.figures import bench_folder, write_bench
from engine.core.checks.cell_result import CellResult
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import StorageError
from engine.core.history.process_records import RefusedRecord
from engine.files.atomic_write import write_atomically
from engine.files.jobs.starter import WORKFLOW, starter, write_new
from engine.files.linked_lines import add_records
from engine.files.matrix_results import append_result, new_folder, newest_folder, read_results
from engine.files.run_folder import RunFolder, create_run_folder, find_run, latest_name, run_names
from engine.files.trajectory_file import keep_twin, trajectory_text
from engine.harness.attach import _request
from engine.harness.dead_runs import delete_dead_stores
from engine.harness.matrix_lane import run_cell
from engine.harness.run_list import OldRuns, delete, leftovers
from engine.runtime.process.fork_client import ForkServer, Lane
from engine.runtime.process.recorder import open_events
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from tests.report.made_up import MadeUpRun, make_run

NOON = datetime(2026, 3, 4, 12, 5, 6)
GONE_PID = 2**22 + 1  # above the largest pid of Linux
NOBODY = 65534
CELL = CellResult("kill/B", "failed", "mismatch", "", "kill", 1.0, 0, "")
NO_SERVER = cast(ForkServer, None)  # nothing may come so far as to need it
ROWS = [TrajectoryRow(0, 0, "ab", "cd", 0.1)]


def say(*arguments: object) -> Result:
    """Runs a command of bamboo in this process."""
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(name="precious")
def _precious(tmp_path: Path) -> Path:
    """A file of the user, outside of every folder that bamboo is to use."""
    path = tmp_path / "home" / "authorized_keys"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "results", MadeUpRun(dead=((5, 2),)).events())


def test_a_page_replaces_a_link_in_a_run_folder(run: Path, precious: Path) -> None:
    """Before, the page was written through the link, over any file of the user."""
    for target in (precious, precious.with_name("new")):
        (run / "report.html").unlink(missing_ok=True)
        (run / "report.html").symlink_to(target)
        assert say("report", "--results", run.parent).exit_code == 0
        assert [precious.read_text(), os.listdir(precious.parent)] == ["precious", [precious.name]]
        assert (run / "report.html").read_text().startswith("<!doctype html>")
        assert stat.S_IMODE((run / "report.html").lstat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_no_page_goes_into_a_run_folder_of_another_user(run: Path, tmp_path: Path) -> None:
    """Before, the page was written into the folder of any user."""
    os.chown(run, NOBODY, NOBODY)
    told = say("report", "--results", run.parent)
    assert told.exit_code == 0
    assert "no page:" in told.stderr and "--page FILE" in told.stderr
    assert not (run / "report.html").exists()
    assert say("report", "--results", run.parent, "--page", tmp_path / "page.html").exit_code == 0
    assert "<h1" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_no_matrix_of_another_user_is_resumed(tmp_path: Path) -> None:
    """Before, the newest folder of any user was resumed, and its cells counted as passed."""
    own = new_folder(tmp_path, "smoke", NOON, "0a1f")
    os.chown(new_folder(tmp_path, "smoke", NOON.replace(year=2030), "0a20"), NOBODY, NOBODY)
    assert newest_folder(tmp_path, "smoke") == own


Write = Callable[[Path], object]
# The file that is written, from the folder that bamboo uses -> the function that writes it.
WRITERS: dict[str, Write] = {
    "run.json": lambda folder: write_atomically(folder / "run.json", '{"steps": 1}'),
    "trajectory.csv": lambda folder: write_atomically(folder / "trajectory.csv", trajectory_text(ROWS)),
    "scenario.yaml": lambda folder: write_atomically(folder / "scenario.yaml", "name: x"),
    "twins/a.csv": lambda folder: keep_twin(folder, "a", ROWS),
    "bench/kv-20260304-120506.csv": lambda folder: write_bench(bench_folder(folder), "kv", NOON, []),
    "runs/kill-B.yaml": lambda folder: run_cell(_task(folder), NO_SERVER),
    "events.jsonl": lambda folder: add_records(folder / "events.jsonl", RefusedRecord(request="x", reason="y")),
    "./events.jsonl": lambda folder: os.close(open_events(folder / "events.jsonl")),
    "results.jsonl": lambda folder: append_result(folder, CELL),
    "lane-0.log": lambda folder: Lane("engine.none", folder / "lane-0.log"),
    "etcd.log": lambda folder: EmbeddedEtcd(folder).start(),
    **{
        name: lambda folder: write_new(folder, starter("github"))
        for name in ("bamboo.yaml", "scenarios/first.yaml", "scenarios/matrix.yaml", WORKFLOW)
    },
}


def _task(folder: Path) -> dict[str, object]:
    task = {"cell": "kill/B", "file": "kill-B", "scenario": {}, "settings": [], "results": str(folder / "runs")}
    return task | {"keep": False}


@pytest.mark.parametrize("name", WRITERS)
def test_no_file_is_written_through_a_link(name: str, tmp_path: Path, precious: Path) -> None:
    """Before, records, results, logs and the scenario of a cell were written through a link of their name."""
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    for target in (precious, precious.with_name("new")):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with contextlib.suppress(StorageError):  # a file that grows; any other replaces the link
            WRITERS[name](folder)
    assert [precious.read_text(), os.listdir(precious.parent)] == ["precious", [precious.name]]


@pytest.mark.parametrize("name", [each for each in WRITERS if each.count("/") == 1 and each[0] != "."])
def test_no_file_is_written_into_a_folder_that_is_a_link(name: str, tmp_path: Path, precious: Path) -> None:
    """Before, a link in the place of a folder took bamboo's files anywhere."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).parent.symlink_to(precious.parent)
    with pytest.raises(StorageError, match="is a link"):
        WRITERS[name](folder)
    assert os.listdir(precious.parent) == [precious.name]


@pytest.mark.parametrize("name", ["run.json", "trajectory.csv", "events.jsonl", "results.jsonl", "lane-0.log"])
def test_a_run_folder_that_becomes_a_link_gets_no_file(name: str, tmp_path: Path, precious: Path) -> None:
    """Before, a member of a shared folder of results could send the files of a run anywhere."""
    (tmp_path / "run").symlink_to(precious.parent)
    with pytest.raises(StorageError, match="'run' is a link"):
        WRITERS[name](tmp_path / "run")
    with pytest.raises(StorageError, match="'run' is a link"):
        _request(RunFolder(tmp_path / "run"), ())
    assert os.listdir(precious.parent) == [precious.name]


def test_the_log_of_a_worker_is_written_through_no_link(tmp_path: Path, precious: Path) -> None:
    """Before, the output of a worker went through a link of the name of its log."""
    from engine.runtime.process.spawner import start_linked

    log = tmp_path / "worker-0.log"
    log.symlink_to(precious)
    with pytest.raises(StorageError, match=r"worker-0\.log' is a link"):
        start_linked(cast(Any, None), "worker", 0, log, [])
    assert precious.read_text() == "precious"


def test_a_pipe_in_the_place_of_a_file_blocks_nothing(tmp_path: Path) -> None:
    """Before, a pipe named like a file of a run stopped a command for ever."""
    for name in ("events.jsonl", "results.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(StorageError):
            WRITERS[name](tmp_path)
    os.mkfifo(tmp_path / "run.json")
    WRITERS["run.json"](tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == {"steps": 1}


def test_a_name_of_a_temporary_file_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was made of the file's name and the process number, and opened through a link."""
    names: list[str] = []
    replace = os.replace

    def noted(source: str, target: str, **folders: int) -> None:
        names.append(source)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(2):
        write_atomically(tmp_path / "a.txt", "text")
    assert len({*names}) == 2
    assert all(len(name) == len(".bamboo-0123456789abcdef.tmp") for name in names)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_summary_of_a_workflow_goes_through_no_link(tmp_path: Path, precious: Path) -> None:
    """Before, the lines of the summary were added to the file behind a link."""
    from engine.files.atomic_write import open_to_append

    (tmp_path / "summary").symlink_to(precious)
    with pytest.raises(StorageError, match="'summary' is a link"):
        open_to_append(tmp_path / "summary")


# --- Files that the user names ---


NAMED = {
    "report --page": ("report", "--page"),
    "report --output": ("report", "--table", "steps", "--output"),
    "report --trace": ("report", "--trace"),
    "schema --output": ("schema", "--output"),
}


@pytest.mark.parametrize("named", NAMED)
def test_a_link_that_the_user_names_is_replaced(
    named: str, run: Path, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a link in a folder from elsewhere took the file that a command writes anywhere."""
    monkeypatch.setenv("BAMBOO_RESULTS", str(run.parent))
    link, through = tmp_path / "out", tmp_path / "linked"
    through.symlink_to(precious.parent)
    link.symlink_to(precious)
    assert say(*NAMED[named], link).exit_code == 0
    assert precious.read_text() == "precious"
    assert link.lstat().st_size > 100 and not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) & 0o444, "a file for the user has the mode of the umask"
    link.chmod(0o640)
    assert say(*NAMED[named], link).exit_code == 0
    assert stat.S_IMODE(link.stat().st_mode) == 0o640
    assert say(*NAMED[named], through / "mine").exit_code == 0  # the folder was named by the user
    assert sorted(os.listdir(precious.parent)) == [precious.name, "mine"]


def test_a_device_and_a_pipe_that_the_user_names_are_written_into(run: Path, tmp_path: Path) -> None:
    command = ("report", run, "--table", "steps", "--format", "csv", "--output")
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert say(*command, tmp_path / "pipe").exit_code == 0
    reader.join(5)
    assert read[0].startswith("run,step,epoch")
    assert (tmp_path / "pipe").is_fifo()
    ours, theirs = os.pipe()
    with open(ours, encoding="utf-8") as end:
        assert say(*command, f"/dev/fd/{theirs}").exit_code == 0
        os.close(theirs)
        assert end.read() == read[0]
    assert say(*command, os.devnull).exit_code == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with (tmp_path / "file").open("w+") as file:  # as `> file`, with text in it already
        file.write("first\n")
        file.flush()
        assert say(*command, f"/dev/fd/{file.fileno()}").exit_code == 0
        assert (tmp_path / "file").read_text() == f"first\n{read[0]}"


# --- The link to the newest run ---


FOREIGN_LATEST: dict[str, Callable[[Path, Path], object]] = {
    "file": lambda path, other: path.write_text("precious"),
    "folder": lambda path, other: path.mkdir(),
    "link to a folder": lambda path, other: path.symlink_to(other),
    "link upwards": lambda path, other: path.symlink_to(f"../{other.name}"),
    "link to a release": lambda path, other: path.symlink_to("release-5"),
    "link to a run elsewhere": lambda path, other: path.symlink_to(other / "20260304-120506-gpt-0a1f"),
    "name that ends in newline": lambda path, other: path.symlink_to("20260304-120506-gpt-0a1f\n"),
    "link in a loop": lambda path, other: path.symlink_to("latest"),
}


def identity(path: Path) -> tuple[int, ...]:
    """Returns what a replaced or changed file differs in; the time of its last use changes with a mere look."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize("kind", FOREIGN_LATEST)
def test_a_foreign_latest_is_left_alone_and_told(kind: str, tmp_path: Path) -> None:
    """Before, a file or a link named ``latest`` was replaced, in any folder that a job named for its results."""
    results, other = tmp_path / "results", tmp_path / "other"
    (other / "20260304-120506-gpt-0a1f").mkdir(parents=True)
    results.mkdir()
    FOREIGN_LATEST[kind](results / "latest", other)
    before = identity(results / "latest")
    told: list[str] = []
    run = create_run_folder(results, "gpt", NOON, "0a1f", told.append)
    hint = "rename it, or choose another folder with --results"
    about = f"{str(results / 'latest')!r} is not a link that bamboo made, and is left alone ({hint})"
    assert told == [f"{about}; this run is {run.path.name}"]
    (found,) = {each for _ in range(2) for each in (find_run(results), find_run(results, "latest"))}
    assert found == run, "the newest run is found without the link"
    assert say("clean", "--results", results, "--keep", "0").exit_code == 0
    assert identity(results / "latest") == before
    assert [each for each in os.listdir(results) if each[0] == "."] == []


def test_bamboos_own_latest_is_replaced(tmp_path: Path) -> None:
    told: list[str] = []
    create_run_folder(tmp_path, "gpt", NOON, "0a1f", told.append)
    second = create_run_folder(tmp_path, "gpt", NOON, "0a20", told.append)
    assert (latest_name(tmp_path), told) == (second.path.name, [])


# --- Names ---


BAD_NAMES = (
    "20260304-120506-gpt-0a1f\n",
    "\n20260304-120506-gpt-0a1f",
    "20260304-120506-g\npt-0a1f",
    "20260304-120506-gpt-0a1f\r",
    "\u0662\u0660\u0662\u0666\u0660\u0663\u0660\u0664-120506-gpt-0a1f",
)


def test_names_that_end_in_newline_match_nothing(tmp_path: Path) -> None:
    """Before, digits of other scripts made the name of a run, and the newest matrix could end in any text."""
    for folder in (tmp_path, tmp_path / "matrices"):
        for name in BAD_NAMES:
            (folder / name).mkdir(parents=True)
            (folder / name / "events.jsonl").write_text(json.dumps({"event": "job", "pid": GONE_PID}) + "\n")
    for name in ("9\n-9-smoke-0000", "99999999-999999-x\n-smoke-ffff"):
        (tmp_path / "matrices" / name).mkdir()
    newest = new_folder(tmp_path, "smoke", NOON, "0a1f")
    assert (run_names(tmp_path), newest_folder(tmp_path, "smoke")) == ([], newest)
    assert say("list", "runs", "--results", tmp_path).stdout == f"no runs in {str(tmp_path)!r}\n"
    assert say("clean", "--keep", "0", "--results", tmp_path).exit_code == 0
    left = [each for each in os.listdir(tmp_path / "matrices") if each in BAD_NAMES]
    assert sorted(left) == sorted(BAD_NAMES) == sorted(each for each in os.listdir(tmp_path) if each != "matrices")


def test_a_run_name_with_an_impossible_date_is_listed(tmp_path: Path) -> None:
    """Before, one folder with such a name ended `bamboo list` with an internal error."""
    (tmp_path / "20261399-999999-gpt-0a1f").mkdir()
    told = say("list", "runs", "--results", tmp_path)
    assert (told.exit_code, "20261399-999999-gpt-0a1f" in told.stdout) == (0, True)


def test_a_result_that_names_another_folder_is_none(tmp_path: Path) -> None:
    """Before, a result in a matrix from elsewhere could name the folder into which a page was written."""
    bad = ("../../../home", "/etc", "20260304-120506-gpt-0a1f\n", "20260304-120506-gpt-0a1f/../..")
    lines = [json.dumps(asdict(CELL) | {"cell": name, "run": name}) for name in (*bad, "20260304-120506-gpt-0a1f")]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, "[" * 60_000, "7", "{}"]) + "\n")
    assert list(read_results(tmp_path)) == ["20260304-120506-gpt-0a1f"]


# --- Lists and deletion ---


def dead_run(results: Path, hour: int = 1) -> Path:
    """Makes the folder of a run that was killed while it had a store."""
    folder = create_run_folder(results, "mlp", datetime(2026, 1, 1, hour), "abcd")
    (folder.logs / "etcd").mkdir()
    (folder.logs / "etcd" / "wal").touch()
    (folder.logs / "worker-0.log").touch()
    folder.events.write_text(json.dumps({"event": "job", "pid": GONE_PID, "at_ns": 1}) + "\n")
    return folder.path


def test_a_folder_that_becomes_a_link_before_its_deletion_loses_nothing_outside(tmp_path: Path) -> None:
    """Before, the files behind a link that took the place of a folder between search and deletion were deleted."""
    results, own = tmp_path / "results", tmp_path / "own"
    run = dead_run(results)
    (own / "etcd").mkdir(parents=True)
    for name in ("worker-0.log", "etcd/wal"):
        (own / name).write_text("precious")
    found, _ = leftovers(results, OldRuns())
    (run / "logs").rename(tmp_path / "away")
    (run / "logs").symlink_to(own)
    for each in found:
        delete(each)
    assert [(own / name).read_text() for name in ("worker-0.log", "etcd/wal")] == ["precious"] * 2
    run = dead_run(results, hour=2)
    found, _ = leftovers(results, None)
    run.rename(tmp_path / "run")
    run.symlink_to(tmp_path / "run")
    for each in found:
        delete(each)
    delete_dead_stores(results)
    assert (tmp_path / "run" / "logs" / "etcd" / "wal").exists()


@pytest.mark.parametrize("name", ["matrices", "matrices/20260101-000000-smoke-abcd/runs", "twins"])
def test_nothing_behind_a_link_between_folders_is_deleted(name: str, tmp_path: Path) -> None:
    """Before, `bamboo clean --keep 0` deleted the matrices behind a link of that name."""
    own, link = tmp_path / "own", tmp_path / "results" / name
    for folder in (own, own / "20260101-000000-smoke-abcd" / "runs"):
        run = dead_run(folder)
        os.utime(run / "events.jsonl", (1, 1))
    (own / f"{'0' * 32}.csv").touch()
    (own / "20260101-000000-smoke-abcd" / "results.jsonl").touch()
    os.utime(own / f"{'0' * 32}.csv", (1, 1))
    before = sorted(own.rglob("*"))
    link.parent.mkdir(parents=True)
    if "runs" in name:
        (link.parent / "results.jsonl").touch()
    link.symlink_to(own)
    told = say("clean", "--keep", "0", "--results", tmp_path / "results")
    assert told.exit_code == 0, told.output
    assert sorted(own.rglob("*")) == before


def test_a_hostile_folder_is_listed_and_cleaned_without_a_wait(tmp_path: Path) -> None:
    """Before, a pipe or a link to a device in the place of a run's file stopped `list` and `clean` for ever."""
    results, own = tmp_path / "results", tmp_path / "own"
    own.mkdir()
    (own / "20260101-000000-mlp-0000").mkdir()
    for hour, (name, plant) in enumerate(
        (
            ("events.jsonl", os.mkfifo),
            ("run.json", os.mkfifo),
            ("run.json", lambda path: path.symlink_to("/dev/zero")),
            ("events.jsonl", lambda path: path.symlink_to("/dev/zero")),
            ("run.json", lambda path: path.write_text("[" * 60_000)),
            ("run.json", lambda path: path.write_text('{"job": {"model": 5, "data": {}}}')),
        )
    ):
        run = dead_run(results, hour)
        (run / name).unlink(missing_ok=True)
        plant(run / name)
    (results / "20260101-000000-mlp-abce").symlink_to(own / "20260101-000000-mlp-0000")
    (results / "twins").mkdir()
    told = say("list", "runs", "--json", "--results", results)
    assert (told.exit_code, len(json.loads(told.stdout)["runs"])) == (0, 6), told.output
    assert say("clean", "--keep", "0", "--results", results).exit_code == 0
    assert (own / "20260101-000000-mlp-0000").exists()
    assert (results / "20260101-000000-mlp-abce").is_symlink()


def test_files_of_a_run_can_be_read_by_their_user_alone(tmp_path: Path) -> None:
    """Before, run.json and a kept twin had the mode of the umask."""
    before = os.umask(0)
    try:
        for name in ("run.json", "twins/a.csv", "events.jsonl", "results.jsonl"):
            WRITERS[name](tmp_path)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_a_shared_folder_reads_and_changes_no_file_of_a_run() -> None:
    """Before, kept twins could be written under an open umask, and a planted ``latest`` was replaced."""

    def as_another_user(*command: object) -> bool:
        done = subprocess.run(
            [str(each) for each in command], user=NOBODY, group=NOBODY, capture_output=True, check=False
        )
        return done.returncode == 0

    before = os.umask(0)
    try:
        with tempfile.TemporaryDirectory(prefix="bamboo-shared-") as shared:
            results = Path(shared)
            results.chmod(0o1777)
            assert as_another_user("ln", "-s", "/etc/passwd", results / "latest")
            told: list[str] = []
            run = create_run_folder(results, "gpt", NOON, "0a1f", told.append)
            assert len(told) == 1 and os.readlink(results / "latest") == "/etc/passwd"
            for name in ("run.json", "trajectory.csv", "events.jsonl"):
                WRITERS[name](run.path)
            keep_twin(results, "a", ROWS)
            for path in (run.run_json, run.trajectory, run.events, results / "twins" / "a.csv"):
                assert not as_another_user("cat", path), path
                assert not as_another_user("sh", "-c", f"echo x >> {path}"), path
            assert not as_another_user("mv", run.path, results / "away")
            assert as_another_user("ls", results)
    finally:
        os.umask(before)
