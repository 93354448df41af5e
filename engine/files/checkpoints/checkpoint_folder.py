"""The checkpoints in one place: written parts first and manifest last, read with every hash, removed manifest first.

Rules: a reader that finds a manifest finds all of its parts. Bytes are hashed and then parsed, and never read again in
between. A checkpoint whose files are not what the manifest says is refused with the name of the file, and the next
older one is tried. Several runs may write into one place: each counts and removes its own checkpoints only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from engine.core.checkpoints.keeping import may_go
from engine.core.checkpoints.manifest import (
    MOST_BYTES,
    DamagedCheckpointError,
    Manifest,
    Part,
    Strides,
    is_manifest,
    manifest_bytes,
    manifest_file,
    manifest_of,
    nonce_of,
    owner_of,
    part_file,
    step_folder,
    step_of,
    writer_of,
)
from engine.core.checkpoints.part_file import StoredLayer, layer_in
from engine.core.errors import StorageError
from engine.files.checkpoints.disk import Disk, OwnDisk
from engine.files.checkpoints.faulty_disk import DiskTroubles, FaultyDisk
from engine.files.checkpoints.folder_storage import FolderStorage
from engine.files.checkpoints.place_text import folder_at
from engine.files.checkpoints.storage import Bytes, Storage, refuse_too_large


class CheckpointName(NamedTuple):
    """The name of a checkpoint: its step, and the file of its manifest; no file for a folder that cannot be read."""

    step: int
    file: str

    def __str__(self) -> str:
        return f"{step_folder(self.step)}/{self.file}"


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that is not to be used, with the reason, which names a file."""

    name: CheckpointName
    reason: str


@dataclass(frozen=True, slots=True)
class NewestGood:
    """The newest checkpoint of which every byte is right, if there is one, and the newer ones that were refused."""

    name: CheckpointName | None
    manifest: Manifest | None
    refused: tuple[RefusedCheckpoint, ...]


