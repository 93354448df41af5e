"""Killed runs leave nothing for long: the next run and `bamboo clean` delete it, and nothing that is in use or foreign.

The folders are made by hand; `tests/e2e/test_clean_ends.py` kills real launchers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from engine.files.matrix_results import new_folder
from engine.files.run_folder import create_run_folder, find_run, point_latest_to_newest
from engine.harness.dead_runs import dead_run, delete_dead_stores
from engine.harness.run_list import Leftover, OldRuns, delete, leftovers
from engine.runtime.process.locks import folder_used

GONE_PID = 2**22 + 1  # above the largest pid of Linux
HOLDER = """
import sys
from pathlib import Path
from engine.runtime.process.locks import folder_used
with folder_used(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def make_run(results: Path, hour: int = 1, pid: int = GONE_PID) -> Path:
    """Makes the folder of a run that was killed while it had a store."""
    folder = create_run_folder(results, "mlp", datetime(2026, 1, 1, hour), "abcd")
    wal = folder.logs / "etcd" / "member" / "member" / "wal"
    wal.mkdir(parents=True)
    (wal / "0.tmp").write_bytes(bytes(100_000))
    (folder.logs / "etcd.log").write_text("a log\n")
    (folder.logs / "worker-0.log").touch()
    folder.events.write_text(json.dumps({"event": "job", "pid": pid, "at_ns": 1}) + "\n")
    (folder.path / ".run.json.77.tmp").write_text("half")
    return folder.path


@pytest.fixture(name="holder")
def _holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses a run folder, `tmp_path/held/<run>`, as a launcher does."""
    run = make_run(tmp_path / "held")
    command = [sys.executable, "-c", HOLDER, str(run)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def stores(results: Path) -> list[Path]:
    return sorted(results.rglob("logs/etcd"))


def clean(results: Path, old: OldRuns | None = None) -> dict[str, list[Path]]:
    """Deletes all leftovers; returns them by their words."""
    found, _ = leftovers(results, old)
    by_what: dict[str, list[Path]] = {}
    for each in found:
        delete(each)
        by_what.setdefault(each.what, []).append(each.path)
    point_latest_to_newest(results)
    return by_what


def test_the_store_of_a_killed_run_is_deleted_and_its_log_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "twin" / "logs" / "etcd").mkdir(parents=True)
    delete_dead_stores(tmp_path)
    assert stores(tmp_path) == []
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["etcd.log", "worker-0.log"]


def test_a_run_that_is_used_is_left_alone_until_its_launcher_is_killed(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    results = tmp_path / "held"
    (run,) = results.glob("2026*")
    delete_dead_stores(results)
    found, busy = leftovers(results, OldRuns())
    assert (len(stores(results)), found, busy) == (1, [], [run.name])
    holder.kill()
    holder.wait()
    with dead_run(run) as is_dead:
        assert is_dead
    delete_dead_stores(results)
    assert stores(results) == []


def test_a_run_that_begins_between_search_and_deletion_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found, _ = leftovers(tmp_path, OldRuns())
    (run / "events.jsonl").write_text(json.dumps({"event": "job", "pid": os.getpid()}) + "\n")
    assert [path for each in found for path in delete(each)] == [path for each in found for path in each.entries]
    assert len(stores(tmp_path)) == 1


def test_a_launcher_without_a_lock_is_known_by_its_pid_and_its_start(tmp_path: Path) -> None:
    run = make_run(tmp_path, pid=os.getpid())
    with dead_run(run) as is_dead:
        assert not is_dead
    os.utime(run / "events.jsonl", (1, 1))  # the last event is older than this process: the pid was given again
    with dead_run(run) as is_dead:
        assert is_dead


def test_a_run_with_its_end_in_its_records_goes_on_nowhere(tmp_path: Path) -> None:
    """Its pid may be one of a namespace, and another process of this machine may have that number."""
    run = make_run(tmp_path, pid=os.getpid())
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event":"ended","worker":-1}\n')
    with dead_run(run) as is_dead:
        assert is_dead


def test_an_error_inside_the_lock_is_told_and_the_lock_is_released(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(OSError, match="planted"), dead_run(run):
        raise OSError("planted")
    with dead_run(run) as is_dead:
        assert is_dead
    with dead_run(tmp_path / "none") as is_dead:
        assert not is_dead


def test_a_run_without_events_may_be_starting(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "events.jsonl").unlink()
    with dead_run(run) as is_dead:
        assert not is_dead
    os.utime(run, (1, 1))
    with dead_run(run) as is_dead:
        assert is_dead


def test_cleaning_keeps_runs_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, hour) for hour in (1, 2, 3)]
    assert set(clean(tmp_path)) == {"store of a killed run", "temporary file"}
    assert all((run / "events.jsonl").exists() for run in runs)
    assert clean(tmp_path) == {}
    assert clean(tmp_path, OldRuns(keep=2)) == {"run": runs[:1]}
    assert clean(tmp_path, OldRuns(older_than_s=3600)) == {}
    os.utime(runs[1] / "events.jsonl", (1, 1))
    assert clean(tmp_path, OldRuns(keep=2, older_than_s=3600)) == {}
    assert clean(tmp_path, OldRuns(older_than_s=3600)) == {"run": runs[1:2]}
    assert find_run(tmp_path).path == runs[2]
    clean(tmp_path, OldRuns())
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_and_behind_links_stay(tmp_path: Path) -> None:
    results, own = tmp_path / "results", tmp_path / "own"
    own.mkdir()
    (own / "worker-1.log").write_text("precious")
    run = make_run(results)
    (run / "notes.txt").write_text("precious")
    (run / "logs" / "worker-2.log").symlink_to(own / "worker-1.log")
    (run / "twin").symlink_to(own)
    (results / "README.md").write_text("precious")
    (results / "20260101-000000-mlp-abce").symlink_to(own)
    other = make_run(results, 2)
    (other / "logs" / "etcd").rename(own / "etcd")
    (other / "logs" / "etcd").symlink_to(own / "etcd")
    delete_dead_stores(results)
    (found,) = [each for each in leftovers(results, OldRuns())[0] if each.path == run]
    assert delete(found) == [run / "logs", run]
    clean(results, OldRuns())
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "own/etcd/member/member/wal/0.tmp",
        "own/worker-1.log",
        f"results/{run.name}/logs/worker-2.log",
        f"results/{run.name}/notes.txt",
        "results/README.md",
    ]


def test_the_leftovers_of_a_killed_matrix_are_found(tmp_path: Path) -> None:
    matrix = new_folder(tmp_path, "smoke", datetime(2026, 1, 1), "abcd")
    (matrix / "results.jsonl").touch()
    run = make_run(matrix / "runs")
    assert clean(tmp_path) == {
        "store of a killed run": [run / "logs" / "etcd"],
        "temporary file": [run / ".run.json.77.tmp"],
    }
    with folder_used(matrix):
        assert leftovers(tmp_path, OldRuns()) == ([], [matrix.name])
    assert clean(tmp_path, OldRuns(keep=1)) == {}
    assert clean(tmp_path, OldRuns()) == {"matrix": [matrix]}
    assert not matrix.exists()


def test_twins_that_no_run_can_use_again_are_deleted(tmp_path: Path) -> None:
    twins = tmp_path / "twins"
    twins.mkdir()
    for name in ("0" * 32, "my-own"):
        (twins / f"{name}.csv").write_text("rows")
    assert clean(tmp_path) == {}  # just written
    for path in twins.iterdir():
        os.utime(path, (1, 1))
    assert clean(tmp_path) == {"twin that no run here can use again": [twins / f"{'0' * 32}.csv"]}
    assert [path.name for path in twins.iterdir()] == ["my-own.csv"]


def test_the_size_is_that_on_disk(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (store,) = stores(tmp_path)
    (found,) = [each for each in leftovers(tmp_path, None)[0] if each.path == store]
    assert isinstance(found, Leftover)
    assert 100_000 <= found.num_bytes < 200_000
    assert run.exists()
