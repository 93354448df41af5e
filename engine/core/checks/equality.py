"""Whether two runs, or two sets of tensors, are equal bit for bit; and where the first difference is, to the element.

Rules: only steps that both runs have hashes of are compared, and tensors by their names. A tensor that only one side
has is a difference. A step has one hash, of the state after it and its loss and of nothing before: so a run that was
resumed on the way has the hash of the whole one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from engine.core.checks.trajectory import TrajectoryRow, first_difference, trajectory_hash
from engine.core.history.process_records import Difference
from engine.core.manifest import StoredTensor

_CHUNK = 1 << 20  # bytes that are compared at a time
_FORMATS = {
    **{"float64": "d", "float32": "f", "float16": "e", "bool": "?"},
    **{
        "int64": "q",
        "int32": "i",
        "int16": "h",
        "int8": "b",
        "uint64": "Q",
        "uint32": "I",
        "uint16": "H",
        "uint8": "B",
    },
}


class NamedTensor(NamedTuple):
    """A tensor with its name, and the layer that it is of; None in a file, which knows no layers."""

    layer: int | None
    name: str
    tensor: StoredTensor

    def key(self, has_layers: bool) -> tuple[int | None, str]:
        """Returns what tells it from the others."""
        return self.layer if has_layers else None, self.name


class TensorDifference(NamedTuple):
    """The first tensor that differs, and its first element that does; None if the tensors have no common elements."""

    layer: int | None
    tensor: str
    element: tuple[int, ...] | None
    a: str
    b: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        element = "" if self.element is None else f", element {list(self.element)}"
        return f"{layer}tensor {self.tensor}{element}: {self.a} and {self.b}"


class RowsEquality(NamedTuple):
    """How many rows of two trajectories are equal, the first difference, and the hashes after the last step."""

    equal: int
    rows: int
    steps: int
    last: int  # step of both, -1 without any
    hashes: tuple[str, str]
    difference: Difference | None


def step_hash(rows: Iterable[TrajectoryRow]) -> str:
    """Returns the hash of the state after the last step in the rows; empty without rows. A resumed run has the same."""
    last_rows = [*rows]
    last = max((row.step for row in last_rows), default=-1)
    return trajectory_hash(row for row in last_rows if row.step == last) if last_rows else ""


def equal_rows(a: Iterable[TrajectoryRow], b: Iterable[TrajectoryRow]) -> RowsEquality:
    """Compares the rows of two runs in the steps that both have."""
    ours, theirs = [*a], [*b]
    steps = {row.step for row in ours} & {row.step for row in theirs}
    ours, theirs = ([row for row in rows if row.step in steps] for rows in (ours, theirs))
    by_key = {(row.step, row.layer): row.texts() for row in theirs}
    equal = sum(by_key.get((row.step, row.layer)) == row.texts() for row in ours)
    hashes = (step_hash(ours), step_hash(theirs))
    most = max(len(ours), len(theirs))
    return RowsEquality(equal, most, len(steps), max(steps, default=-1), hashes, first_difference(ours, theirs))


def first_tensor_difference(a: Iterable[NamedTensor], b: Iterable[NamedTensor]) -> TensorDifference | None:
    """Returns the first difference of two sets of tensors by name, in the order of `a`; None if equal."""
    own, others = [*a], [*b]
    has_layers = all(each.layer is not None for each in (*own, *others))
    theirs = {each.key(has_layers): each for each in others}
    for ours in own:
        if (other := theirs.pop(ours.key(has_layers), None)) is None:
            return TensorDifference(ours.layer, ours.name, None, _form(ours.tensor), "none")
        if _form(ours.tensor) != _form(other.tensor):
            return TensorDifference(ours.layer, ours.name, None, _form(ours.tensor), _form(other.tensor))
        if (element := first_element(ours.tensor, other.tensor)) is not None:
            return TensorDifference(ours.layer, ours.name, *element)
    first = next(iter(theirs.values()), None)
    return first and TensorDifference(first.layer, first.name, None, "none", _form(first.tensor))


def first_element(a: StoredTensor, b: StoredTensor) -> tuple[tuple[int, ...], str, str] | None:
    """Returns the place of the first element that differs in two tensors of one form, and both values in words."""
    ours, theirs = (b"".join(each.pieces) if len(each.pieces) > 1 else each.pieces[0] for each in (a, b))
    if ours == theirs or not (count := math.prod(a.shape)):
        return None
    size = len(ours) // count
    for begin in range(0, len(ours), _CHUNK):
        one, other = ours[begin : begin + _CHUNK], theirs[begin : begin + _CHUNK]
        if one != other:
            number = begin + next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            place = number // size
            span = slice(place * size, (place + 1) * size)
            return _index(place, a.shape), _value(a.dtype, bytes(ours[span])), _value(a.dtype, bytes(theirs[span]))
    return None


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def _value(dtype: str, data: bytes) -> str:
    """Returns an element in words, with its bits: two NaN have one name."""
    bits = f"0x{data[::-1].hex()}"
    if dtype == "bfloat16":  # the upper half of a float32
        dtype, data = "float32", b"\0\0" + data
    if dtype not in _FORMATS:
        return bits
    (value,) = struct.unpack(f"<{_FORMATS[dtype]}", data)
    return f"{value:.9g} ({bits})" if dtype in ("float32", "float16") else f"{value!r} ({bits})"


def _form(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
