"""A disk that is full, fails or lies while a checkpoint is written: the one before stays, and the next one is kept."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.errors import StorageError
from engine.files.checkpoint_disk import (
    DiskTroubles,
    FailingCall,
    FaultyDisk,
    Trouble,
    damaging_disk,
    failing_disk,
    full_disk,
)
from engine.files.checkpoint_folder import CheckpointFolder, checkpoints_at
from engine.files.checkpoint_stores import FolderStorage
from tests.doubles.power_disk import PowerDisk
from tests.files.made_checkpoints import save


class Case:
    """A checkpoint of step 0 on a sound disk, which then has troubles."""

    def __init__(self) -> None:
        self.troubles = DiskTroubles()
        self.disk = PowerDisk()
        self.folder = CheckpointFolder(FolderStorage(FaultyDisk(self.disk, self.troubles), "memory"))
        self.older = save(self.folder, 0)
        self.told: list[str] = []

    def trouble(self, trouble: Trouble) -> None:
        trouble.tell = self.told.append
        self.troubles.add(trouble)


def test_a_disk_that_is_full_after_any_byte_leaves_the_one_before() -> None:
    sizes = Case()
    save(sizes.folder, 1)
    num_bytes = sum(
        len(sizes.disk.read(name, 10**6)) for name in sizes.disk.names() if name.startswith("step-00000001/")
    )
    for number in (*range(0, num_bytes, 11), 199, 200, num_bytes - 1):  # the first part has 200 bytes
        case = Case()
        case.trouble(full_disk(number))
        with pytest.raises(StorageError, match=r"cannot write 'memory/step-00000001/.*: No space left") as raised:
            save(case.folder, 1)
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.ENOSPC
        assert len(case.told) == 1
        case.folder.remove_orphans()
        assert [name for name in case.disk.names() if name.startswith("step-00000001")] in ([], ["step-00000001"])
        assert case.folder.newest_good().name == case.older
    newer = save(case.folder, 1)  # there is room again
    assert case.folder.newest_good().name == newer


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("files", [1, 2])
def test_an_error_of_a_call_leaves_the_one_before(call: FailingCall, files: int) -> None:
    case = Case()
    case.trouble(failing_disk(call, files))
    for _ in range(files):
        with pytest.raises(StorageError, match="Input/output error"):
            save(case.folder, 1)
    assert case.folder.newest_good().name == case.older
    assert case.folder.newest_good(step=1).name is None
    assert len(case.told) == files
    assert case.folder.verify(save(case.folder, 1))


def test_an_error_of_a_read_refuses_a_checkpoint_and_the_older_one_is_taken() -> None:
    case = Case()
    newer = save(case.folder, 1)
    manifests = len(case.folder.names())
    case.troubles.add(failing_disk("read"))
    assert case.folder.newest_good().name == newer  # the manifest of step 0 could not be read
    assert manifests == 2
    case.trouble(Trouble("read", errno.EIO, files=3))  # both manifests, and none is left
    found = case.folder.newest_good()
    assert found.name is None
    assert len(found.refused) == 2
    assert case.told[0].startswith("read of step-00000000/manifest-")


class UnsureDisk(PowerDisk):
    """A disk that gives a manifest its name, and then cannot say whether the name is on disk."""

    def rename(self, name: str, new: str) -> None:
        super().rename(name, new)
        self.is_renamed = True

    def sync_folder(self, name: str) -> None:
        if getattr(self, "is_renamed", False):
            self.is_renamed = False
            raise OSError(errno.EIO, "Input/output error")
        super().sync_folder(name)


def test_a_manifest_whose_name_may_not_be_on_disk_is_taken_back() -> None:
    folder = CheckpointFolder(FolderStorage(UnsureDisk(), "memory"))
    with pytest.raises(StorageError, match="Input/output error"):
        save(folder, 0)
    assert folder.names() == ()
    parts = [name.partition("/")[2] for name in folder.orphans()]
    folder.remove_parts(0, parts)
    assert len(parts) == 2
    assert folder.orphans() == ()


def test_a_changed_byte_is_found_by_the_reader() -> None:
    for number in range(0, 1000, 7):
        case = Case()
        case.trouble(damaging_disk(number))
        save(case.folder, 1)  # nothing is said
        assert len(case.told) == 1
        found = case.folder.newest_good()
        assert found.name == case.older
        file = case.told[0].split()[3]  # the manifest has a temporary name when it is written
        assert (file if file.endswith("safetensors") else "manifest-") in found.refused[0].reason


@pytest.mark.parametrize("trouble", [full_disk(250), failing_disk("write"), failing_disk("sync"), damaging_disk(250)])
def test_an_object_store_has_troubles_too(trouble: Trouble, tmp_path: Path) -> None:
    troubles, told = DiskTroubles(), list[str]()
    folder = checkpoints_at(f"memory://{tmp_path.name}", troubles=troubles)
    older = save(folder, 0)
    troubles.add(replace(trouble, tell=told.append))
    if trouble.error:
        with pytest.raises(StorageError, match=r"cannot write 'memory://.*(No space|Input/output error)"):
            save(folder, 1)
    else:
        save(folder, 1)
    assert len(told) == 1
    assert folder.newest_good().name == older
    folder.remove_orphans()
    assert folder.verify(save(folder, 2))
    troubles.add(failing_disk("read"))
    assert folder.newest_good(step=2).name is not None  # the first manifest that is read is an older one


def test_a_folder_of_this_machine_has_troubles_too(tmp_path: Path) -> None:
    troubles = DiskTroubles()
    folder = checkpoints_at(tmp_path / "checkpoints", tmp_path, troubles)
    older = save(folder, 0)
    troubles.add(full_disk(250))
    with pytest.raises(StorageError, match="No space left on device"):
        save(folder, 1)
    assert len(list((tmp_path / "checkpoints" / "step-00000001").iterdir())) == 1  # the part that was whole
    assert len(folder.remove_orphans()) == 1
    assert folder.newest_good().name == older
