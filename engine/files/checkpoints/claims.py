"""The claims of runs on a folder of checkpoints that they share: one file each, locked as long as the launcher lives.

A run that is killed leaves parts that no manifest names. Another run removes them once their claim proves the death of
the run: its lock is free, and it was made on this machine since the machine started.

Rules: without a claim nothing is proved, and the parts stay; an object store has no claims. The parts are listed behind
the proof, because a dying run may still have named them. A run holds its claim before it writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from engine.core.checkpoints.manifest import owner_of
from engine.files.atomic_write import storage_errors
from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.files.checkpoints.disk import OwnDisk
from engine.files.checkpoints.place_text import folder_at

_CLAIM = re.compile(r"\.bamboo-run-([0-9a-f]{8})(-[0-9a-f]{8})?\.lock")
_START = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of the machine


@contextlib.contextmanager
def claimed(place: str, run: str, heir: str = "") -> Iterator[None]:
    """Claims a place for a run during the block; nothing is claimed at no place and in an object store.

    `heir` is the folder with which another host goes on with the run: it lives as long as one of its claims does.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = folder_at(place) if place else None
    if folder is None:
        yield
        return
    by = f"-{owner_of(heir)}" if heir not in ("", run) else ""
    disk, name = OwnDisk(folder), f".bamboo-run-{owner_of(run)}{by}.lock"
    with storage_errors("write", folder / name):
        disk.make_folder("")
        fd = _locked(disk, name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            disk.remove(name)
        os.close(fd)


def sweep(place: str, *, believed: bool = False, is_trial: bool = False) -> tuple[str, ...]:
    """Removes the parts of dead runs that no manifest names, or only finds them (`is_trial`); returns their names.

    Where the user has said that no run writes there (`believed`), parts stay of runs that are seen to live.

    Raises:
        StorageError: the place cannot be read or written.
    """
    kept, folder = checkpoints_at(place), folder_at(place)
    disk = OwnDisk(folder or Path())
    live, dead = set[str](), dict[str, list[str]]()

    def counts(owner: str) -> bool:
        return owner in dead or (believed and owner not in live)

    with contextlib.ExitStack() as locks, storage_errors("read", Path(place)):
        for name in disk.names() if folder is not None else ():
            if claim := _CLAIM.fullmatch(name):
                if locks.enter_context(_dead(disk, name, believed)):
                    dead.setdefault(claim[1], []).append(name)
                else:
                    live.add(claim[1])
        for owner in live:
            dead.pop(owner, None)
        if is_trial or not (dead or believed):
            return kept.orphans(counts)
        removed = kept.remove_orphans(counts)
        for name in (each for names in dead.values() for each in names):
            disk.remove(name)
    return removed


def _locked(disk: OwnDisk, name: str) -> int:
    """Returns a descriptor of a claim with its lock; a sweep may remove it before it has that.

    A claim that is there is of an earlier keeper of the same run, which may be dying: its lock is waited for.
    """
    while True:
        try:
            fd = disk.create(name)
        except FileExistsError:
            try:
                fd = disk.open(name)
            except FileNotFoundError:
                continue
        else:
            try:
                os.write(fd, _START.read_bytes())
            except OSError:  # as on a full disk
                os.close(fd)
                disk.remove(name)
                raise
        with contextlib.suppress(OSError):  # a file system without locks: nothing will prove a death there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


@contextlib.contextmanager
def _dead(disk: OwnDisk, name: str, believed: bool) -> Iterator[bool]:
    """Yields whether a claim proves the death of its run, or, if it is `believed`, does not disprove it."""
    fd = -1
    try:
        fd = disk.open(name)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_dead = believed or os.pread(fd, 100, 0) == _START.read_bytes()
    except OSError:
        is_dead = False
    try:
        yield is_dead
    finally:
        if fd >= 0:
            os.close(fd)
