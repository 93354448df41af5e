"""A place for checkpoints, a folder or a URL: all files of checkpoints are written and read through it.

Rules: names are ``FOLDER/FILE``. A file that was created is whole and on disk, or no manifest will name it. A file that
was published takes its name in one step, behind all files of its folder that were created before. A read returns the
bytes of one open file: a caller hashes these bytes, and then parses the same. Every method raises StorageError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.core.errors import StorageError

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a file in bytes, and the SHA-256 (hex) of the bytes that were handed to the system."""

    size: int
    sha256: str


class Storage(Protocol):
    """A place for checkpoints; `place` is its folder or its URL, for messages."""

    @property
    def place(self) -> str:
        """The folder or the URL."""

    def create(self, name: str, chunks: Iterable[Bytes]) -> Written:
        """Writes a new file, whose name no reader knows yet."""

    def publish(self, name: str, data: bytes) -> None:
        """Writes a file that readers find by its name."""

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a file, which may have at most `most`."""

    def names(self) -> tuple[str, ...]:
        """Returns the names of all files in folders, in order; those in the place itself are none of checkpoints."""

    def remove(self, name: str) -> None:
        """Removes a file, or an empty folder; no error if it is gone."""

    def sync_folder(self, folder: str) -> None:
        """Waits until removals in a folder are on disk."""


def refuse_too_large(name: str, size: int) -> None:
    """Raises StorageError for a size in bytes that this machine's memory cannot have."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise StorageError(f"{name}: it should have {size} bytes, and this machine has memory for {memory}")
