"""The calls to the system through which checkpoints in a folder are written and read: one method for each.

Rules: names are those of files in the folder, or in a folder in it, as ``FOLDER/FILE``. No link is followed below the
folder of checkpoints, and none of another user on the way to it. Only a folder and files of this user count: bits that
another user can change prove nothing. The folder is held open behind one walk of its path, and its path is walked
again once it leads to another folder. Every method raises OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from engine.files.atomic_write import (
    BLOCK_BYTES,
    is_hollow,
    open_below,
    open_in,
    open_inner,
    open_new,
    sync_folder,
)
from engine.files.checkpoints.storage import Bytes

_PAGE = 4096  # bytes; a write past the cache has whole ones
_LARGE = 1 << 16  # bytes: a smaller write would cost more past the cache
_PIECE = 64 << 20  # bytes of one read, which has to find as much memory
_MOST_PARTS = 4096  # of a path, with those of its links: a circle of links has no end


class Disk(Protocol):
    """The calls to the system; a test replaces it by a disk whose power fails."""

    def make_folder(self, name: str) -> None:
        """Makes a folder that only this user can open, if it is not there; no name stands for the outermost."""

    def create(self, name: str) -> int:
        """Returns a descriptor of a new file that only this user can read."""

    def write(self, fd: int, data: Bytes) -> int:
        """Writes bytes behind those that were written, and returns their number, which may be smaller."""

    def sync(self, fd: int) -> None:
        """Waits until the bytes of a file are on disk."""

    def close(self, fd: int) -> None:
        """Ends the use of a descriptor."""

    def rename(self, name: str, new: str) -> None:
        """Gives a file another name in the same folder, in one step."""

    def sync_folder(self, name: str) -> None:
        """Waits until the entries of a folder are on disk."""

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a regular file, all from one descriptor; refuses one with more than `most`."""

    def remove(self, name: str) -> None:
        """Removes a file, a link, or an empty folder."""

    def names(self) -> list[str]:
        """Returns the names of all entries, of folders too, ``FOLDER/`` for a link and a folder that cannot be read.

        A folder that does not exist has none.
        """


