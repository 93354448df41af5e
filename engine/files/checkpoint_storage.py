"""A place for checkpoints, a folder or a URL, through which all their files are written and read.

Rules: names are ``FOLDER/FILE``. A created file is complete and on disk, or no manifest will name it. A published file
gets its name atomically, after all earlier files of its folder. A read returns the bytes of one open file, and the
caller hashes and parses the same bytes. Every method raises StorageError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from engine.core.errors import StorageError

# A text that begins with a scheme and a colon, in upper or lower case, is a URL, and must be ``SCHEME://PLACE``. Any
# other text is a folder; one that looks like a URL needs a ``./`` in front. ``file:///PATH`` is a folder too, with
# escapes such as ``%20`` decoded.
_SCHEME = "[a-z][a-z0-9+.-]*"
_URL = re.compile(f"({_SCHEME}::)*{_SCHEME}://", re.IGNORECASE)  # fsspec chains file systems with ::
_FILE = re.compile("file://(?=/)", re.IGNORECASE)
_LIKE_URL = re.compile(f"{_SCHEME}:|://", re.IGNORECASE)
_NO_PLACE = re.compile("file://(?!/)|[^/]*://$", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Returns whether a text is a URL, of an object store or of a folder."""
    return _URL.match(text) is not None


def is_half_url(text: str) -> bool:
    """Returns whether a text is neither a folder nor a whole URL."""
    return bool(_NO_PLACE.match(text) or (_LIKE_URL.match(text) and not is_url(text)))


def folder_at(place: str | Path) -> Path | None:
    """Returns the local folder of a place; None for the URL of an object store."""
    text = str(place)
    if file := _FILE.match(text):
        return Path(unquote(text[file.end() :]))
    return None if is_url(text) else Path(text)


Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The size of a file in bytes, and the SHA-256 (hex) of the bytes passed to the system."""

    size: int
    sha256: str


class Storage(Protocol):
    """A place for checkpoints; `place` is its folder or its URL, for messages."""

    @property
    def place(self) -> str:
        """The folder or the URL."""

    def create(self, name: str, chunks: Iterable[Bytes]) -> WrittenFile:
        """Writes a new file, whose name no reader knows yet."""

    def publish(self, name: str, data: bytes) -> None:
        """Writes a file that readers find by its name."""

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a file, at most `most`."""

    def names(self) -> tuple[str, ...]:
        """Returns the names of all files in folders, in order; files in the place itself do not count."""

    def remove(self, name: str) -> None:
        """Removes a file, or an empty folder; no error if it is gone."""

    def sync_folder(self, folder: str) -> None:
        """Waits until removals in a folder are on disk."""


def refuse_too_large(name: str, size: int) -> None:
    """Raises StorageError for a size in bytes that does not fit into this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise StorageError(f"{name}: it should have {size} bytes, and this machine has memory for {memory}")
