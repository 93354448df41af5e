"""Checkpoints in an object store, by fsspec: ``s3://``, ``gs://`` and every other URL whose package is installed.

Rules: an object is there when its upload has ended, and whole; there is no rename, and none is needed. The credentials
of a store come from its own files and variables, never from the URL, which messages and run.json show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine.core.errors import MASK, Problem, StorageError, UserError, has_credentials
from engine.files.checkpoints.faulty_disk import DiskTroubles
from engine.files.checkpoints.storage import Bytes, Written


def credentials_problem(url: str) -> Problem | None:
    """Returns the problem of a URL that has credentials in it, without them."""
    if not has_credentials(url):
        return None
    hint = "the store's own files and variables have them"
    return Problem("checkpoints", "a URL without credentials", f"'{url.partition('://')[0]}://{MASK}'", hint)


def is_private(url: str) -> bool:
    """Returns whether the objects below a URL are in the memory of the process that writes them."""
    return "memory" in url.partition("://")[0].lower().split("::")


class ObjectStorage:
    """The objects below a URL, as `Storage` says; `troubles` are faults of the store.

    Raises:
        UserError: fsspec does not know the URL, lacks the package for it, or the URL has credentials in it.
    """

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

    def create(self, name: str, chunks: Iterable[Bytes]) -> Written:
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
                with suppress(Exception):  # half of an object, which no manifest will name
                    self._files.rm_file(self._path(name))
                raise
        return Written(size, digest.hexdigest())

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
                found = (path[len(self._root) :].lstrip("/") for path in self._files.find(self._root))
                return tuple(sorted(name for name in found if name.count("/") == 1))
        return ()

    def remove(self, name: str) -> None:
        """Removes an object; a folder is only a beginning of names, as `Storage` says."""
        with self._errors("remove", name), suppress(FileNotFoundError):
            if "/" in name:
                self._files.rm_file(self._path(name))

    def sync_folder(self, folder: str) -> None:
        """Does nothing: a request that was answered is done, as `Storage` says."""

    def _opened(self, name: str) -> Any:
        """Opens a new object; makes folders only for a store that misses them, as another might make a bucket."""
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
        """Turns every error of a store into a StorageError: each package has its own kinds."""
        try:
            yield
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise StorageError(f"cannot {verb} {f'{self.place}/{name}'!r}: {reason}") from error
