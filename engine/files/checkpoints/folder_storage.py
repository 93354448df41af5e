"""Checkpoints in a folder of this machine.

Rule: bytes are synced before the entry that leads to them: parts, the folder of the step, the entries in it, and last
the name of the manifest. So a power cut at any moment leaves a checkpoint whole or unknown.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from engine.core.checkpoints.manifest import half_file, nonce_of
from engine.files.atomic_write import storage_errors
from engine.files.checkpoints.disk import Disk
from engine.files.checkpoints.storage import Bytes, Written

_PIECE = 1 << 20  # bytes, hashed and then written; smaller writes cost up to twice past the cache of the system


class FolderStorage:
    """A folder of this machine, as `Storage` says; `owner` stands for the run that writes."""

    def __init__(self, disk: Disk, place: str, owner: str = ""):
        self._disk = disk
        self.place = place
        self._owner = owner

    def create(self, name: str, chunks: Iterable[Bytes]) -> Written:
        """Writes a new file, as `Storage` says."""
        with self._errors("write", name):
            return self._write(name, chunks)

    def publish(self, name: str, data: bytes) -> None:
        """Writes a file that readers find, as `Storage` says."""
        folder = name.rpartition("/")[0]
        temporary = f"{folder}/{half_file(nonce_of(self._owner, os.urandom(8)))}"
        with self._errors("write", name):
            self._disk.sync_folder("")  # other processes made folder and entries
            self._disk.sync_folder(folder)
            self._write(temporary, [data])
            try:
                self._disk.rename(temporary, name)
            except OSError:
                with suppress(OSError):
                    self._disk.remove(temporary)
                raise
            self._disk.sync_folder(folder)

    def read(self, name: str, most: int) -> bytes:
        """Reads, as `Storage` says."""
        with self._errors("read", name):
            return self._disk.read(name, most)

    def names(self) -> tuple[str, ...]:
        """Lists, as `Storage` says."""
        with self._errors("list", ""):
            return tuple(name for name in self._disk.names() if "/" in name)

    def remove(self, name: str) -> None:
        """Removes, as `Storage` says."""
        with self._errors("remove", name), suppress(FileNotFoundError):
            self._disk.remove(name)

    def sync_folder(self, folder: str) -> None:
        """Syncs, as `Storage` says."""
        with self._errors("write", folder):
            self._disk.sync_folder(folder)

    def _write(self, name: str, chunks: Iterable[Bytes]) -> Written:
        digest, size = hashlib.sha256(), 0
        fd = self._create(name)
        try:
            try:
                for chunk in chunks:
                    whole = memoryview(chunk).cast("B")
                    size += len(whole)
                    for at in range(0, len(whole), _PIECE):
                        left = whole[at : at + _PIECE]
                        digest.update(left)
                        while left:
                            left = left[self._disk.write(fd, left) :]
                self._disk.sync(fd)
            finally:
                self._disk.close(fd)
        except BaseException:
            with suppress(OSError):
                self._disk.remove(name)
            raise
        return Written(size, digest.hexdigest())

    def _create(self, name: str) -> int:
        """Opens a new file; makes its folder if it is not there, which most files need not ask for."""
        with suppress(FileNotFoundError):
            return self._disk.create(name)
        self._disk.make_folder("")
        self._disk.make_folder(name.rpartition("/")[0])
        return self._disk.create(name)

    def _errors(self, verb: str, name: str) -> AbstractContextManager[None]:
        return storage_errors(verb, Path(self.place, name))