class OwnDisk:
    """The disk of this machine below the folder `root`; no part of the path after `below` may be a link."""

    def __init__(self, root: Path, below: Path | None = None):
        self._root = root
        self._below = below or root
        self._held: _HeldFolder | None = None

    def make_folder(self, name: str) -> None:
        """Makes a folder, as `Disk` says."""
        if not name:
            refuse_foreign_links(self._root)
            self._make_root()
            return
        with self._opened("") as folder, suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)

    def create(self, name: str) -> int:
        """Opens a new file, as `Disk` says."""
        folder, file = _split(name)
        with self._opened(folder) as folder_fd:
            fd = open_new(file, folder_fd)
        try:
            _refuse_others(fd)  # of a mount that gives files to another user: no reader would take it
        except OSError:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, data: Bytes) -> int:
        """Writes, as `Disk` says; large pieces past the cache of the system, where the file system can do that."""
        pages = len(data) - len(data) % _PAGE
        return (pages >= _LARGE and _write_past_cache(fd, data[:pages])) or os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Syncs a file, as `Disk` says."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes, as `Disk` says."""
        os.close(fd)

    def rename(self, name: str, new: str) -> None:
        """Renames, as `Disk` says."""
        (folder, old), (_, new) = _split(name), _split(new)
        with self._opened(folder) as fd:
            os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)

    def sync_folder(self, name: str) -> None:
        """Syncs a folder, as `Disk` says."""
        with self._opened(name) as fd:
            sync_folder(fd)

    def read(self, name: str, most: int) -> bytes:
        """Reads, as `Disk` says."""
        with open(self.open(name), "rb", buffering=0) as opened:
            facts = _refuse_others(opened.fileno())
            if (size := facts.st_size) > most:
                raise OSError(errno.EFBIG, f"it has {size} bytes, and should have at most {most}")
            if facts.st_blocks and is_hollow(facts):
                there = facts.st_blocks * BLOCK_BYTES
                raise OSError(errno.EFBIG, f"of its {size} bytes only {there} are on the disk: the rest are holes")
            data = bytearray()
            try:
                while more := opened.read(min(size + 1 - len(data), _PIECE)):
                    data += more
                return bytes(data)
            except MemoryError as error:
                raise OSError(errno.ENOMEM, f"there is no memory for its {size} bytes") from error

    def open(self, name: str) -> int:
        """Returns a descriptor that reads a regular file of this user; raises OSError."""
        folder, file = _split(name)
        with self._opened(folder) as folder_fd:
            fd = open_in(file, folder_fd)
        try:
            _refuse_others(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def remove(self, name: str) -> None:
        """Removes, as `Disk` says."""
        folder, file = _split(name)
        with self._opened(folder) as fd:
            is_folder = stat.S_ISDIR(os.stat(file, dir_fd=fd, follow_symlinks=False).st_mode)
            (os.rmdir if is_folder else os.unlink)(file, dir_fd=fd)

    def names(self) -> list[str]:
        """Lists, as `Disk` says."""
        found: list[str] = []
        with suppress(FileNotFoundError), self._opened("") as root:
            for name in sorted(_listed(root)):
                found.append(name)
                with suppress(FileNotFoundError):
                    found += self._names_in(name, os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        return found

    def _names_in(self, name: str, mode: int) -> list[str]:
        if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return []
        try:
            with self._opened(name) as folder:
                return [f"{name}/{inner}" for inner in sorted(_listed(folder))]
        except FileNotFoundError:
            raise
        except OSError:  # told to the reader of it: the others can be read
            return [f"{name}/"]

    def _make_root(self) -> None:
        """Makes the folder and those on the way to it, each on disk."""
        missing = [each for each in (self._root, *self._root.parents) if not os.path.lexists(each)]
        self._below.mkdir(parents=True, exist_ok=True)
        with open_below(self._root, self._below, is_made=True):
            pass
        for each in missing:
            with open_below(each.parent, each.parent) as fd:
                sync_folder(fd)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        root = self._root_folder()
        if not name:
            yield root.fd
            return
        with open_inner(name, root.fd) as inner:
            _refuse_others(inner)
            yield inner

    def _root_folder(self) -> _HeldFolder:
        """Returns the folder, with its path walked again if the path leads elsewhere than at the last walk."""
        held = self._held
        if held is None or not os.path.samestat(os.stat(self._root), _refuse_others(held.fd)):
            refuse_foreign_links(self._root)
            with open_below(self._root, self._below) as root:
                _refuse_others(root)
                self._held = held = _HeldFolder(os.dup(root))
        return held


class _HeldFolder:
    """A descriptor of a folder, closed behind its last use by any thread."""

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def refuse_foreign_links(path: Path) -> None:
    """Raises OSError if a link on the way to a path is another user's, who could lead it elsewhere at any time."""
    walked, left = Path("/"), list(reversed((Path.cwd() / path).parts[1:]))
    for _ in range(_MOST_PARTS):
        if not left:
            return
        part = left.pop()
        if part == "..":
            walked = walked.parent
            continue
        try:
            facts = (walked / part).lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(facts.st_mode):
            walked = walked / part
        elif facts.st_uid not in (os.geteuid(), 0):
            raise OSError(errno.EPERM, f"{str(walked / part)!r} is a link of another user")
        else:
            target = Path(os.readlink(walked / part))
            walked = Path("/") if target.is_absolute() else walked
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _write_past_cache(fd: int, pages: Bytes) -> int:
    """Writes pages without a copy in memory, which no reader wants soon; returns 0 where that is impossible."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        try:
            return os.write(fd, pages)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which also says that the memory or the place in the file is not aligned
            raise
        return 0


def _refuse_others(fd: int) -> os.stat_result:
    """Returns the facts of a file or folder; raises OSError if it is another user's."""
    facts = os.fstat(fd)
    if facts.st_uid not in (os.geteuid(), 0):
        raise OSError(errno.EPERM, f"it belongs to user {facts.st_uid}, who could change it (copy it first)")
    return facts


def _split(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    return folder, file


def _listed(folder: int) -> list[str]:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
