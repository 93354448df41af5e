"""Keeps the records of other hosts, as they ship them: ``RUN/hosts/NAME`` is read as the folder of that host.

Rules: a thread writes, so a slow disk holds up no stream. A part is written where the copy ends; one that begins
elsewhere is not, and the answer says how much is there. A disk that takes nothing is tried again; meanwhile the host
has no answer, so it ships nothing more. The run does not depend on it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.hosts.host_messages import KeptHostMessage, ShippedHostMessage, frame
from engine.core.hosts.shipped_parts import EVENTS, ShippedPart, shipped_parts
from engine.files.atomic_write import make_folder, open_to_append
from engine.files.run_folder import HOSTS_FOLDER

_AGAIN_S = 1.0
SendBack = Callable[[bytes], None]


class LineKeeper:
    """The copies of the records of other hosts; none is written before `begin` has told the folder of the run."""

    def __init__(self) -> None:
        self._run = Path()
        self._made: set[Path] = set()
        self._came: queue.SimpleQueue[tuple[ShippedHostMessage, list[tuple[ShippedPart, bytes]], SendBack] | None] = (
            queue.SimpleQueue()
        )
        self._is_over = threading.Event()

    def begin(self, run: Path) -> None:
        """Keeps the records in the folder of the run from now on."""
        self._run = run
        threading.Thread(target=self._work, name="keeper", daemon=True).start()

    def take(self, header: ShippedHostMessage, packet: bytes, answer: SendBack) -> list[ShippedPart]:
        """Takes a frame and returns its parts; `answer` sends the answer, later. InvariantError: another form."""
        parts = shipped_parts(header, packet)
        self._came.put((header, parts, answer))
        return [part for part, _ in parts]

    def close(self) -> None:
        """Keeps nothing more."""
        self._is_over.set()
        self._came.put(None)

    def _work(self) -> None:
        while (found := self._came.get()) is not None and not self._is_over.is_set():
            header, parts, answer = found
            sizes: dict[tuple[str, str], int] = {}
            for part, data in parts:
                while (size := self._try(part, data)) is None:
                    if self._is_over.wait(_AGAIN_S):
                        return
                sizes[part.node, part.file] = size
            answer(frame(KeptHostMessage(tuple((*key, size) for key, size in sizes.items()), header.is_last)))

    def _try(self, part: ShippedPart, data: bytes) -> int | None:
        """Writes a part if the copy ends where it begins; returns the size of the copy, None if the disk fails."""
        path = self._run / HOSTS_FOLDER / part.node / part.file
        try:
            if path.parent not in self._made:
                make_folder(path.parent, self._run)
                self._made.add(path.parent)
            if not part.length and part.file != EVENTS:
                path.unlink(missing_ok=True)
                return 0
            with open(open_to_append(path), "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if part.begin > size:
                    return size
                left = memoryview(data)[size - part.begin :]
                while left:
                    left = left[os.write(file.fileno(), left) :]
                return max(size, part.begin + part.length)
        except (OSError, StorageError):
            return None
