"""The seal of a run: the size and the hashes of each file of its evidence, in the last record but one.

A file is hashed in at most `_MOST_PARTS` parts, so that a difference has a place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

EVENTS = "events.jsonl"
BEFORE_EVENTS = ("run.json", "scenario.yaml")  # of a run that begins: they stand there before its first record
_MOST_PARTS = 32
_LEAST_PART_BYTES = 4096
_HASH_BYTES = 6
_DIGITS = 2 * _HASH_BYTES
# The paths of a seal, in the folder of its run: no other one is read.
_NAMES = re.compile(
    r"(twin/)?(events\.jsonl|trajectory\.csv|steps/(actions-\d{1,9}-\d{1,18}\.bin|hashes-\d{1,18}\.jsonl))"
    r"|run\.json|scenario\.yaml"
)


class SealedFile(NamedTuple):
    """A file of a run at its end: the path in the folder of the run, the size, and the hashes of its parts in a row."""

    file: str
    bytes: int
    hashes: str


def is_evidence(file: str) -> bool:
    """Whether the file of this path in the folder of a run is evidence."""
    return _NAMES.fullmatch(file) is not None


def part_bytes(size: int) -> int:
    """Returns the bytes of each part of a file of this size, but for its last one."""
    least = -(-size // _MOST_PARTS)
    return max(1, -(-least // _LEAST_PART_BYTES)) * _LEAST_PART_BYTES


def sealed(file: str, size: int, parts: Iterable[bytes]) -> SealedFile:
    """Returns the seal of a file of this size, of the bytes in its parts."""
    return SealedFile(file, size, "".join(blake2b(each, digest_size=_HASH_BYTES).hexdigest() for each in parts))


def broken_seal(seal: SealedFile, parts: Iterable[bytes]) -> str:
    """Returns in words the first part of a file that is not as it was sealed; empty if all are."""
    step = part_bytes(seal.bytes)
    for number, (one, other) in enumerate(zip(_hashes(seal.hashes), _hashes_of(seal, parts), strict=False)):
        if one != other:
            first, last = number * step, min(seal.bytes, (number + 1) * step)
            return f"its bytes {first:,} to {last - 1:,} are not those that the run wrote"
    return ""


def _hashes(text: str) -> Iterator[str]:
    return (text[place : place + _DIGITS] for place in range(0, len(text), _DIGITS))


def _hashes_of(seal: SealedFile, parts: Iterable[bytes]) -> Iterator[str]:
    return _hashes(sealed(seal.file, seal.bytes, parts).hashes)
