"""The system calls through which checkpoints in a folder are written and read, one method for each.

Rules: names are those of files in the folder, or in a folder in it, as ``FOLDER/FILE``. No link is followed below the
folder of checkpoints, and none of another user on the way to it. Only a folder and files of this user count: bits that
another user can change prove nothing. Modes do not count, because a mount may have none. The folder is held open after
one walk of its path, which is walked again once it leads to another folder. Every method raises OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from engine.files.atomic_write import (
    BLOCK_BYTES,
    closing_fd,
    is_hollow,
    open_below,
    open_in,
    open_inner,
    open_new,
    sync_folder,
)
from engine.files.checkpoint_storage import Bytes

_PAGE = 4096  # bytes; direct writes need whole pages
_LARGE = 1 << 16  # bytes: smaller writes would be slower without the cache
_PIECE = 64 << 20  # bytes of one read, which needs as much memory
_MOST_PARTS = 4096  # of a path including its links, which may be circular


class Disk(Protocol):
    """The system calls; a test replaces it with a disk whose power fails."""

    def make_folder(self, name: str) -> None:
        """Creates a folder that only this user can open, if necessary; an empty name stands for the outermost."""

    def create(self, name: str) -> int:
        """Returns a descriptor of a new file that only this user can read."""

    def write(self, fd: int, data: Bytes) -> int:
        """Appends bytes and returns their number, which may be smaller than that of `data`."""

    def sync(self, fd: int) -> None:
        """Waits until the bytes of a file are on disk."""

    def close(self, fd: int) -> None:
        """Closes a descriptor."""

    def rename(self, name: str, new: str) -> None:
        """Renames a file within its folder, atomically."""

    def sync_folder(self, name: str) -> None:
        """Waits until the entries of a folder are on disk."""

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a regular file, all from one descriptor; refuses one with more than `most`."""

    def remove(self, name: str) -> None:
        """Removes a file, a link, or an empty folder."""

    def names(self) -> list[str]:
        """Returns the names of all entries, also in folders; ``FOLDER/`` for a link and an unreadable folder."""


