"""Parts of the files of records as they travel from one host to another: a frame has parts of several files.

Rules: files of records only grow, so a copy is a beginning of its file. The host that keeps a copy says how many bytes
it has, and the next part begins there: after a take-over as well. A part has whole lines and whole entries, so a copy
ends between two records. A part without bytes says that its host has left the file out. Bytes of any other form, and
names of any other file, are refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.errors import InvariantError
from engine.core.history.step_files import ENTRY_BYTES, FOLDER, step_file
from engine.core.hosts.host_messages import ShippedHostMessage, frame
from engine.core.hosts.host_options import NAME

EVENTS = "events.jsonl"
MOST_SHIPPED_BYTES = 1 << 16  # of files in one frame: control messages wait for no more than that
_FAST = 1  # of zlib: events become a sixth, entries of actions a third, in 3 ms for a megabyte


class ShippedPart(NamedTuple):
    """So many bytes of a file of a host; `file` is its path in the folder of the run on that host."""

    node: str
    file: str
    begin: int
    length: int


def is_shipped(file: str) -> bool:
    """Whether a path in the folder of a run is one of the files of its records."""
    folder, _, name = file.rpartition("/")
    return file == EVENTS or (folder == FOLDER and step_file(name) is not None)


def whole_bytes(file: str, begin: int, data: bytes) -> int:
    """Returns how many of the bytes behind `begin` are whole lines or entries; all of a line that fills a frame."""
    if file.endswith(".bin"):
        return max(0, (begin + len(data)) // ENTRY_BYTES * ENTRY_BYTES - begin)
    end = data.rfind(b"\n") + 1
    return end or (len(data) if len(data) == MOST_SHIPPED_BYTES else 0)


def shipped_frame(parts: Sequence[tuple[ShippedPart, bytes]], *, is_last: bool = False) -> bytes:
    """Returns the frame of some parts and their bytes; `is_last`: the host has nothing more."""
    header = ShippedHostMessage(tuple((*part,) for part, _ in parts), is_last)
    return frame(header, zlib.compress(b"".join(data for _, data in parts), _FAST))


def shipped_parts(header: ShippedHostMessage, packet: bytes) -> list[tuple[ShippedPart, bytes]]:
    """Returns the parts of a frame and their bytes; raises InvariantError for any other form."""
    parts = [*map(ShippedPart._make, header.parts)]
    for each in parts:
        if not (NAME.fullmatch(each.node) and is_shipped(each.file) and each.begin >= 0 and each.length >= 0):
            raise InvariantError(f"this is no part of the records of a host: {each!r:.200}")
    total = sum(each.length for each in parts)
    if total > MOST_SHIPPED_BYTES:
        raise InvariantError(f"{total} bytes of records come in one frame, and at most {MOST_SHIPPED_BYTES} may")
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(packet, total + 1)  # a few bytes can stand for millions
    except zlib.error as error:
        raise InvariantError(f"records of a host cannot be read: {error}") from error
    if len(data) != total or not inflating.eof or inflating.unused_data:
        raise InvariantError(f"records of a host do not have the {total} bytes of their parts")
    found = []
    for each in parts:
        found.append((each, data[: each.length]))
        data = data[each.length :]
    return found
