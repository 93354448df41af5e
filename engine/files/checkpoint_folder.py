"""The checkpoints in one place: the manifest is written last and removed first, and every read checks all hashes.

Rules: a reader that finds a manifest finds all of its parts. The bytes that are hashed are the bytes that are parsed. A
checkpoint whose files differ from the manifest is refused with the name of the file, and the next older one is tried.
Several runs may write to one place: each counts and removes only its own checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from engine.codec.manifests import manifest_bytes, manifest_of
from engine.core.checkpoint_rules import may_go
from engine.core.errors import StorageError
from engine.core.manifest import (
    MOST_BYTES,
    DamagedCheckpointError,
    Manifest,
    Part,
    StoredLayer,
    Strides,
    is_manifest,
    layer_in,
    manifest_file,
    nonce_of,
    owner_of,
    part_file,
    step_folder,
    step_of,
    writer_of,
)
from engine.files.atomic_write import storage_errors
from engine.files.checkpoint_disk import Disk, DiskTroubles, FaultyDisk, OwnDisk
from engine.files.checkpoint_storage import Bytes, Storage, folder_at, refuse_too_large
from engine.files.checkpoint_stores import FolderStorage, ObjectStorage


class CheckpointName(NamedTuple):
    """The name of a checkpoint: its step, and the file of its manifest, or no file for an unreadable folder."""

    step: int
    file: str

    def __str__(self) -> str:
        return f"{step_folder(self.step)}/{self.file}"


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that must not be used, and the reason, which names a file."""

    name: CheckpointName
    reason: str


@dataclass(frozen=True, slots=True)
class NewestGood:
    """The newest intact checkpoint, if there is one, and the newer ones that were refused."""

    name: CheckpointName | None
    manifest: Manifest | None
    refused: tuple[RefusedCheckpoint, ...]


