"""Weights that a user names in order to compare them: of a run, of a checkpoint, or in a file that was exported.

Rule: two runs are compared by the hashes of their steps, also of the runs that they were resumed from. Tensors are read
where a step or a file is named, and to find the element behind a difference, if both runs kept a step that has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checks.equality import NamedTensor, RowsEquality, TensorDifference, equal_rows, first_tensor_difference
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError
from engine.core.manifest import MOST_HEADER_BYTES, StoredTensor, is_manifest, plain_names, tensor_entry
from engine.core.texts import counted
from engine.files.atomic_write import storage_errors
from engine.files.checkpoint_folder import CheckpointName
from engine.files.jobs.checkpoint_place import CheckpointPlace, checkpoint_places, run_before
from engine.files.run_folder import RunFolder, find_run
from engine.files.trajectory_file import trajectory_rows

_SUFFIX = ".safetensors"
_LENGTH = 8  # bytes, in front of the header of a file
DIGITS = 12  # of a hash that is shown
_MOST_RUNS = 1_000  # in a chain of resumed runs


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """What `text` names: a file or folder of exported ones, or the checkpoints at `place`, of a whole `run` or not."""

    text: str
    file: Path | None = None
    place: CheckpointPlace | None = None
    run: RunFolder | None = None

    def steps(self) -> dict[int, CheckpointName]:
        """Returns the steps that were kept, with the names of their checkpoints."""
        return {} if self.place is None else {name.step: name for name in self.place.names()}

    def tensors(self, step: int | None = None, *, is_plain: bool = False) -> Iterator[NamedTensor]:
        """Yields the tensors of a step, by default the newest; `is_plain`: of a state_dict. Raises StorageError."""
        if self.file is not None:
            yield from _of_files(self.file)
            return
        steps = self.steps()
        if self.place is None or not steps:
            raise NothingMatchedError(f"no checkpoint in {self.text!r}")
        folder = self.place.folder
        manifest = folder.manifest(steps[max(steps) if step is None else step])
        for entry in manifest.layers:
            stored = folder.layer(manifest, entry.layer).tensors
            names = plain_names(manifest, entry.layer, stored) if is_plain else {name: name for name in stored}
            for name, tensor in names.items():
                yield NamedTensor(entry.layer, name, stored[tensor])

    def rows(self) -> list[TrajectoryRow]:
        """Returns the hashes of the run's steps, and of those before it that were other runs'."""
        return [] if self.run is None else rows_of_chain(self.run)


def named_weights(text: str, results: Path) -> NamedWeights:
    """Returns what a text names: a run (also ``latest``), a folder or URL of checkpoints with ``@STEP``, or a file.

    Raises:
        NothingMatchedError: there is no such run.
        UserError: the file has another format, or several runs begin so.
    """
    path = Path(text)
    if path.is_file():
        if path.suffix != _SUFFIX:
            hint = "bamboo export writes one: --output FILE.safetensors"
            raise UserError([Problem("", "a run, a checkpoint, or FILE.safetensors", repr(text), hint)])
        return NamedWeights(text, file=path)
    if path.is_dir() and any(path.glob(f"*{_SUFFIX}")) and not any(is_manifest(each.name) for each in path.iterdir()):
        return NamedWeights(text, file=path)
    place = next(checkpoint_places(text, results), None)
    whole = place is not None and place.step is None and place.asked
    return NamedWeights(text, place=place, run=find_run(results, text) if whole else None)


def rows_of_chain(run: RunFolder) -> list[TrajectoryRow]:
    """Returns the rows of a run, and of the runs before it that lie with it, each up to the step of the next one."""
    rows: list[TrajectoryRow] = []
    last: float = math.inf
    for _ in range(_MOST_RUNS):
        own: list[TrajectoryRow] = []
        with suppress(FileNotFoundError):  # of a run whose launcher was killed
            own = trajectory_rows(run.trajectory.read_text(encoding="utf-8"), run.trajectory)
        rows += [row for row in own if row.step <= last]
        before = run_before(run)
        if before is None:
            break
        name, step = before
        last = min(last, step, *(row.step - 1 for row in own))
        run = RunFolder(run.path.parent / name)
    return sorted(rows, key=lambda row: (row.step, row.layer))


class WeightsComparison(NamedTuple):
    """The comparison of two named weights, by rows or by tensors, of these `steps`; a file has None."""

    rows: RowsEquality | None = None
    tensor: TensorDifference | None = None
    num_tensors: int = 0
    steps: tuple[int | None, int | None] = (None, None)

    @property
    def is_equal(self) -> bool:
        """Whether no difference was found."""
        return self.tensor is None and (self.rows is None or self.rows.difference is None)

    def lines(self) -> list[str]:
        """Returns the comparison in words."""
        lines: list[str] = []
        if (rows := self.rows) is not None:
            of_steps = f"{rows.equal} of {rows.rows} rows in {counted(rows.steps, 'step')}, up to step {rows.last}"
            lines.append(f"{'different' if rows.difference else 'equal'}: {of_steps}, are equal")
            ours, theirs = (each[:DIGITS] for each in rows.hashes)
            both = f"{ours} in both" if ours == theirs else f"{ours} and {theirs}"
            lines.append(f"weights after step {rows.last}: {both}")
            lines += [f"first difference: {str_of(rows)}"] if rows.difference else []
        if self.num_tensors or self.tensor is not None:
            at = [f" after step {step}" if step is not None else "" for step in self.steps]
            where = at[0] if at[0] == at[1] else f" ({at[0].strip() or 'a file'}, and {at[1].strip() or 'a file'})"
            if self.tensor is None:
                lines.append(f"equal: all {counted(self.num_tensors, 'tensor')}{where}")
            else:
                lines.append(f"first different element{where}: {self.tensor}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values."""
        rows = None if self.rows is None else self.rows._asdict()
        difference = None if self.rows is None or self.rows.difference is None else str_of(self.rows)
        return {
            "equal": self.is_equal,
            "rows": None
            if rows is None
            else {name: rows[name] for name in ("equal", "rows", "steps", "last", "hashes")},
            "first_row": difference,
            "tensors": self.num_tensors,
            "steps": list(self.steps),
            "first_tensor": None if self.tensor is None else self.tensor._asdict(),
        }