class CheckpointFolder:
    """The checkpoints in a storage, which the run `owner` writes to.

    Every method raises StorageError where the storage cannot be written or read.
    """

    def __init__(self, storage: Storage, owner: str = ""):
        self._storage = storage
        self._owner = owner
        self._written: dict[CheckpointName, Manifest] = {}  # here, and not removed here

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
    ) -> Part:
        """Writes one part of a checkpoint to come, and returns it; it is on disk then."""
        file = part_file(layer, shard, shards, nonce_of(self._owner, os.urandom(8)))
        written = self._storage.create(f"{step_folder(step)}/{file}", chunks)
        return Part(layer, shard, shards, file, written.size, written.sha256, strides, transient, aliases)

    def publish(self, manifest: Manifest) -> CheckpointName:
        """Writes the manifest, whose parts are all written: from now on the checkpoint is there."""
        data = manifest_bytes(manifest)
        name = CheckpointName(manifest.step, manifest_file(data))
        try:
            self._storage.publish(str(name), data)
        except StorageError:
            with suppress(StorageError):  # it may have its name already; the caller removes the parts
                self._storage.remove(str(name))
            raise
        self._written[name] = manifest
        return name

    def names(self) -> tuple[CheckpointName, ...]:
        """Returns the names of all checkpoints, good or not, by step."""
        found = (name.rpartition("/") for name in self._storage.names())
        steps = ((step_of(folder), file) for folder, _, file in found if is_manifest(file) or not file)
        return tuple(sorted(CheckpointName(step, file) for step, file in steps if step is not None))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Returns the manifest of a checkpoint; raises DamagedCheckpointError if it is not what was written."""
        return manifest_of(str(name), self._storage.read(str(name), MOST_BYTES))

    def layer(self, manifest: Manifest, layer: int) -> StoredLayer:
        """Returns the tensors of a layer; each reader of checkpoints gets them here.

        Raises:
            StorageError: a part cannot be read, is not the one that was written, or has other weights than the run had.
        """
        return layer_in(manifest, layer, ((part, self._bytes_of(manifest, part)) for part in manifest.parts_of(layer)))

    def verify(self, name: CheckpointName) -> Manifest:
        """Returns the manifest of a checkpoint if every byte and every layer is right; else raises StorageError."""
        manifest = self.manifest(name)
        for each in manifest.layers:
            self.layer(manifest, each.layer)
        return manifest

    def newest_good(
        self, run: str = "", step: int | None = None, refuses: Callable[[Manifest], str] = lambda manifest: ""
    ) -> NewestGood:
        """Returns the newest good checkpoint: of one run, or of the newest run that has one; at `step`, or at any.

        `refuses` returns the reason why a whole checkpoint is of no use, or an empty text.
        """
        found, refused = self._read_all(run)
        for manifest, name in sorted(found, key=lambda each: (each[0].run, each[0].step), reverse=True):
            if step in (None, name.step):
                reason = refuses(manifest)
                try:
                    if not reason:
                        self.verify(name)
                        newer = (each for each in refused if each.name.step >= name.step)
                        return NewestGood(name, manifest, tuple(newer))
                except StorageError as error:
                    reason = str(error)
                refused.append(RefusedCheckpoint(name, reason))
        return NewestGood(None, None, tuple(refused))

    def old(
        self, keep: int, run: str = "", in_use: Collection[CheckpointName] = (), *, is_verified: bool = False
    ) -> tuple[CheckpointName, ...]:
        """Returns the checkpoints that are older than the `keep` newest ones of their run, of one run or of all.

        The caller knows that the newest one is good, because it has just written it; or it wants each one read
        (`is_verified`), and those that are not good count for nothing.
        """
        by_run: dict[str, list[CheckpointName]] = {}
        for manifest, name in self._read_all(run, {} if is_verified else self._written)[0]:
            by_run.setdefault(manifest.run, []).append(name)
        found: list[CheckpointName] = []
        for names in by_run.values():
            good = [name for name in names if not is_verified or self._is_good(name)]
            found += may_go(names, keep, good, in_use)
        return tuple(found)

    def prune(self, keep: int, run: str = "", in_use: Collection[CheckpointName] = ()) -> tuple[CheckpointName, ...]:
        """Removes the old checkpoints, as `old` says, and returns their names."""
        gone = self.old(keep, run, in_use)
        for name in gone:
            self.remove(name)
        return gone

    def remove(self, name: CheckpointName) -> None:
        """Removes a checkpoint: first its manifest, then its parts, then the folder if it is empty."""
        parts: tuple[Part, ...] = ()
        with suppress(DamagedCheckpointError):
            parts = (self._written.pop(name, None) or self.manifest(name)).parts
        folder = step_folder(name.step)
        self._storage.remove(str(name))
        self._storage.sync_folder(folder)
        self._remove_all(folder, (part.file for part in parts))

    def remove_parts(self, step: int, files: Iterable[str]) -> None:
        """Removes parts of a step that no manifest names or will name, then the folder if it is empty."""
        self._remove_all(step_folder(step), files)

    def orphans(self, counts: Callable[[str], bool] = lambda owner: True) -> tuple[str, ...]:
        """Returns the parts that no manifest names, and halves of manifests, of the owners that count.

        Those beside a manifest that cannot be read are none.
        """
        by_folder: dict[str, list[str]] = {}
        for name in self._storage.names():
            folder, _, file = name.rpartition("/")
            if step_of(folder) is not None:  # another folder is the user's, such as a copy
                by_folder.setdefault(folder, []).append(file)
        found: list[str] = []
        for folder, files in by_folder.items():
            theirs = [file for file in files if (owner := writer_of(file)) is not None and counts(owner)]
            with suppress(StorageError):
                named = set(self._named_in(folder, files)) if theirs else ()
                found += (f"{folder}/{file}" for file in theirs if file not in named)
        return tuple(found)

    def remove_orphans(self, counts: Callable[[str], bool] = lambda owner: True) -> tuple[str, ...]:
        """Removes the orphans, and returns their names; their owners may not be writing any more."""
        gone = self.orphans(counts)
        for name in gone:
            folder, _, file = name.rpartition("/")
            self._remove_all(folder, [file])
        return gone

    def _bytes_of(self, manifest: Manifest, part: Part) -> bytes:
        name = f"{manifest.folder}/{part.file}"
        refuse_too_large(name, part.size)
        return self._storage.read(name, part.size)

    def _is_good(self, name: CheckpointName) -> bool:
        try:
            self.verify(name)
        except StorageError:
            return False
        return True

    def _named_in(self, folder: str, files: Iterable[str]) -> Iterator[str]:
        step = step_of(folder)
        for file in files:
            if step is not None and is_manifest(file):
                name = CheckpointName(step, file)
                yield from (part.file for part in (self._written.get(name) or self.manifest(name)).parts)

    def _remove_all(self, folder: str, files: Iterable[str]) -> None:
        for file in files:
            self._storage.remove(f"{folder}/{file}")
        with suppress(StorageError):  # files of others are in it
            self._storage.remove(folder)

    def _read_all(
        self, run: str, known: Mapping[CheckpointName, Manifest] = MappingProxyType({})
    ) -> tuple[list[tuple[Manifest, CheckpointName]], list[RefusedCheckpoint]]:
        """Returns the readable manifests of a run, of all without one, and the refused ones of any run.

        Those that the caller knows are not read.
        """
        found: list[tuple[Manifest, CheckpointName]] = []
        refused: list[RefusedCheckpoint] = []
        for name in self.names():
            try:
                manifest = known.get(name) or self.manifest(name)
            except StorageError as error:
                refused.append(RefusedCheckpoint(name, str(error)))
            else:
                if run in ("", manifest.run):
                    found.append((manifest, name))
        return found, refused


def checkpoints_at(
    place: str | Path, below: Path | None = None, troubles: DiskTroubles | None = None, run: str = ""
) -> CheckpointFolder:
    """Returns the checkpoints in a folder, which the first file makes, or at a URL; none of them is read.

    No part of the path of a folder may be a link after `below`; without it, only the user's own links lead there.
    `troubles` are faults of the disk or of the store. The files that are written have names of the run `run`.

    Raises:
        UserError: the URL is none that can be used.
    """
    owner = owner_of(run) if run else ""
    if (folder := folder_at(place)) is None:
        from engine.files.checkpoints.object_storage import ObjectStorage  # which loads fsspec

        return CheckpointFolder(ObjectStorage(str(place), troubles or DiskTroubles()), owner)
    disk: Disk = OwnDisk(folder, below)
    storage = FolderStorage(FaultyDisk(disk, troubles) if troubles else disk, str(folder), owner)
    return CheckpointFolder(storage, owner)
