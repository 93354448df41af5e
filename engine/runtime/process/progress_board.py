"""The progress board: one line of shared memory per worker, which the worker writes and the launcher reads.

The memory is anonymous, so nothing is left behind however the run ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.protocol.events import Loading
from engine.runtime.process.clock import now_ns

_LINE = struct.Struct("<qq16s")
_PLACE = struct.Struct("<iii?qqq")  # the last field is the hash of the others
_PLACE_AT = 64  # in a line
_BOTH = struct.Struct(f"{_LINE.format}{_PLACE_AT - _LINE.size}x{_PLACE.format.removeprefix('<')}")
_LOADING_AT = _PLACE_AT + _PLACE.size  # a byte for each kind of loading
_LINE_BYTES = 128
_MOST_TRIES = 3


# The fields of a `BoardPlace` but the last. A plain tuple, because one is made at each action, and creating a named one
# takes as long as the write.
PlaceFields = tuple[int, int, int, bool, int, int]


class BoardPlace(NamedTuple):
    """The position of a worker: the actions begun in `step`, whether it is `inside` the last, and since when.

    `slowest_ns` is its slowest action in this step and the previous one; `loading` says which thread loads data.
    """

    epoch: int
    step: int
    number: int
    inside: bool
    since_ns: int
    slowest_ns: int
    loading: Loading


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker is: its step, the total forwards and backwards it has finished, and its current action."""

    step: int
    num_computed: int
    action: str


class ProgressBoard:
    """The board; `fd` is passed to workers, which map the same memory."""

    def __init__(self, fd: int, num_lines: int):
        self.fd = fd
        self._memory = mmap.mmap(fd, num_lines * _LINE_BYTES)

    @classmethod
    def create(cls, num_lines: int) -> ProgressBoard:
        """Returns a new board with `num_lines` empty lines."""
        fd = os.memfd_create("bamboo-progress")
        os.ftruncate(fd, num_lines * _LINE_BYTES)
        return cls(fd, num_lines)

    @property
    def num_lines(self) -> int:
        """The number of its lines."""
        return len(self._memory) // _LINE_BYTES

    def grow(self, num_lines: int) -> None:
        """Adds empty lines up to `num_lines`; a worker maps only the lines that exist when it starts."""
        if num_lines * _LINE_BYTES > len(self._memory):
            self._memory.resize(num_lines * _LINE_BYTES)

    def clear(self, line: int) -> None:
        """Empties one line, before another worker gets it."""
        begin = line * _LINE_BYTES
        self._memory[begin : begin + _LINE_BYTES] = bytes(_LINE_BYTES)

    def begin(self, line: int, num_computed: int, action: str, place: PlaceFields) -> None:
        """Overwrites one line, and the position in it, at the begin of an action."""
        begin, text = line * _LINE_BYTES, action.encode()
        _BOTH.pack_into(self._memory, begin, place[1], num_computed, text, *place, hash(place))

    def read(self, line: int) -> Progress:
        """Returns one line, possibly with half of an update: it is only for display."""
        step, num_computed, action = _LINE.unpack_from(self._memory, line * _LINE_BYTES)
        return Progress(step, num_computed, action.rstrip(b"\0").decode(errors="replace"))

    def place(self, line: int, place: PlaceFields) -> None:
        """Overwrites the position in a line."""
        _PLACE.pack_into(self._memory, line * _LINE_BYTES + _PLACE_AT, *place, hash(place))

    def load(self, line: int, how: Loading, is_loading: bool) -> None:
        """Sets whether a thread loads data."""
        self._memory[line * _LINE_BYTES + _LOADING_AT + how] = is_loading

    def place_of(self, line: int) -> BoardPlace | None:
        """Returns the position in a line; None if there is none, or only halves of two."""
        begin = line * _LINE_BYTES
        for _ in range(_MOST_TRIES):
            # Before the position: a worker writes the new time before it ends the loading.
            loading = [kind for kind in Loading if self._memory[begin + _LOADING_AT + kind]]
            *place, check = _PLACE.unpack_from(self._memory, begin + _PLACE_AT)
            if hash(tuple(place)) == check:
                return BoardPlace._make((*place, max(loading, default=Loading.NONE)))
        return None

    def close(self) -> None:
        """Unmaps the memory and closes the descriptor."""
        self._memory.close()
        os.close(self.fd)


class LoaderStatus:
    """The position of `worker` on the board, where the agent reads it without the worker's help.

    The main thread moves and loads data; other threads may load ahead. The time inside an action restarts after
    loading, so a slow source makes no action slow.
    """

    def __init__(self, board: ProgressBoard, worker: int):
        self._board, self._worker = board, worker
        self._at = (0, 0, 0, False)
        self._num_ahead, self._lock = 0, threading.Lock()
        self._slowest_ns = self._slowest_before_ns = self._since_ns = 0
        self.move(*self._at)

    def move(self, epoch: int, step: int, index: int, inside: bool, num_computed: int = 0, action: str = "") -> None:
        """Records that the worker is inside action number `index` of a step, or has left it; `action` begins now."""
        time_ns, (_, step_before, _, was_inside) = now_ns(), self._at
        if was_inside and time_ns - self._since_ns > self._slowest_ns:
            self._slowest_ns = time_ns - self._since_ns
        if step != step_before:
            self._slowest_before_ns, self._slowest_ns = self._slowest_ns, 0
        self._at, self._since_ns = (epoch, step, index, inside), time_ns
        slowest_ns, before_ns = self._slowest_ns, self._slowest_before_ns
        slowest_ns = slowest_ns if slowest_ns > before_ns else before_ns
        place = (epoch, step, index, inside, time_ns, slowest_ns)
        if action:
            self._board.begin(self._worker, num_computed, action, place)
        else:
            self._board.place(self._worker, place)

    def load(self, is_loading: bool, *, ahead: bool) -> None:
        """Records that a thread begins or ends to load data; `ahead` if the main thread does not wait for it."""
        if ahead:
            with self._lock:
                self._num_ahead += 1 if is_loading else -1
                self._board.load(self._worker, Loading.AHEAD, self._num_ahead > 0)
            return
        if not is_loading:
            self._since_ns = now_ns()  # the load does not count
            self.move(*self._at)
        self._board.load(self._worker, Loading.MAIN, is_loading)
