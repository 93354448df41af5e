"""Checkpoints in a folder of this machine, and in an object store by fsspec."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.core.errors import MASK, Problem, StorageError, UserError, has_credentials
from engine.core.manifest import half_file, nonce_of
from engine.files.atomic_write import storage_errors
from engine.files.checkpoint_disk import Disk, DiskTroubles
from engine.files.checkpoint_storage import Bytes, WrittenFile

# In a local folder, bytes are synced before the entry that leads to them: parts, the folder of the step, the entries in
# it, and last the name of the manifest. So after a power cut at any moment, a checkpoint is complete or unknown.

_PIECE = 1 << 20  # bytes, hashed and then written; smaller direct writes cost up to twice as much
_ATTEMPTS = 10  # to create a file in a folder whose spare parts, and then itself, another process is removing


class FolderStorage:
    """A local folder, as `Storage` says; `owner` is the run that writes."""

    def __init__(self, disk: Disk, place: str, owner: str = ""):
        self._disk = disk
        self.place = place
        self._owner = owner

    def create(self, name: str, chunks: Iterable[Bytes]) -> WrittenFile:
        """Writes a new file, as `Storage` says."""
        with self._errors("write", name):
            return self._write(name, chunks)

    def publish(self, name: str, data: bytes) -> None:
        """Writes a file that readers find, as `Storage` says."""
        folder = name.rpartition("/")[0]
        temporary = f"{folder}/{half_file(nonce_of(self._owner, os.urandom(8)))}"
        with self._errors("write", name):
            self._disk.sync_folder("")  # other processes created the folder and its entries
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

    def _write(self, name: str, chunks: Iterable[Bytes]) -> WrittenFile:
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
        return WrittenFile(size, digest.hexdigest())

    def _create(self, name: str) -> int:
        """Opens a new file; creates its folder only if that turns out to be missing, or was removed while empty."""
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):
                return self._disk.create(name)
            self._disk.make_folder("")
            self._disk.make_folder(name.rpartition("/")[0])
        return self._disk.create(name)

    def _errors(self, verb: str, name: str) -> AbstractContextManager[None]:
        return storage_errors(verb, Path(self.place, name))


# Object stores are accessed by fsspec: ``s3://``, ``gs://`` and every other URL whose package is installed.
#
# Rules: an object exists, complete, once its upload has ended, so there is no rename. The credentials of a store come
# from its own files and variables, never from the URL, which messages and run.json show.


def credentials_problem(url: str) -> Problem | None:
    """Returns a problem, without the credentials, for a URL that contains some."""
    if not has_credentials(url):
        return None
    hint = "the store's own files and variables have them"
    return Problem("checkpoints", "a URL without credentials", f"'{url.partition('://')[0]}://{MASK}'", hint)


def is_private(url: str) -> bool:
    """Returns whether the objects below a URL are in the memory of the process that writes them."""
    return "memory" in url.partition("://")[0].lower().split("::")


class ObjectStorage:
    """The objects below a URL; raises UserError for an unknown URL, a missing package, or credentials in it."""

    def __init__(self, url: str, troubles: DiskTroubles):
        import fsspec

        if problem := credentials_problem(url):
            raise UserError([problem])
        scheme, _, rest = url.partition("://")
        url = f"{scheme.lower()}://{rest}"
        try:
            files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise UserError([Problem("checkpoints", "a folder or a URL", repr(url), str(error))]) from error
        self.place = url
        self._troubles = troubles
        self._files: Any = files
        self._root = root.rstrip("/")

    def create(self, name: str, chunks: Iterable[Bytes]) -> WrittenFile:
        """Writes a new object, as `Storage` says."""
        digest, size = hashlib.sha256(), 0
        with self._errors("write", name):
            try:
                with self._opened(name) as opened:
                    for chunk in chunks:
                        digest.update(chunk)
                        self._write(opened, name, chunk)
                        size += memoryview(chunk).nbytes
                    self._troubles.raise_at("sync", name)
            except BaseException:
                with suppress(Exception):  # a partial object, which no manifest will name
                    self._files.rm_file(self._path(name))
                raise
        return WrittenFile(size, digest.hexdigest())

    def publish(self, name: str, data: bytes) -> None:
        """Writes an object in one request, as `Storage` says."""
        with self._errors("write", name):
            self._files.pipe_file(self._path(name), data)

    def read(self, name: str, most: int) -> bytes:
        """Reads one object, as `Storage` says."""
        with self._errors("read", name):
            self._troubles.raise_at("read", name)
            data = bytes(self._files.cat_file(self._path(name), start=0, end=most + 1))
            if len(data) > most:
                raise OSError(f"it has more than {most} bytes")
            return data

    def names(self) -> tuple[str, ...]:
        """Lists all objects, as `Storage` says."""
        with self._errors("list", ""):
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                names = (path[len(self._root) :].lstrip("/") for path in self._files.find(self._root))
                return tuple(sorted(name for name in names if name.count("/") == 1))
        return ()

    def remove(self, name: str) -> None:
        """Removes an object; a folder is only a prefix of names, as `Storage` says."""
        with self._errors("remove", name), suppress(FileNotFoundError):
            if "/" in name:
                self._files.rm_file(self._path(name))

    def sync_folder(self, folder: str) -> None:
        """Does nothing: an answered request is done, as `Storage` says."""

    def _opened(self, name: str) -> Any:
        """Opens a new object; creates folders only if the store requires them: another might create a bucket."""
        with suppress(FileNotFoundError):
            return self._files.open(self._path(name), "wb")
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
        return self._files.open(self._path(name), "wb")

    def _write(self, opened: Any, name: str, chunk: Bytes) -> None:
        left = memoryview(chunk).cast("B")
        while left:
            self._troubles.raise_at("write", name)
            data = self._troubles.to_write(left)
            opened.write(data)
            self._troubles.written(len(data), name)
            left = left[len(data) :]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        """Turns every error of a store into a StorageError, because each package has its own."""
        try:
            yield
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise StorageError(f"cannot {verb} {f'{self.place}/{name}'!r}: {reason}") from error