class OwnDisk:
    """The disk of this machine below the folder `root`; no part of the path after `below` may be a link."""

    def __init__(self, root: Path, below: Path | None = None):
        self._root = root
        self._below = below or root
        self._open_root: _OpenFolder | None = None

    def make_folder(self, name: str) -> None:
        """Creates a folder, as `Disk` says."""
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
            _refuse_others(fd)  # some mounts give files to another user; no reader would accept them
        except OSError:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, data: Bytes) -> int:
        """Writes, as `Disk` says; large pieces bypass the page cache, if the file system can do that."""
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
        names: list[str] = []
        with suppress(FileNotFoundError), self._opened("") as root:
            for name in sorted(_listed(root)):
                names.append(name)
                with suppress(FileNotFoundError):
                    names += self._names_in(name, os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        return names

    def _names_in(self, name: str, mode: int) -> list[str]:
        if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return []
        try:
            with self._opened(name) as folder:
                return [f"{name}/{inner}" for inner in sorted(_listed(folder))]
        except FileNotFoundError:
            raise
        except OSError:  # reading it will report the error; the others can be read
            return [f"{name}/"]

    def _make_root(self) -> None:
        """Creates the folder and its parents, and syncs each."""
        missing = [folder for folder in (self._root, *self._root.parents) if not os.path.lexists(folder)]
        self._below.mkdir(parents=True, exist_ok=True)
        with open_below(self._root, self._below, is_made=True):
            pass
        for folder in missing:
            with open_below(folder.parent, folder.parent) as fd:
                sync_folder(fd)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        root = self._open_root
        if root is None or not os.path.samestat(os.stat(self._root), _refuse_others(root.fd)):
            refuse_foreign_links(self._root)
            with open_below(self._root, self._below) as fd:
                _refuse_others(fd)
                self._open_root = root = _OpenFolder(os.dup(fd))
        if not name:
            yield root.fd
            return
        with open_inner(name, root.fd) as inner:
            _refuse_others(inner)
            yield inner


class _OpenFolder:
    """A descriptor of a folder, closed after its last use by any thread."""

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def refuse_foreign_links(path: Path) -> None:
    """Raises OSError if a link on the way to a path is another user's, who could redirect it at any time."""
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
    """Writes pages directly, because no reader needs them in the page cache soon; returns 0 if that is impossible."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        try:
            return os.write(fd, pages)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:  # also if the memory or the position in the file is not aligned
            raise
        return 0


def _refuse_others(fd: int) -> os.stat_result:
    """Returns the stat of a file or folder; raises OSError if it is another user's."""
    facts = os.fstat(fd)
    if facts.st_uid not in (os.geteuid(), 0):
        raise OSError(errno.EPERM, f"it belongs to user {facts.st_uid}, who could change it (copy it first)")
    return facts


def _split(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    return folder, file


def _listed(folder: int) -> list[str]:
    with closing_fd(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)) as fd:
        return os.listdir(fd)


# A disk with faults: full after some bytes, failing calls, silent corruption of a byte.
#
# Rules: a fault affects the next matching files of this process, and then the disk is sound again. A byte is changed
# after its writer has hashed it, so only a reader that hashes notices. Other calls are passed through.

FailingCall = Literal["write", "sync", "read"]


@dataclass(slots=True)
class Trouble:
    """A fault of a disk: after that many bytes, `call` fails with errno `error`, or with 0 the byte is changed.

    It affects `files` files, and calls `tell` with a description each time.
    """

    call: FailingCall
    error: int
    after_bytes: int = 0
    files: int = 1
    tell: Callable[[str], object] = str


class DiskTroubles:
    """The pending faults of one process; any thread may add one."""

    def __init__(self, *troubles: Trouble):
        self._waiting = list(troubles)
        self._lock = threading.Lock()

    def add(self, trouble: Trouble) -> None:
        """Adds a fault for the next files."""
        with self._lock:
            self._waiting.append(trouble)

    def raise_at(self, call: FailingCall, name: str) -> None:
        """Raises OSError if a call on a file has to fail."""
        with self._lock:
            trouble = self._next(call)
            if trouble is not None and trouble.after_bytes <= 0 and trouble.error:
                self._act(trouble, f"{call} of {name}: {os.strerror(trouble.error)}")
                raise OSError(trouble.error, os.strerror(trouble.error))

    def to_write(self, data: Bytes) -> Bytes:
        """Returns what the disk accepts of `data`: fewer bytes before it is full, or a copy with one bit changed."""
        with self._lock:
            trouble = self._next("write")
            if trouble is None or trouble.after_bytes >= len(data):
                return data
            if trouble.error:
                return data[: trouble.after_bytes]
            changed = bytearray(data)
            changed[trouble.after_bytes] ^= 1
            return changed

    def written(self, count: int, name: str) -> None:
        """Counts bytes that the disk has accepted."""
        with self._lock:
            trouble = self._next("write")
            if trouble is not None:
                trouble.after_bytes -= count
                if trouble.after_bytes < 0:
                    self._act(trouble, f"one bit of {name} is changed")

    def _next(self, call: FailingCall) -> Trouble | None:
        return next((trouble for trouble in self._waiting if trouble.call == call), None)

    def _act(self, trouble: Trouble, how: str) -> None:
        trouble.files -= 1
        if trouble.files <= 0:
            self._waiting.remove(trouble)
        trouble.tell(how)


class FaultyDisk:
    """Another disk with faults; every method does as `Disk` says."""

    def __init__(self, disk: Disk, troubles: DiskTroubles):
        self._disk = disk
        self._troubles = troubles
        self._names: dict[int, str] = {}
        self.make_folder = disk.make_folder
        self.rename = disk.rename
        self.sync_folder = disk.sync_folder
        self.remove = disk.remove
        self.names = disk.names

    def create(self, name: str) -> int:
        """Opens a new file, as `Disk` says."""
        fd = self._disk.create(name)
        self._names[fd] = name
        return fd

    def write(self, fd: int, data: Bytes) -> int:
        """Writes, or for a fault writes fewer bytes, fails, or changes a bit."""
        self._troubles.raise_at("write", self._names[fd])
        count = self._disk.write(fd, self._troubles.to_write(data))
        self._troubles.written(count, self._names[fd])
        return count

    def sync(self, fd: int) -> None:
        """Syncs a file, or fails."""
        self._troubles.raise_at("sync", self._names[fd])
        self._disk.sync(fd)

    def close(self, fd: int) -> None:
        """Closes a file."""
        self._names.pop(fd, None)
        self._disk.close(fd)

    def read(self, name: str, most: int) -> bytes:
        """Reads a file, or fails."""
        self._troubles.raise_at("read", name)
        return self._disk.read(name, most)


def full_disk(after_bytes: int, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the fault of a disk that is full after that many bytes; then writing each of `files` files fails."""
    return Trouble("write", errno.ENOSPC, after_bytes, files, tell)


def failing_disk(call: FailingCall, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the fault of a disk whose call fails with EIO, for the next `files` files."""
    return Trouble(call, errno.EIO, 0, files, tell)


def damaging_disk(at_byte: int, files: int = 1, tell: Callable[[str], object] = str) -> Trouble:
    """Returns the fault of a disk that silently changes one bit of the byte at this place, counted from now."""
    return Trouble("write", 0, at_byte, files, tell)
