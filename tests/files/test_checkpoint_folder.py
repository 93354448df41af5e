"""Checkpoints in a folder and in an object store: written, listed, verified, removed."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from engine.core.errors import StorageError, UserError
from engine.core.manifest import DamagedCheckpointError
from engine.files.checkpoint_disk import DiskTroubles, OwnDisk
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.files.checkpoint_stores import ObjectStorage
from tests.files.made_checkpoints import made_manifest, part_of, save, weights_of

Place = Callable[[], CheckpointFolder]
PLACES = ("folder", "memory", "file")


@pytest.fixture(params=PLACES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    """A place for checkpoints: a folder, or objects in memory or in files."""
    if request.param == "folder":
        return checkpoints_at(tmp_path / "checkpoints", tmp_path)
    root = f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/objects"
    return checkpoints_at(root) if request.param == "memory" else CheckpointFolder(ObjectStorage(root, DiskTroubles()))


def test_a_checkpoint_is_read_as_it_was_written(folder: CheckpointFolder) -> None:
    assert folder.names() == ()
    name = save(folder, 7)
    assert folder.names() == (name,)
    manifest = folder.verify(name)
    assert (manifest.step, manifest.loss, manifest.job["lr"]) == (7, 1 / 8, 0.002)
    kept = [folder.layer(manifest, layer).tensors["weight/w"].pieces[0] for layer in range(2)]
    assert kept == [weights_of(7, 0), weights_of(7, 1)]


def test_parts_without_a_manifest_are_no_checkpoint(folder: CheckpointFolder) -> None:
    folder.write_part(7, 0, [b"12", b"", memoryview(b"34")])
    assert folder.names() == ()
    assert folder.newest_good().manifest is None


def test_the_newest_good_one_is_found_and_newer_ones_are_named(folder: CheckpointFolder) -> None:
    save(folder, 5)
    newest = save(folder, 7)
    assert folder.newest_good().name == newest
    assert folder.newest_good(step=5).name == folder.names()[0]
    found = folder.newest_good(refuses=lambda manifest: "another model" if manifest.step == 7 else "")
    assert found.name == folder.names()[0]
    assert [(each.name, each.reason) for each in found.refused] == [(newest, "another model")]


def test_of_two_of_one_step_the_refused_one_is_named(folder: CheckpointFolder) -> None:
    for loss in (1.0, 2.0):
        save(folder, 7, loss=loss)
    bad, good = folder.names()
    wrong = folder.manifest(bad)
    found = folder.newest_good(refuses=lambda manifest: "another model" if manifest == wrong else "")
    assert (found.name, [each.name for each in found.refused]) == (good, [bad])


def test_pruning_leaves_the_newest_and_those_in_use(folder: CheckpointFolder) -> None:
    names = [save(folder, step) for step in range(5)]
    assert folder.prune(2, in_use=[names[1]]) == (names[0], names[2])
    assert folder.names() == (names[1], names[3], names[4])
    assert [folder.verify(name).step for name in folder.names()] == [1, 3, 4]
    assert folder.prune(0) == (names[1], names[3])
    assert folder.prune(0) == ()


def test_runs_in_one_place_count_their_own(folder: CheckpointFolder) -> None:
    older = [save(folder, step, run="20261120-a") for step in (10, 20, 30)]
    newer = [save(folder, step, run="20261121-b") for step in (10, 20)]
    assert folder.newest_good().name == newer[-1]
    assert folder.newest_good(run="20261120-a").name == older[-1]
    assert folder.prune(1, run="20261121-b") == (newer[0],)
    assert folder.verify(older[0]).run == "20261120-a"


def test_orphans_go_and_named_parts_stay(folder: CheckpointFolder) -> None:
    name = save(folder, 7)
    orphans = [folder.write_part(step, 0, [b"x"]).file for step in (7, 8)]
    assert [each.partition("/")[2] for each in folder.remove_orphans()] == orphans
    assert folder.verify(name)
    assert folder.remove_orphans() == ()


def test_a_manifest_that_is_not_whole_is_not_written(folder: CheckpointFolder) -> None:
    parts = [folder.write_part(7, layer, [b"x"]) for layer in range(2)]
    whole = made_manifest(7, parts)
    with pytest.raises(Exception, match="expected the parts of each layer"):
        folder.publish(replace(whole, parts=whole.parts[:1]))
    assert folder.names() == ()


def test_only_the_user_can_read_the_files(tmp_path: Path) -> None:
    save(checkpoints_at(tmp_path / "checkpoints", tmp_path), 7)
    for each in (tmp_path / "checkpoints").rglob("*"):
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    name = save(checkpoints_at(f"file://{tmp_path}/deep/down"), 7)
    assert checkpoints_at(tmp_path / "deep" / "down").names() == (name,)


def test_a_url_with_credentials_is_refused() -> None:
    with pytest.raises(UserError, match=r"without credentials, found 's3://\*\*\*'"):
        checkpoints_at("s3://me:mine@bucket/run")
    with pytest.raises(UserError, match="expected a folder or a URL, found 'nowhere://x'"):
        checkpoints_at("nowhere://x")


def test_a_folder_that_a_link_leads_to_is_refused_inside_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link, and bamboo follows none here"):
        save(checkpoints_at(tmp_path / "run" / "checkpoints", tmp_path / "run"), 7)
    name = save(checkpoints_at(tmp_path / "run" / "checkpoints"), 7)  # the user named it, and the link is the user's
    assert (tmp_path / "elsewhere" / str(name)).is_file()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an entry another user's, or this process another user."""
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.lchown(path, 4321, 4321)


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    give_away(tmp_path / "link", monkeypatch)
    with pytest.raises(StorageError, match="is a link of another user"):
        save(checkpoints_at(tmp_path / "link" / "checkpoints"), 7)


