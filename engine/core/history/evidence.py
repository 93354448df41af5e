"""The evidence of a run: the chain of its lines, and the seal of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

# The chain of the lines that one process writes into a file: each line ends with a hash of itself and all before it.
#
# Rules: several processes append to one file and each can die at any moment, so each has its own chain, which begins
# with its first line. A torn line is in no chain: its writer wrote it again, or was dead. The hash detects accidents
# and edits; a forger could recompute the hashes as well.
_BEGIN = ',"chain":"'
_HASH_BYTES = 8
_LENGTH = len(_BEGIN) + 2 * _HASH_BYTES + len('"}')
_WRITER = re.compile(r'\{"event":"[a-z_]+","worker":-?\d+,"pid":(\d+),')


def linked(text: str, before: str) -> tuple[str, str]:
    """Returns a record, the text of a JSON object, with its link behind the link `before`; and that link."""
    link = _link(before, text)
    return f'{text[:-1]}{_BEGIN}{link}"}}', link


def linked_lines(texts: Iterable[str]) -> str:
    """Returns records as the lines of a file, each in the chain of the process that it names."""
    last: dict[str, str] = {}
    lines = []
    for text in texts:
        writer = _writer(text)
        line, last[writer] = linked(text, last.get(writer, ""))
        lines.append(f"{line}\n")
    return "".join(lines)


def unlinked(line: str) -> tuple[str, str]:
    """Returns the record in a line, and its link; an empty one if the line has none."""
    place = len(line) - _LENGTH
    if place > 0 and line.startswith(_BEGIN, place) and line.endswith('"}'):
        return f"{line[:place]}}}", line[place + len(_BEGIN) : -2]
    return line, ""


def _writer(text: str) -> str:
    match = _WRITER.match(text)
    return match[1] if match else ""


def _link(before: str, text: str) -> str:
    return blake2b(f"{before}{text}".encode(), digest_size=_HASH_BYTES).hexdigest()


@dataclass(slots=True)
class Chains:
    """The chains of all writers of one file, line by line: the number of the line where the first breaks, and why."""

    broken: tuple[int, str] | None = None
    num_links: int = 0
    _last: dict[str, str] = field(default_factory=dict)  # the last link of each process
    _number: int = 0
    _bare: int = 0  # the number of the first whole record without a link

    def take(self, line: str) -> None:
        """Takes the next line of the file, without its newline."""
        self._number += 1
        begin = line.rfind('{"event":')  # behind the half of a line of another writer, which died in it
        text, link = unlinked(line[max(0, begin) :])
        writer = _writer(text)
        if not link:
            is_whole = bool(writer) and line.endswith("}")
            self._bare = self._bare or self._number * is_whole
            return
        self.num_links += 1
        before = self._last.get(writer, "")
        if link == before:
            self._break("appears twice")
        elif link not in (_link(before, text), _link("", text)):  # a process may reuse the pid of a dead one
            self._break("was changed, or a line before it is gone")
        self._last[writer] = link

    def end(self) -> None:
        """Ends the file: either every record has a link or none has."""
        if self.num_links and self._bare:
            self._number = self._bare
            self._break("has no link to those before it")

    def _break(self, why: str) -> None:
        self.broken = self.broken or (self._number, f"this record {why}")


# The seal of a run: the size and the hashes of each file of its evidence, in the last record but one.
#
# A file is hashed in at most `_MOST_PARTS` parts, so that a difference can be located.

EVENTS = "events.jsonl"
BEFORE_EVENTS = ("run.json", "scenario.yaml")  # written before the first record of a run
_MOST_PARTS = 32
_LEAST_PART_BYTES = 4096
_PART_HASH_BYTES = 6
_DIGITS = 2 * _PART_HASH_BYTES
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
    """Returns the bytes of each part of a file of this size, except its last one."""
    least = -(-size // _MOST_PARTS)
    return max(1, -(-least // _LEAST_PART_BYTES)) * _LEAST_PART_BYTES


def sealed(file: str, size: int, parts: Iterable[bytes]) -> SealedFile:
    """Returns the seal of a file of this size, of the bytes in its parts."""
    return SealedFile(file, size, "".join(blake2b(each, digest_size=_PART_HASH_BYTES).hexdigest() for each in parts))


def broken_seal(seal: SealedFile, parts: Iterable[bytes]) -> str:
    """Returns in words the first part of a file that has changed since it was sealed; empty if none has."""
    step, now = part_bytes(seal.bytes), sealed(seal.file, seal.bytes, parts)
    for number, (one, other) in enumerate(zip(_hashes(seal.hashes), _hashes(now.hashes), strict=False)):
        if one != other:
            first, last = number * step, min(seal.bytes, (number + 1) * step)
            return f"its bytes {first:,} to {last - 1:,} are not those that the run wrote"
    return ""


def _hashes(text: str) -> Iterator[str]:
    return (text[place : place + _DIGITS] for place in range(0, len(text), _DIGITS))
