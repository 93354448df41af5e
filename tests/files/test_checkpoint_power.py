"""The power is cut before every call that writes, syncs, renames or removes: a whole checkpoint is always there.

After the cut the disk has what was synced, and of the rest nothing, some entries, or everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest

from engine.files.checkpoint_folder import CheckpointFolder
from engine.files.checkpoint_storage import Bytes, WrittenFile
from engine.files.checkpoint_stores import FolderStorage
from tests.doubles.power_disk import PowerCut, PowerDisk, UnsyncedFiles, UnsyncedFolders
from tests.files.made_checkpoints import save, weights_of

STEPS = range(3)
KEEP = 1
Said = Callable[[int], object]


def train(folder: CheckpointFolder, said: Said) -> None:
    """Keeps a checkpoint of each step, says so, and removes the old ones."""
    for step in STEPS:
        save(folder, step)
        said(step)
        folder.prune(KEEP)


def folder_on(disk: PowerDisk) -> CheckpointFolder:
    return CheckpointFolder(FolderStorage(disk, "memory"))


def problems(
    make: Callable[[int | None], PowerDisk] = PowerDisk,
    folder_on: Callable[[PowerDisk], CheckpointFolder] = folder_on,
    train: Callable[[CheckpointFolder, Said], None] = train,
) -> Iterator[str]:
    """Cuts the power before every call, looks at every disk that may be left, and yields all that is wrong there."""
    whole = make(None)
    train(folder_on(whole), lambda step: None)
    for cut in range(whole.num_calls + 1):
        disk, kept = make(cut), [-1]
        with suppress(PowerCut):
            train(folder_on(disk), kept.append)
        for number, left in enumerate(disk.survivors()):
            yield from (f"cut {cut}, disk {number}: {problem}" for problem in wrong_on(left, kept[-1]))


def wrong_on(disk: PowerDisk, kept: int) -> Iterable[str]:
    """Yields all that is wrong on a disk after the cut; the checkpoint of step `kept` was there before."""
    folder = CheckpointFolder(FolderStorage(disk, "memory"))
    newest = folder.newest_good()
    step = newest.manifest.step if newest.manifest else -1
    if step not in (kept, kept + 1):
        yield f"the newest good one is of step {step}, and that of step {kept} was kept"
    if newest.manifest:
        found = [folder.layer(newest.manifest, each.layer).tensors for each in newest.manifest.layers]
        if [bytes(each["weight/w"].pieces[0]) for each in found] != [weights_of(step, at) for at in range(len(found))]:
            yield f"other bits at step {step}"
    yield from (f"refused: {each.reason}" for each in newest.refused)
    # The run goes on, on the same disk.
    folder.remove_orphans()
    if newest.manifest and (again := folder.newest_good().manifest) != newest.manifest:
        yield f"without orphans: {again}"
    save(folder, 9)
    folder.prune(1)
    if [name.step for name in folder.names()] != [9] or folder.newest_good().manifest is None:
        yield f"after another one there are {folder.names()}"


def test_a_whole_checkpoint_is_left_by_every_cut() -> None:
    assert list(problems()) == []


class ManifestFirst(FolderStorage):
    """Planted: the parts are written behind the manifest."""

    def __init__(self, disk: PowerDisk) -> None:
        super().__init__(disk, "memory")
        self._parts: list[tuple[str, bytes]] = []
        self._disk = disk

    def create(self, name: str, chunks: Iterable[Bytes]) -> WrittenFile:
        self._disk.make_folder(name.rpartition("/")[0])
        data = b"".join(chunks)
        self._parts.append((name, data))
        return WrittenFile(len(data), hashlib.sha256(data).hexdigest())

    def publish(self, name: str, data: bytes) -> None:
        super().publish(name, data)
        for part, content in self._parts:
            super().create(part, [content])
        self._parts = []


def prune_first(folder: CheckpointFolder, said: Said) -> None:
    """Planted: the old checkpoints go before the new one is there."""
    for step in STEPS:
        for name in folder.names():
            folder.remove(name)
        save(folder, step)
        said(step)


@pytest.mark.parametrize("make", [UnsyncedFiles, UnsyncedFolders])
def test_a_missing_sync_is_caught(make: Callable[[int | None], PowerDisk]) -> None:
    assert any(problems(make))


def test_a_manifest_before_its_parts_is_caught() -> None:
    assert any(problems(folder_on=lambda disk: CheckpointFolder(ManifestFirst(disk))))


def test_removal_before_the_new_one_is_there_is_caught() -> None:
    assert any("the newest good one is of step -1" in each for each in problems(train=prune_first))
