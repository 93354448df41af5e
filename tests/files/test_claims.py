"""Parts that a killed run left in a shared folder are removed once its death is proved, and no others."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from engine.core.errors import StorageError
from engine.core.manifest import owner_of
from engine.files import checkpoint_folder as claims
from engine.files.checkpoint_folder import checkpoints_at, claimed, sweep
from tests.files.made_checkpoints import save

CLAIM = """
import sys, time
from engine.files.checkpoint_folder import claimed
with claimed(sys.argv[1], "killed"):
    print("claimed", flush=True)
    time.sleep(60)
"""


def left_part(place: Path, run: str, step: int = 5) -> str:
    part = checkpoints_at(place, run=run).write_part(step, 0, [b"x"])
    return f"step-{step:08d}/{part.file}"


@contextmanager
def launcher(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed the place for the run 'killed'; it is dead at the end."""
    with subprocess.Popen([sys.executable, "-c", CLAIM, str(place)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.send_signal(signal.SIGKILL)


def test_parts_of_a_killed_launcher_go_and_those_of_live_and_unknown_runs_stay(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(claimed(str(tmp_path), "live"))
        with launcher(tmp_path):
            theirs = left_part(tmp_path, "killed")
            lives, unknown = left_part(tmp_path, "live"), left_part(tmp_path, "unknown")
            named = save(checkpoints_at(tmp_path, run="killed"), 5)
            assert sweep(str(tmp_path)) == ()
        assert sweep(str(tmp_path), is_trial=True) == (theirs,)
        assert (tmp_path / theirs).exists()
        assert sweep(str(tmp_path)) == (theirs,)
        assert sorted(checkpoints_at(tmp_path).orphans()) == sorted((lives, unknown))
        assert checkpoints_at(tmp_path).names() == (named,)
        checkpoints_at(tmp_path).verify(named)
        assert [path.name for path in tmp_path.glob(".*")] == [f".bamboo-run-{owner_of('live')}.lock"]
        assert sweep(str(tmp_path), believed=True) == (unknown,)
    assert list(tmp_path.glob(".*")) == []


def test_half_of_a_manifest_goes_with_its_run(tmp_path: Path) -> None:
    with launcher(tmp_path):
        left_part(tmp_path, "killed")
        half = tmp_path / "step-00000005" / f".bamboo-{owner_of('killed')}01234567.tmp"
        half.write_bytes(b"{")
    assert len(sweep(str(tmp_path))) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_claim_from_before_the_machine_s_start_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher(tmp_path):
        theirs = left_part(tmp_path, "killed")
    start = tmp_path / "boot_id"
    start.write_text("another")
    monkeypatch.setattr(claims, "_START", start)
    assert sweep(str(tmp_path)) == ()
    assert sweep(str(tmp_path), believed=True) == (theirs,)


def test_an_object_store_has_no_claims(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    with claimed(place, "live"), claimed("", "live"):
        part = checkpoints_at(place, run="live").write_part(5, 0, [b"x"])
    assert sweep(place) == ()
    assert sweep(place, believed=True) == (f"step-00000005/{part.file}",)


def test_a_claim_on_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="No space left"), claimed(str(tmp_path), "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"), claimed(str(tmp_path / "file" / "below"), "run"):
        pass


def test_a_run_lives_as_long_as_one_of_the_hosts_that_have_coordinated_it(tmp_path: Path) -> None:
    """The claim of the first one stays when it is killed; no sweep takes the parts that its workers write now."""
    with launcher(tmp_path):
        part = left_part(tmp_path, "killed")
        with claimed(str(tmp_path), "killed", "of-the-next-host"):
            pass
    with claimed(str(tmp_path), "killed", "of-the-next-host"), claimed(str(tmp_path), "killed", "of-the-third-host"):
        assert sweep(str(tmp_path)) == ()
    assert sweep(str(tmp_path)) == (part,)
    assert list(tmp_path.glob(".*")) == []


def test_a_claim_waits_for_an_earlier_keeper_of_its_run_that_is_dying(tmp_path: Path) -> None:
    """One that was given up may still hold its claim when the next one begins, which is no mistake of the user's."""
    steps = list[str]()

    def next_one() -> None:
        with claimed(str(tmp_path), "run"):
            steps.append("claimed again")

    following = threading.Thread(target=next_one)
    with claimed(str(tmp_path), "run"):
        following.start()
        following.join(0.1)
        steps.append("released")
    following.join(10)
    assert steps == ["released", "claimed again"]
    assert os.listdir(tmp_path) == []


def test_a_claim_that_a_dead_keeper_of_the_run_has_left_is_taken_over(tmp_path: Path) -> None:
    with claimed(str(tmp_path), "run"):
        (name,) = os.listdir(tmp_path)
        left = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(left)
    (tmp_path / name).chmod(0o600)
    with claimed(str(tmp_path), "run"):
        assert (tmp_path / name).read_bytes() == left
    assert os.listdir(tmp_path) == []