class CheckpointFolder:
    """The checkpoints in a storage, to which the run `owner` writes; every method may raise StorageError."""

    def __init__(self, storage: Storage, owner: str = ""):
        self._storage = storage
        self._owner = owner
        self._written: dict[CheckpointName, Manifest] = {}  # by this object, and not removed by it

    @property
    def place(self) -> str:
        """The folder or the URL."""
        return self._storage.place

    def try_writing(self) -> None:
        """Writes and removes a part."""
        self.remove_parts(0, [self.write_part(0, 0, [b""]).file])

    def write_part(
        self,
        step: int,
        layer: int,
        chunks: Iterable[Bytes],
        *,
        shard: int = 0,
        shards: int = 1,
        strides: Strides = (),
        transient: tuple[str, ...] = (),
        aliases: tuple[tuple[str, str], ...] = (),
        position: str = "",
    ) -> Part:
        """Writes one part of a coming checkpoint to disk, and returns it."""
        file = part_file(layer, shard, shards, nonce_of(self._owner, os.urandom(8)))
        written = self._storage.create(f"{step_folder(step)}/{file}", chunks)
        return Part(layer, shard, shards, file, written.size, written.sha256, strides, transient, aliases, position)

    def publish(self, manifest: Manifest) -> CheckpointName:
        """Writes the manifest after all of its parts; from now on the checkpoint exists."""
        data = manifest_bytes(manifest)
        name = CheckpointName(manifest.step, manifest_file(data))
        try:
            self._storage.publish(str(name), data)
        except StorageError:
            with suppress(StorageError):  # it may exist already; the caller removes the parts
                self._storage.remove(str(name))
            raise
        self._written[name] = manifest
        return name

    def names(self) -> tuple[CheckpointName, ...]:
        """Returns the names of all checkpoints, good or not, by step."""
        paths = (name.rpartition("/") for name in self._storage.names())
        steps = ((step_of(folder), file) for folder, _, file in paths if is_manifest(file) or not file)
        return tuple(sorted(CheckpointName(step, file) for step, file in steps if step is not None))

    def runs(self, is_wanted: Callable[[Manifest], bool]) -> tuple[str, ...]:
        """Returns the runs with a manifest that can be read and is wanted, by name."""
        return tuple(sorted({manifest.run for manifest, _ in self._read_all("")[0] if is_wanted(manifest)}))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Returns the manifest of a checkpoint; raises DamagedCheckpointError if it is damaged."""
        return manifest_of(str(name), self._storage.read(str(name), MOST_BYTES))

    def layer(self, manifest: Manifest, layer: int) -> StoredLayer:
        """Returns the tensors of a layer; all readers of checkpoints use this.

        Raises StorageError if a part cannot be read, is damaged, or has other weights than the run had.
        """

        def bytes_of(part: Part) -> bytes:
            name = f"{manifest.folder}/{part.file}"
            refuse_too_large(name, part.size)
            return self._storage.read(name, part.size)

        return layer_in(manifest, layer, ((part, bytes_of(part)) for part in manifest.parts_of(layer)))

    def verify(self, name: CheckpointName) -> Manifest:
        """Returns the manifest of a checkpoint if all of it is intact; else raises StorageError."""
        manifest = self.manifest(name)
        for entry in manifest.layers:
            self.layer(manifest, entry.layer)
        return manifest

    def newest_good(
        self, run: str = "", step: int | None = None, refuses: Callable[[Manifest], str] = lambda manifest: ""
    ) -> NewestGood:
        """Returns the newest good checkpoint: of one run, or of the newest run that has one; at `step`, or at any.

        `refuses` returns why an intact checkpoint cannot be used, or an empty string.
        """
        readable, refused = self._read_all(run)
        for manifest, name in sorted(readable, key=lambda entry: (entry[0].run, entry[0].step), reverse=True):
            if step in (None, name.step):
                reason = refuses(manifest)
                try:
                    if not reason:
                        self.verify(name)
                        newer = (refusal for refusal in refused if refusal.name.step >= name.step)
                        return NewestGood(name, manifest, tuple(newer))
                except StorageError as error:
                    reason = str(error)
                refused.append(RefusedCheckpoint(name, reason))
        return NewestGood(None, None, tuple(refused))

    def old(
        self, keep: int, run: str = "", in_use: Collection[CheckpointName] = (), *, is_verified: bool = False
    ) -> tuple[CheckpointName, ...]:
        """Returns the checkpoints older than the `keep` newest ones of their run, for one run or for all.

        With `is_verified` bad ones do not count; else the caller has just written the newest one.
        """
        by_run: dict[str, list[CheckpointName]] = {}
        for manifest, name in self._read_all(run, {} if is_verified else self._written)[0]:
            by_run.setdefault(manifest.run, []).append(name)
        gone: list[CheckpointName] = []
        for names in by_run.values():
            good = list(names)
            for name in names if is_verified else ():
                try:
                    self.verify(name)
                except StorageError:
                    good.remove(name)
            gone += may_go(names, keep, good, in_use)
        return tuple(gone)

    def prune(self, keep: int, run: str = "", in_use: Collection[CheckpointName] = ()) -> tuple[CheckpointName, ...]:
        """Removes the old checkpoints, as `old` says, and returns their names."""
        gone = self.old(keep, run, in_use)
        for name in gone:
            self.remove(name)
        return gone

    def remove(self, name: CheckpointName) -> None:
        """Removes a checkpoint: first its manifest, then its parts, then the folder if that is empty."""
        parts: tuple[Part, ...] = ()
        with suppress(DamagedCheckpointError):
            parts = (self._written.pop(name, None) or self.manifest(name)).parts
        folder = step_folder(name.step)
        self._storage.remove(str(name))
        self._storage.sync_folder(folder)
        self._remove_all(folder, (part.file for part in parts))

    def remove_parts(self, step: int, files: Iterable[str]) -> None:
        """Removes parts of a step that no manifest names or will name, then the folder if that is empty."""
        self._remove_all(step_folder(step), files)

    def orphans(self, counts: Callable[[str], bool] = lambda owner: True) -> tuple[str, ...]:
        """Returns the owners' parts, and partial manifests, that no manifest names; none beside an unreadable one."""
        by_folder: dict[str, list[str]] = {}
        for name in self._storage.names():
            folder, _, file = name.rpartition("/")
            if step_of(folder) is not None:  # other folders are the user's, such as copies
                by_folder.setdefault(folder, []).append(file)
        orphans: list[str] = []
        for folder, files in by_folder.items():
            theirs = [file for file in files if (owner := writer_of(file)) is not None and counts(owner)]
            with suppress(StorageError):
                named = set(self._named_in(folder, files)) if theirs else ()
                orphans += (f"{folder}/{file}" for file in theirs if file not in named)
        return tuple(orphans)

    def remove_orphans(self, counts: Callable[[str], bool] = lambda owner: True) -> tuple[str, ...]:
        """Removes the orphans, whose owners must not be writing any more, and returns their names."""
        gone = self.orphans(counts)
        for name in gone:
            folder, _, file = name.rpartition("/")
            self._remove_all(folder, [file])
        return gone

    def _named_in(self, folder: str, files: Iterable[str]) -> Iterator[str]:
        step = step_of(folder)
        for file in files:
            if step is not None and is_manifest(file):
                name = CheckpointName(step, file)
                yield from (part.file for part in (self._written.get(name) or self.manifest(name)).parts)

    def _remove_all(self, folder: str, files: Iterable[str]) -> None:
        for file in files:
            self._storage.remove(f"{folder}/{file}")
        with suppress(StorageError):  # others have files in it
            self._storage.remove(folder)

    def _read_all(
        self, run: str, manifests: Mapping[CheckpointName, Manifest] = MappingProxyType({})
    ) -> tuple[list[tuple[Manifest, CheckpointName]], list[RefusedCheckpoint]]:
        """Returns the readable manifests of a run, or of all, and the refused ones of any; rereads no `manifests`."""
        readable: list[tuple[Manifest, CheckpointName]] = []
        refused: list[RefusedCheckpoint] = []
        for name in self.names():
            try:
                manifest = manifests.get(name) or self.manifest(name)
            except StorageError as error:
                refused.append(RefusedCheckpoint(name, str(error)))
            else:
                if run in ("", manifest.run):
                    readable.append((manifest, name))
        return readable, refused


