"""The records of a host travel to another one, which keeps them: the shipper and the keeper."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.step_files import FOLDER, step_file
from engine.core.hosts.host_messages import (
    EVENTS,
    MOST_SHIPPED_BYTES,
    ShippedHostMessage,
    ShippedPart,
    StoredSizesHostMessage,
    whole_bytes,
)
from engine.files.atomic_write import make_folder, open_to_append, open_to_read
from engine.files.run_folder import HOSTS_FOLDER
from engine.runtime.agent.frames import frame, shipped_frame, shipped_parts
from engine.runtime.agent.wire import StreamEnd

# Ships the records of this host to another one: what its files have more than the other end keeps.
#
# Rules: the files are the memory, so nothing waits here but one frame, and no order of the coordinator waits for it: a
# frame goes when nothing else does, and the next one when the other end has kept it. A new stream begins with a new
# shipper, which asks anew how much is kept. A part that fills its frame is followed at once, others five times a
# second. Nothing is shipped before `begin`: an answer that comes before its shipper can be found is lost, and awaited
# for ever.


_TICK_S = 0.2
_MOST_LEFT_OUT = 500  # files in one frame
_BUSY_S = 0.01  # from one look for a moment without other frames to the next

_kind = lru_cache(maxsize=1 << 14)(step_file)


class RecordShipper:
    """Ships host `own`'s records in `folder` over `end`, and the copies of those hosts that `relays` accepts."""

    def __init__(self, own: str, folder: Path, end: StreamEnd, relays: Callable[[str], bool]):
        self._own, self._folder, self._end, self._relays = own, folder, end, relays
        self._sizes: dict[tuple[str, str], int] = {}  # (host, file) -> bytes that the other end has
        self._whole: set[tuple[str, str]] = set()  # files that do not grow any more, and are kept whole
        self._is_waiting = self._has_more = self._is_ending = False
        self._wakes, self._has_finished, self._is_over = threading.Event(), threading.Event(), threading.Event()

    def begin(self) -> None:
        """Ships from now on, in a thread."""
        threading.Thread(target=self._run, name="shipper", daemon=True).start()

    def kept(self, answer: StoredSizesHostMessage) -> None:
        """Takes the answer of the other end."""
        for node, file, size in answer.sizes:
            self._sizes[node, file] = size
            if not size:  # the host has left it out
                self._sizes.pop((node, file), None)
        self._is_waiting = False
        if answer.is_last:
            self._has_finished.set()
        if self._has_more or self._is_ending:
            self._wakes.set()

    def knows(self, node: str, file: str, size: int) -> None:
        """Knows that the other end has so much of a file, which has come from it."""
        self._sizes[node, file] = max(size, self._sizes.get((node, file), 0))

    def finish(self, patience_s: float) -> bool:
        """Ships what is there, says that it was the last, and ends; returns whether the other end has all of it."""
        self._is_ending = True
        self._wakes.set()
        self._has_finished.wait(patience_s)
        self.close()
        return self._has_finished.is_set()

    def close(self) -> None:
        """Ships nothing more."""
        self._is_over.set()
        self._wakes.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if not self._is_waiting and (parts := self._next() or ([] if self._is_ending else None)) is not None:
                self._is_waiting = True
                self._send(shipped_frame(parts, is_last=not parts))
            self._wakes.wait(_TICK_S)
            self._wakes.clear()

    def _send(self, frame: bytes) -> None:
        while not self._end.send_last(frame) and not self._is_over.wait(_BUSY_S):
            pass

    def _next(self) -> list[tuple[ShippedPart, bytes]]:
        """Returns the next parts; a file that is gone meanwhile was left out."""
        parts = self._left_out()
        room, self._has_more = MOST_SHIPPED_BYTES, False
        for node, file, path in self._files():
            begin = self._sizes.get((node, file), 0)
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                if size <= begin:
                    continue
                data = _read(path, begin, min(room, size - begin))
                self._has_more = self._has_more or size - begin > room
                if length := whole_bytes(file, begin, data):
                    parts.append((ShippedPart(node, file, begin, length), data[:length]))
                    room -= length
            if not room:
                break
        return parts

    def _left_out(self) -> list[tuple[ShippedPart, bytes]]:
        """Returns a part without bytes for each file that this host has left out since it shipped it."""
        there = {*_names(self._folder / FOLDER)}
        own = [file for node, file in [*self._sizes] if node == self._own and file != EVENTS] if there else []
        gone = [file for file in own if file.rpartition("/")[2] not in there][:_MOST_LEFT_OUT]
        for file in gone:
            self._sizes.pop((self._own, file), None)
            self._whole.discard((self._own, file))
        return [(ShippedPart(self._own, file, 0, 0), b"") for file in gone]

    def _files(self) -> Iterator[tuple[str, str, Path]]:
        """Yields host, name and path of each file that may have more, the events of each host first."""
        folders = [(self._own, self._folder)]
        with contextlib.suppress(FileNotFoundError):
            hosts = sorted(os.listdir(self._folder / HOSTS_FOLDER))
            folders += [(name, self._folder / HOSTS_FOLDER / name) for name in hosts if self._relays(name)]
        for node, folder in folders:
            for file in (EVENTS, *self._step_files(node, folder)):
                if (node, file) not in self._whole:
                    yield node, file, folder / file

    def _step_files(self, node: str, folder: Path) -> list[str]:
        """Returns the files of steps; of a worker only its newest one grows."""
        names = _names(folder / FOLDER)
        files = sorted((file for file in map(_kind, names) if file is not None), key=lambda file: file.first)
        newest = {file.worker: file.first for file in files}
        for file in files:
            key = node, f"{FOLDER}/{file}"
            if file.first < newest[file.worker] and (size := self._sizes.get(key)) and key not in self._whole:
                with contextlib.suppress(OSError):
                    if (folder / key[1]).stat().st_size <= size:
                        self._whole.add(key)
        return [f"{FOLDER}/{file}" for file in files]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _read(path: Path, begin: int, most: int) -> bytes:
    with open(open_to_read(path), "rb") as file:
        return os.pread(file.fileno(), most, begin)


# Keeps the records of other hosts, as they ship them: ``RUN/hosts/NAME`` is read as the folder of that host.
#
# Rules: a thread writes, so a slow disk holds up no stream. A part is written where the copy ends; one that begins
# elsewhere is not, and the answer says how much is there. A disk that takes nothing is tried again; meanwhile the host
# has no answer, so it ships nothing more. The run does not depend on it.

_AGAIN_S = 1.0
SendBack = Callable[[bytes], None]


class RecordReceiver:
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
        while (shipment := self._came.get()) is not None and not self._is_over.is_set():
            header, parts, answer = shipment
            sizes: dict[tuple[str, str], int] = {}
            for part, data in parts:
                while (size := self._try(part, data)) is None:
                    if self._is_over.wait(_AGAIN_S):
                        return
                sizes[part.node, part.file] = size
            answer(frame(StoredSizesHostMessage(tuple((*key, size) for key, size in sizes.items()), header.is_last)))

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
