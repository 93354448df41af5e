"""A disk in memory whose power is cut before a call; it keeps the synced, and of the rest what a test chooses.

The bytes of a file and the entries of a folder are two things, and each has its own sync. An entry may outlive the cut
before the bytes behind it do, as on a real file system, which then has an empty file, or one full of zeros.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.files.checkpoint_storage import Bytes

_MOST_WRITTEN = 500  # bytes by one call, so that a file takes several


class PowerCut(BaseException):
    """The power is cut: the call does nothing, nor does any later one."""


@dataclass(slots=True)
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(slots=True)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    # changes since the last sync, in order: names that go, and names that come with their content
    pending: list[_Change] = field(default_factory=list)

    def change(self, gone: tuple[str, ...] = (), come: dict[str, _File | _Folder] | None = None) -> None:
        """Changes the entries in memory."""
        change = (gone, come or {})
        self.entries = _changed(self.entries, change)
        self.pending.append(change)


_Change = tuple[tuple[str, ...], dict[str, _File | _Folder]]


def _changed(entries: dict[str, _File | _Folder], change: _Change) -> dict[str, _File | _Folder]:
    gone, come = change
    return {name: each for name, each in entries.items() if name not in gone} | come


class PowerDisk:
    """A disk, as `Disk` says; its power is cut before the call of number `cut` among those that change it."""

    def __init__(self, cut: int | None = None, root: _Folder | None = None):
        self.cut = cut
        self.num_calls = 0
        self._root = root or _Folder()
        self._opened: list[_File] = []

    def make_folder(self, name: str) -> None:
        """Makes a folder."""
        if name and name not in self._root.entries:
            self._call()
            self._root.change(come={name: _Folder()})

    def create(self, name: str) -> int:
        """Opens a new file."""
        self._call()
        folder, file = self._place(name)
        if file in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        folder.change(come={file: _File()})
        self._opened.append(_file(folder, file))
        return len(self._opened) - 1

    def write(self, fd: int, data: Bytes) -> int:
        """Writes some bytes."""
        self._call()
        taken = bytes(data[:_MOST_WRITTEN])
        self._opened[fd].data += taken
        return len(taken)

    def sync(self, fd: int) -> None:
        """Puts the bytes of a file on disk."""
        self._call()
        self._opened[fd].synced = self._opened[fd].data

    def close(self, fd: int) -> None:
        """Does nothing."""

    def rename(self, name: str, new: str) -> None:
        """Renames a file in one step."""
        self._call()
        folder, file = self._place(name)
        folder.change((file,), {new.rpartition("/")[2]: folder.entries[file]})

    def sync_folder(self, name: str) -> None:
        """Puts the entries of a folder on disk."""
        self._call()
        folder = self._place(f"{name}/")[0] if name else self._root
        folder.durable, folder.pending = dict(folder.entries), []

    def read(self, name: str, most: int) -> bytes:
        """Reads a file."""
        data = _file(*self._place(name)).data
        if len(data) > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return data

    def remove(self, name: str) -> None:
        """Removes a file or an empty folder."""
        self._call()
        folder, file = self._place(name)
        if file not in folder.entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        found = folder.entries[file]
        if isinstance(found, _Folder) and found.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        folder.change((file,))

    def names(self) -> list[str]:
        """Lists all entries."""
        found = []
        for name, each in sorted(self._root.entries.items()):
            found.append(name)
            if isinstance(each, _Folder):
                found += (f"{name}/{inner}" for inner in sorted(each.entries))
        return found

    def survivors(self) -> Iterator[PowerDisk]:
        """Yields the disks that there may be after the cut: with nothing but the synced, with more, with everything."""
        pendings = [folder.pending for folder in (self._root, *_folders(self._root))]
        for bytes_of in (_synced, _zeros, _written):
            yield PowerDisk(root=_surviving(self._root, pendings, bytes_of))
        for pending in pendings:
            for number in range(len(pending)):
                for some in (pending[: number + 1], [pending[number]]):  # in order; and one alone
                    kept = [
                        some if each is pending else each if each is self._root.pending else [] for each in pendings
                    ]
                    yield PowerDisk(root=_surviving(self._root, kept, _synced))
        yield PowerDisk(root=_surviving(self._root, [[] for _ in pendings], _synced))

    def _call(self) -> None:
        if self.cut is not None and self.num_calls >= self.cut:
            raise PowerCut
        self.num_calls += 1

    def _place(self, name: str) -> tuple[_Folder, str]:
        folder, _, file = name.rpartition("/")
        found = self._root.entries.get(folder) if folder else self._root
        if not isinstance(found, _Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return found, file


class UnsyncedFiles(PowerDisk):
    """Planted: files are never synced."""

    def sync(self, fd: int) -> None:
        """Does nothing."""


class UnsyncedFolders(PowerDisk):
    """Planted: folders are never synced."""

    def sync_folder(self, name: str) -> None:
        """Does nothing."""


def _file(folder: _Folder, name: str) -> _File:
    found = folder.entries.get(name)
    if not isinstance(found, _File):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return found


def _folders(root: _Folder) -> list[_Folder]:
    """Returns all folders in the root, also those whose entry is only on disk, or only in memory."""
    found = {id(each): each for entries in (root.entries, root.durable) for each in entries.values()}
    return [each for each in found.values() if isinstance(each, _Folder)]


def _synced(file: _File) -> bytes:
    return file.synced


def _zeros(file: _File) -> bytes:
    return file.synced + bytes(len(file.data) - len(file.synced))


def _written(file: _File) -> bytes:
    return file.data


def _surviving(root: _Folder, kept: list[list[_Change]], bytes_of: Callable[[_File], bytes]) -> _Folder:
    """Returns the folders as the cut leaves them, with these pending changes of each, in the order of `_folders`."""
    folders = [root, *_folders(root)]
    inner = {id(each): kept[number] for number, each in enumerate(folders)}

    def left_of(folder: _Folder) -> _Folder:
        entries = folder.durable
        for change in inner.get(id(folder), []):
            entries = _changed(entries, change)
        after: dict[str, _File | _Folder] = {}
        for name, each in entries.items():
            if isinstance(each, _Folder):
                after[name] = left_of(each)
            else:
                data = bytes_of(each)
                after[name] = _File(data, data)
        return _Folder(after, dict(after))

    return left_of(root)
