"""A file system that is frozen under the checkpoints, as a dead file server is: the launcher ends all the same."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.core.history.run_records import UnkeptRecord
from engine.runtime.agent import checkpoints
from engine.runtime.keeping.keeper import fork_keeper
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.process_state import process_state
from engine.runtime.process.subprocesses import is_readable
from tests.runtime.test_keeper import Run

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")


def call(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, capture_output=True, timeout=20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; it is thawed and gone in the end."""
    if lacking := [each for each in TOOLS if shutil.which(each) is None]:
        pytest.skip(f"no {', '.join(lacking)} here")
    if os.geteuid():
        pytest.skip("needs root, to freeze a file system")
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    call("mkfs.ext4", "-q", "-O", "^has_journal", image)
    try:
        call("mount", "-o", "loop", image, place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield place
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # a test has thawed it
            call("fsfreeze", "-u", place)
        call("umount", "-l", place)


def test_a_frozen_disk_holds_no_launcher(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited in `unlinkat` itself, until the thaw: two SIGINTs and SIGKILL changed nothing."""
    monkeypatch.setattr(checkpoints, "_END_S", 1.0)
    with ForkServer() as server:
        run = Run(disk, partial(fork_keeper, server))
        with run.keeper:
            run.write(0)
            call("fsfreeze", "-f", disk)
            run.agree(0)
            run.checkpoints.close()
            assert [type(each) for each in run.records] == [UnkeptRecord]
            assert run.records[0].why.endswith("has not answered for 1 s")
            (left, _) = run.state.notes
            pid = int(re.findall(r"pid (\d+)", left)[0])
            pidfd = os.pidfd_open(pid)
            assert process_state(pid, pidfd) == "D", "it waits for the disk, and SIGKILL does not end it"
    call("fsfreeze", "-u", disk)
    assert is_readable(pidfd, 20.0), "it ends with the thaw"
    os.close(pidfd)
