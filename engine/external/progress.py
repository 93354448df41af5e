"""The steps of a job, from what it says already: its reports, its output, TensorBoard's event files, lines of JSON.

Rules: a source yields each step once, soon after the job wrote it, and reads only what its files have gained. A line or
record that is not whole yet waits; one that cannot be read is counted, and lost alone. A time that the job did not
write is that of the reading.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.core.checks.external_verdict import StateReport, StepReport
from engine.core.errors import EnvironmentLacksError, Problem, UserError
from engine.core.texts import pattern_error

_FINGERPRINTS = ".fingerprints.jsonl"
_LAUNCHER_RANK = re.compile(r"\[(?:default|rank)(\d+)\]:")  # before a line of a rank, by torchrun
_HEAD, _TAIL = struct.Struct("<QI"), 4  # of a TensorBoard record: its length and a checksum, and another one behind it
_UNREADABLE = b"\xff"  # no event
_FLOAT = 1  # the type of a tensor in a TensorBoard summary


class ProgressSource(Protocol):
    """Where the steps of a job can be read."""

    @property
    def unread(self) -> int:
        """The number of lines or records that could not be read."""

    def read(self) -> Iterator[StepReport]:
        """Yields the steps that the job has reported since the last call."""


@dataclass(slots=True)
class GrowingFile:
    """A file that a job appends to; one that became shorter was begun again.

    Parts, lines and records have at most `most` bytes: a longer line counts as empty, and a longer record, whose end is
    unknown, ends the reading.
    """

    path: Path
    most: int = 1 << 24
    _position: int = 0
    _rest: bytes = b""
    _is_given_up: bool = False

    def lines(self) -> Iterator[bytes]:
        """Yields the whole lines that the file has gained; none while it does not exist."""
        while data := self._gained():
            *lines, self._rest = (self._rest + data).split(b"\n")
            if self._is_given_up and lines:  # the end of a long line
                lines[0], self._is_given_up = b"", False
            if self._is_given_up or len(self._rest) > self.most:
                self._rest, self._is_given_up = b"", True
            yield from lines

    def records(self) -> Iterator[bytes]:
        """Yields the whole records of a TensorBoard event file that it has gained; where it is given up, nonsense."""
        while not self._is_given_up and (data := self._gained()):
            data, begin = self._rest + data, 0
            while begin + _HEAD.size <= len(data):
                size, _ = _HEAD.unpack_from(data, begin)
                end = begin + _HEAD.size + size
                if size > self.most:
                    self._is_given_up = True
                    yield _UNREADABLE
                    return
                if end + _TAIL > len(data):
                    break
                yield data[begin + _HEAD.size : end]
                begin = end + _TAIL
            self._rest = data[begin:]

    def _gained(self) -> bytes:
        """Returns the next part of what the file has gained; nothing at its end."""
        try:
            size = self.path.stat().st_size
            if size == self._position:
                return b""
            if size < self._position:
                self._position, self._rest = 0, b""
            with self.path.open("rb") as file:
                file.seek(self._position)
                data = file.read(self.most)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return data


@dataclass(slots=True)
class ReportedSteps:
    """The lines of `bamboo.progress` in the folder that `BAMBOO_PROGRESS` names, of all processes."""

    folder: Path
    unread: int = 0
    _files: dict[Path, GrowingFile] = field(default_factory=dict)

    def read(self) -> Iterator[StepReport]:
        """Yields the steps that processes have reported since the last call."""
        for path in sorted(self.folder.glob("*.jsonl")):
            if not path.name.endswith(_FINGERPRINTS):
                for line in self._files.setdefault(path, GrowingFile(path)).lines():
                    report = _reported(line)
                    self.unread += report is None
                    yield from [report] if report else []


def _reported(line: bytes) -> StepReport | None:
    entry = _object(line)
    step, at_ns, rank, loss = (entry.get(key) for key in ("step", "t_ns", "rank", "loss"))
    names = entry.get("samples")
    if type(step) is not int or type(at_ns) is not int or not isinstance(rank, (int, type(None))):
        return None
    if not isinstance(loss, (int, float, type(None))) or not isinstance(names, (list, type(None))):
        return None
    if names is not None and not all(isinstance(name, (int, str)) for name in names):
        return None
    return StepReport(step, at_ns, rank, str(entry.get("pid", "")), loss, None if names is None else tuple(names))


def reported_states(folder: Path) -> tuple[list[StateReport], int]:
    """Returns what `bamboo.fingerprint` wrote in a folder, and the number of lines that could not be read."""
    states, unread = [], 0
    for path in sorted(folder.glob(f"*{_FINGERPRINTS}")):
        for line in GrowingFile(path).lines():
            entry = _object(line)
            step, at_ns, rank, tensors = (entry.get(key) for key in ("step", "t_ns", "rank", "tensors"))
            if type(step) is int and isinstance(tensors, dict) and isinstance(rank, (int, type(None))):
                at_ns = at_ns if type(at_ns) is int else 0
                states.append(StateReport(step, at_ns, rank, {name: str(text) for name, text in tensors.items()}))
            else:
                unread += 1
    return states, unread


def _object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


@dataclass(slots=True)
class OutputSteps:
    """The lines of a job's output that a pattern matches, with groups step, and loss and rank if any.

    By default the rank is as torchrun writes it before the line: ``[default1]:``. Raises UserError without the group
    step.
    """

    path: Path
    pattern: str
    unread: int = 0
    _file: GrowingFile = field(init=False)
    _match: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        wrong = pattern_error(self.pattern)
        if wrong or "step" not in re.compile(self.pattern).groupindex:
            problem = Problem("progress", "a regular expression with a group (?P<step>...)", repr(self.pattern), wrong)
            raise UserError([problem])
        self._match, self._file = re.compile(self.pattern), GrowingFile(self.path)

    def read(self) -> Iterator[StepReport]:
        """Yields the steps in the lines that the output has gained."""
        for line in self._file.lines():
            text = line.decode("utf-8", "replace")
            if match := self._match.search(text):
                report = _matched(match.groupdict(), text)
                self.unread += report is None
                yield from [report] if report else []


def _matched(groups: dict[str, str | None], text: str) -> StepReport | None:
    match = _LAUNCHER_RANK.match(text)
    rank, loss = groups.get("rank") or (match and match[1]), groups.get("loss")
    try:
        return StepReport(
            int(groups["step"] or ""),
            time.monotonic_ns(),
            int(rank) if rank else None,
            "",
            float(loss) if loss else None,
        )
    except ValueError:
        return None


@dataclass(slots=True)
class JsonSteps:
    """A file with one JSON object for each step, with the names of its fields."""

    path: Path
    step: str = "step"
    loss: str = "loss"
    rank: str = "rank"
    unread: int = 0
    _file: GrowingFile = field(init=False)

    def __post_init__(self) -> None:
        self._file = GrowingFile(self.path)

    def read(self) -> Iterator[StepReport]:
        """Yields the steps in the lines that the file has gained; those without a step are left out."""
        for line in self._file.lines():
            entry = _object(line)
            step, loss, rank = (entry.get(name) for name in (self.step, self.loss, self.rank))
            self.unread += not entry
            if type(step) is int:
                loss = float(loss) if isinstance(loss, (int, float)) else None
                yield StepReport(step, time.monotonic_ns(), rank if type(rank) is int else None, "", loss)


@dataclass(slots=True)
class TensorBoardSteps:
    """The scalars of one tag in the event files below a folder; by default the first tag that appears.

    A process that begins again has another file. Raises EnvironmentLacksError without the package tensorboard.
    """

    folder: Path
    tag: str = ""
    unread: int = 0
    _files: dict[Path, GrowingFile] = field(default_factory=dict)

    def read(self) -> Iterator[StepReport]:
        """Yields the steps that the event files have gained, at the times that the job wrote."""
        for path in sorted(self.folder.rglob("events.out.tfevents.*")):
            for record in self._files.setdefault(path, GrowingFile(path)).records():
                yield from self._steps(record, path.name)

    def _steps(self, record: bytes, process: str) -> Iterator[StepReport]:
        try:
            from google.protobuf.message import DecodeError
            from tensorboard.compat.proto.event_pb2 import Event
        except ImportError as error:
            raise EnvironmentLacksError("event files need a package: pip install tensorboard") from error
        try:
            event = Event.FromString(record)
        except DecodeError:
            self.unread += 1
            return
        since_ns = time.monotonic_ns() - time.time_ns()
        for value in event.summary.value:
            loss = _scalar(value)
            if loss is not None and value.tag == (self.tag or value.tag):
                self.tag = value.tag
                yield StepReport(event.step, int(event.wall_time * 1e9) + since_ns, None, process, loss)


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.tensor.dtype == _FLOAT and not value.tensor.tensor_shape.dim:
        data: bytes = value.tensor.tensor_content
        return float(value.tensor.float_val[0] if value.tensor.float_val else struct.unpack("<f", data)[0])
    return None


@dataclass(slots=True)
class FirstSource:
    """Several sources in the order of preference; the first that has any step counts."""

    sources: Sequence[ProgressSource]
    _reports: list[list[StepReport]] = field(init=False)

    def __post_init__(self) -> None:
        self._reports = [[] for _ in self.sources]

    @property
    def unread(self) -> int:
        """The lines that the source which counts could not read."""
        return self.sources[self._best].unread

    def read(self) -> Iterator[StepReport]:
        """Yields the new steps of the source that counts."""
        before = [len(reports) for reports in self._reports]
        for number, source in enumerate(self.sources):
            self._reports[number] += source.read()
        yield from self._reports[self._best][before[self._best] :]

    def reports(self) -> list[StepReport]:
        """Returns all steps so far of the source that counts."""
        return self._reports[self._best]

    @property
    def _best(self) -> int:
        return next((number for number, reports in enumerate(self._reports) if reports), 0)