@pytest.mark.parametrize("what", [".", "step-00000007", "manifest"])
def test_a_folder_or_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = checkpoints_at(tmp_path)
    name = save(folder, 7)
    give_away(tmp_path / str(name) if what == "manifest" else tmp_path / what, monkeypatch)
    with pytest.raises(StorageError, match="it belongs to user"):
        folder.verify(name)


@pytest.mark.parametrize("how", ["link", "other user"])
def test_a_folder_of_a_step_that_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path, how: str) -> None:
    folder = checkpoints_at(tmp_path / "kept")
    names = [save(folder, step) for step in (5, 7)]
    newest = tmp_path / "kept" / "step-00000007"
    if how == "link":
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid():
        newest.chmod(0)
    else:
        os.chown(newest, 4321, 4321)
    assert folder.names() == (names[0], CheckpointName(7, ""))
    good = folder.newest_good()
    assert good.name == names[0]
    assert [each.reason.partition(":")[0] for each in good.refused] == [f"cannot read '{newest}'"]
    assert folder.orphans() == ()
    assert folder.prune(1) == ()


def test_an_alias_of_no_tensor_is_refused(tmp_path: Path) -> None:
    folder = checkpoints_at(tmp_path)
    good = folder.write_part(1, 0, [part_of(w=weights_of(1, 0))], aliases=(("other", "weight/w"),))
    assert folder.layer(made_manifest(1, [good]), 0).tensors.keys() == {"weight/w"}
    with pytest.raises(DamagedCheckpointError, match="'other' is an alias of no tensor"):
        folder.layer(made_manifest(1, [replace(good, aliases=(("other", "weight/v"),))]), 0)
    none = folder.write_part(1, 0, [b"no header"], aliases=(("other", "weight/w"),))
    with pytest.raises(DamagedCheckpointError, match="its header is too long"):
        folder.layer(made_manifest(1, [none]), 0)


def test_a_part_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    folder = checkpoints_at(tmp_path / "checkpoints")

    def chunks() -> object:
        yield b"1234"
        raise DamagedCheckpointError("the copy went wrong")

    with pytest.raises(DamagedCheckpointError):
        folder.write_part(7, 0, chunks())  # type: ignore[arg-type]
    assert list((tmp_path / "checkpoints" / "step-00000007").iterdir()) == []


def test_a_path_that_leads_elsewhere_is_walked_again(tmp_path: Path) -> None:
    place = tmp_path / "place"
    folder = checkpoints_at(place, tmp_path)
    first = save(folder, 1)
    place.rename(tmp_path / "moved")
    assert save(folder, 2) in folder.names()
    assert first not in folder.names()
    shutil.rmtree(place)
    place.symlink_to("moved")
    with pytest.raises(StorageError, match="link"):
        save(folder, 3)


def test_a_held_folder_that_is_given_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints_at(tmp_path / "place")
    save(folder, 1)
    give_away(tmp_path / "place", monkeypatch)
    with pytest.raises(StorageError, match="user"):
        save(folder, 2)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    for number in range(20):
        folder = checkpoints_at(tmp_path / str(number))
        save(folder, 1)
        folder.prune(1)
    del folder
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    assert [each for each in links if os.path.realpath(each).startswith(str(tmp_path))] == []


def test_pruning_reads_no_manifest_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = save(checkpoints_at(tmp_path), 0)
    folder = checkpoints_at(tmp_path)
    names = [save(folder, step) for step in range(1, 4)]
    read, real = list[str](), OwnDisk.read

    def noted(disk: OwnDisk, name: str, most: int) -> bytes:
        read.append(name)
        return real(disk, name, most)

    monkeypatch.setattr(OwnDisk, "read", noted)
    assert [name.step for name in folder.prune(2)] == [0, 1]
    assert read == [str(other)] * 2  # to know its run, and to know its parts
    assert folder.verify(names[-1]).step == 3


def test_a_part_is_written_although_another_process_removes_its_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of an earlier attempt at the step go, then the folder, between its creation and that of the part."""
    folder, made, real = checkpoints_at(tmp_path), list[str](), OwnDisk.make_folder

    def make_folder(disk: OwnDisk, name: str) -> None:
        real(disk, name)
        made.append(name)
        if name and made.count(name) < 3:
            folder.remove_parts(1, [])

    monkeypatch.setattr(OwnDisk, "make_folder", make_folder)
    part = folder.write_part(1, 0, [b"weights"])
    assert part.size == 7
    assert made.count(made[-1]) == 3
