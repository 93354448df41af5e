"""Opens files for writing, never through a link: every file and folder that bamboo creates is created here.

Rules: a file is written completely under an unguessable name and then renamed. After a crash, and for every reader, it
has the old content or the new. A link of that name is replaced; its target stays. The folder of bamboo's own file is
not a link, and only its user can read the file. A path from the user may lead through links to its folder, and may name
a device or a pipe, which is written to.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from engine.core.errors import BambooError, EnvironmentLacksError, StorageError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a reader would block forever
_PRIVATE = 0o600
BLOCK_BYTES = 512  # the unit of a file's blocks on disk
_DENSE_BYTES, _MOST_HOLES = 64 << 20, 16


@contextmanager
def storage_errors(verb: str, path: Path, hint: str = "") -> Iterator[None]:
    """Turns an OSError into a StorageError, ``cannot VERB PATH: REASON``, followed by the hint in parentheses."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror} ({hint})" if hint else error.strerror
        raise StorageError(f"cannot {verb} {str(path)!r}: {reason}") from error


def of_system(error: OSError) -> BambooError:
    """Returns bamboo's error for a system error about a file in a run folder, or about the output."""
    if error.errno == errno.EMFILE:
        return EnvironmentLacksError("too many open files: `ulimit -n` should allow at least 256")
    return StorageError(f"{error.filename or 'output'}: {error.strerror or error}")


def write_atomically(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Replaces bamboo's own file at `path` once its content is on disk, or (not `is_synced`) with the kernel.

    Only this user can read it. Raises StorageError if it could not be stored or the folder is a link; the file is
    unchanged.
    """
    with storage_errors("write", path), open_below(path.parent, path.parent.parent) as folder:
        _replace(folder, path.name, content, _PRIVATE, is_synced=is_synced)


def write_named(path: Path, content: str | bytes) -> None:
    """Writes a file that the user named, with its mode or the umask's; writes to a device or a pipe.

    Raises StorageError if the content could not be stored; a file at `path` is unchanged.
    """
    with storage_errors("write", path):
        there = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
        parent = os.path.realpath(path.parent)
        if parent == "/dev" or parent.startswith("/proc/"):  # such as /dev/stdout, which must not be replaced
            _write_into(path, content, os.O_APPEND)
        elif stat.S_ISREG(there) or stat.S_ISLNK(there):
            with _opened_folder(path.parent) as folder:
                _replace(folder, path.name, content, stat.S_IMODE(there) if stat.S_ISREG(there) else 0)
        else:
            _write_into(path, content, os.O_NOFOLLOW)


def create_file(path: Path, below: Path, text: str) -> None:
    """Writes a new file for the user, and makes its folders; raises StorageError, also for a link below `below`."""
    make_folder(path.parent, below)
    with (
        storage_errors("write", path),
        open_below(path.parent, below) as folder,
        closing_fd(os.open(path.name, _NEW, 0o666, dir_fd=folder)) as fd,
    ):
        _write_all(fd, text)


def open_to_append(path: Path, *, is_read: bool = False) -> int:
    """Returns a descriptor that appends to bamboo's own regular file, made if absent; raises StorageError."""
    access = os.O_RDWR if is_read else os.O_WRONLY
    with storage_errors("write", path), open_below(path.parent, path.parent.parent) as folder:
        return _opened(path.name, access | os.O_APPEND | os.O_CREAT, folder)


def open_to_read(path: Path) -> int:
    """Returns a descriptor that reads a regular file; raises OSError for a link, a pipe and a device."""
    return _opened(path, os.O_RDONLY)


def is_hollow(facts: os.stat_result) -> bool:
    """Returns whether a large file is mostly holes: less than a sixteenth is on disk, and blocks are counted."""
    return facts.st_size > _DENSE_BYTES and facts.st_blocks * BLOCK_BYTES < facts.st_size // _MOST_HOLES


def open_new(name: str, folder: int) -> int:
    """Returns a descriptor that writes bamboo's own new file in an open folder; raises OSError if the name is taken."""
    return os.open(name, _NEW, _PRIVATE, dir_fd=folder)


def open_in(name: str, folder: int) -> int:
    """Returns a descriptor that reads a regular file in an open folder; raises OSError for a link and a device."""
    return _opened(name, os.O_RDONLY, folder)


def open_inner(name: str, folder: int) -> AbstractContextManager[int]:
    """Yields a descriptor of a folder in an open folder; raises OSError for a link."""
    return _opened_folder(name, folder, os.O_NOFOLLOW)


def sync_folder(folder: int) -> None:
    """Waits until the entries of an open folder are on disk, if the file system can do that; raises OSError."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
    finally:
        os.close(fd)


def make_folder(folder: Path, below: Path, hint: str = "") -> None:
    """Creates a folder and its parents, without a link below `below`; raises StorageError, ending with the hint."""
    with storage_errors("make", folder, hint):
        with suppress(FileExistsError):
            below.mkdir(parents=True)
        with open_below(folder, below, is_made=True):
            pass


@contextmanager
def open_below(folder: Path, below: Path, *, is_made: bool = False) -> Iterator[int]:
    """Yields a descriptor of a folder; no part of its path after `below` may be a link. Raises OSError.

    The descriptor refers to the same folder while it is open, even if another process renames that.
    """
    with ExitStack() as outer:
        fd = outer.enter_context(_opened_folder(below))
        for part in folder.relative_to(below).parts:
            if is_made:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            fd = outer.enter_context(_opened_folder(part, fd, os.O_NOFOLLOW))
        yield fd


@contextmanager
def _opened_folder(name: str | Path, outer: int | None = None, flags: int = 0) -> Iterator[int]:
    try:
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=outer)
    except NotADirectoryError:
        _refuse_link(name, outer)
        raise
    with closing_fd(fd):
        yield fd


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Yields a descriptor, and closes it behind the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def _opened(name: str | Path, flags: int, folder: int | None = None) -> int:
    try:
        fd = os.open(name, flags | _OLD, _PRIVATE, dir_fd=folder)
    except OSError:
        _refuse_link(name, folder)
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def _refuse_link(name: str | Path, folder: int | None) -> None:
    """Raises an OSError of its own if the entry is a link, for which the kernel has several errors."""
    with suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{Path(name).name!r} is a link, and bamboo follows none here")


def _replace(folder: int, name: str, content: str | bytes, mode: int, *, is_synced: bool = True) -> None:
    """Replaces an entry of a folder with a file of this mode; 0 means the mode of the umask."""
    temporary = f".bamboo-{os.urandom(8).hex()}.tmp"
    fd = os.open(temporary, _NEW, mode or 0o666, dir_fd=folder)
    try:
        with closing_fd(fd):
            if mode:
                with suppress(PermissionError):  # of a file system without modes
                    os.fchmod(fd, mode)
            _write_all(fd, content)
            if is_synced:
                os.fsync(fd)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _write_into(path: Path, content: str | bytes, flags: int) -> None:
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)) as fd:
        _write_all(fd, content)


def _write_all(fd: int, content: str | bytes) -> None:
    left = memoryview(content.encode() if isinstance(content, str) else content)
    while left:
        left = left[os.write(fd, left) :]