def checkpoints_at(
    place: str | Path, below: Path | None = None, troubles: DiskTroubles | None = None, run: str = ""
) -> CheckpointFolder:
    """Returns the checkpoints in a folder, which the first file creates, or at a URL, without reading any.

    No part of the path after `below` may be a link; without it, only the user's own ones. `troubles` are faults of the
    disk, `run` names written files. Raises UserError if the URL cannot be used.
    """
    owner = owner_of(run) if run else ""
    if (folder := folder_at(place)) is None:
        return CheckpointFolder(ObjectStorage(str(place), troubles or DiskTroubles()), owner)
    disk: Disk = OwnDisk(folder, below)
    storage = FolderStorage(FaultyDisk(disk, troubles) if troubles else disk, str(folder), owner)
    return CheckpointFolder(storage, owner)


# The claims of runs on a shared folder of checkpoints: one file each, locked while the launcher lives.
#
# A killed run leaves parts that no manifest names. Another run removes them if the claim proves the run's death: its
# lock is free, and it was made on this machine since the last boot.
#
# Rules: without a claim nothing is proved, and the parts stay; an object store has no claims. The parts are listed
# after the proof, because a dying run may still name them. A run takes its claim before it writes.

_CLAIM = re.compile(r"\.bamboo-run-([0-9a-f]{8})(-[0-9a-f]{8})?\.lock")
_START = Path("/proc/sys/kernel/random/boot_id")  # changes with every boot


@contextlib.contextmanager
def claimed(place: str, run: str, heir: str = "") -> Iterator[None]:
    """Claims a place for a run during the block, unless it is an object store or empty; raises StorageError.

    `heir` is the folder with which another host continues the run: the run lives as long as one of its claims.
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
    """Removes the parts of dead runs that no manifest names, or only lists them (`is_trial`); returns their names.

    If the user says that no run writes (`believed`), only runs that provably live keep theirs. Raises StorageError.
    """
    checkpoints, folder = checkpoints_at(place), folder_at(place)
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
            return checkpoints.orphans(counts)
        removed = checkpoints.remove_orphans(counts)
        for name in itertools.chain(*dead.values()):
            disk.remove(name)
    return removed


def _locked(disk: OwnDisk, name: str) -> int:
    """Returns a descriptor of a locked claim; until it is locked, a sweep may remove it.

    An existing claim is of an earlier keeper of the same run, which may be dying, so this waits for its lock.
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
            except OSError:  # such as a full disk
                os.close(fd)
                disk.remove(name)
                raise
        with contextlib.suppress(OSError):  # without locks in the file system, nothing will prove a death
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


@contextlib.contextmanager
def _dead(disk: OwnDisk, name: str, believed: bool) -> Iterator[bool]:
    """Yields whether a claim proves the death of its run, or if that is `believed`, does not disprove it."""
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