def str_of(rows: RowsEquality) -> str:
    """Returns the first difference between rows in words."""
    if (difference := rows.difference) is None:
        return ""
    layer = "" if difference.layer is None else f", layer {difference.layer}"
    return f"step {difference.step}{layer}: {difference.part}, {difference.run} and {difference.twin}"


def compare_weights(a: NamedWeights, b: NamedWeights) -> WeightsComparison:
    """Compares two named weights.

    Raises:
        NothingMatchedError: they have no step in common.
        StorageError: a file cannot be read, or is damaged.
    """
    if a.run is not None and b.run is not None:
        rows = equal_rows(a.rows(), b.rows())
        if rows.steps:
            return _with_element(a, b, rows)
    steps: tuple[int | None, int | None] = (_step_of(a, b), _step_of(b, a))
    if a.run is not None and b.run is not None and (common := a.steps().keys() & b.steps().keys()):
        steps = (max(common), max(common))
    elif a.run is not None and b.run is not None:
        raise NothingMatchedError(f"no step of {a.text!r} is one of {b.text!r}: neither hashes nor checkpoints")
    is_plain = a.file is not None or b.file is not None
    return _of_tensors(a, b, steps, is_plain=is_plain)


def _step_of(weights: NamedWeights, other: NamedWeights) -> int | None:
    """Returns the step to read: that of the other one if only that names one, else the newest."""
    steps = weights.steps()
    named = other.place.step if other.place is not None else None
    return named if named in steps else max(steps, default=None)


def _of_tensors(
    a: NamedWeights, b: NamedWeights, steps: tuple[int | None, int | None], *, is_plain: bool
) -> WeightsComparison:
    ours, theirs = [*a.tensors(steps[0], is_plain=is_plain)], [*b.tensors(steps[1], is_plain=is_plain)]
    return WeightsComparison(None, first_tensor_difference(ours, theirs), len(ours), steps)


def _with_element(a: NamedWeights, b: NamedWeights, rows: RowsEquality) -> WeightsComparison:
    """Adds the first element that differs, in the first step behind the difference that both runs kept."""
    if rows.difference is None:
        return WeightsComparison(rows)
    common = [step for step in a.steps().keys() & b.steps().keys() if step >= rows.difference.step]
    if not common:
        return WeightsComparison(rows)
    step = min(common)
    return _of_tensors(a, b, (step, step), is_plain=False)._replace(rows=rows)


def _of_files(path: Path) -> Iterator[NamedTensor]:
    """Yields the tensors in a safetensors file, or in those of a folder, by name."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{_SUFFIX}"))
    tensors = [named for file in files for named in _of_file(file)]
    yield from sorted(tensors, key=attrgetter("name"))


def _of_file(path: Path) -> Iterator[NamedTensor]:
    with storage_errors("read", path):
        data = path.read_bytes()
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    content = memoryview(data)[begin:]
    try:
        if begin > min(len(data), _LENGTH + MOST_HEADER_BYTES):
            raise ValueError("its header is too long")
        entries: Mapping[str, Any] = json.loads(data[_LENGTH:begin])
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype, shape, (first, last) = tensor_entry(name, entry)
            if last > len(content):
                raise ValueError(f"{name!r:.80} ends beyond the end of the file")
            yield NamedTensor(None, name, StoredTensor(dtype, shape, (content[first:last],)))
    except (ValueError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path}: no safetensors file that can be read: {error}") from error
