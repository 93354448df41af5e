"""Pieces of shared memory of this user, which do not name their creator: files in a folder of the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is made there
_PROC = Path("/proc")
_OF_NCCL = "nccl-"


def shared_memory() -> set[str]:
    """Returns the names of this user's pieces."""
    try:
        return {each.name for each in SHARED_MEMORY.iterdir() if each.stat().st_uid == os.geteuid()}
    except OSError:
        return set()


def held(names: set[str]) -> set[str]:
    """Returns those names in shared memory that a process has open or mapped."""
    found: set[str] = set()
    for entry in _PROC.iterdir() if names else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                known = [(entry / "maps").read_text(), *_open_files(entry)]
                found |= {name for name in names if any(f"{SHARED_MEMORY}/{name}" in each for each in known)}
    return found


def _open_files(process: Path) -> Iterator[str]:
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            yield os.readlink(each)


@contextlib.contextmanager
def swept_of_nccl() -> Iterator[None]:
    """Removes behind the block the pieces of NCCL that are new by then, and held by no process.

    A worker that is killed while two workers of a host connect their GPUs leaves one: the last of them would remove it.
    """
    before = shared_memory()
    try:
        yield
    finally:
        new = {name for name in shared_memory() - before if name.startswith(_OF_NCCL)}
        for name in new - held(new):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
