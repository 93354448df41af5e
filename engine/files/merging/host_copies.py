"""The folder of a host, and the copies of it that other hosts keep.

Rule: a file of records only grows, so a copy is a beginning of it, and the longest one has all that is left of it. Two
folders are of the same start of a host's agent if their events begin with the same line, which has its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.core.evidence.seal import EVENTS
from engine.core.history.step_files import FOLDER, step_file


class HostCopies:
    """The folder of a host and its copies; `path` is the first of them that was given."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = tuple(paths)
        self.path = paths[0]

    @property
    def events(self) -> Path:
        """The longest file of its events."""
        return max((path / EVENTS for path in self.paths), key=_size)

    def steps(self) -> dict[str, Path]:
        """Returns the longest file of each name in which it has actions or hashes."""
        found: dict[str, Path] = {}
        for folder in (path / FOLDER for path in self.paths):
            for each in sorted(folder.iterdir()) if folder.is_dir() else ():
                if step_file(each.name):
                    found[each.name] = max(found.get(each.name, each), each, key=_size)
        return found


def by_host(folders: Sequence[Path]) -> list[HostCopies]:
    """Returns the folders, each with its copies."""
    found: dict[bytes, list[Path]] = {}
    for each in folders:
        with (each / EVENTS).open("rb") as file:
            found.setdefault(file.readline(), []).append(each)
    return [HostCopies(paths) for paths in found.values()]


def _size(path: Path) -> int:
    return path.stat().st_size
