"""Two runs, and two sets of tensors: equal, or different in one place that is found."""

from __future__ import annotations

import struct
from dataclasses import replace

from engine.core.checks.equality import (
    NamedTensor,
    equal_rows,
    first_element,
    first_tensor_difference,
    step_hash,
)
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.manifest import StoredTensor
from tests.looped import looped


def rows(first: int, last: int) -> list[TrajectoryRow]:
    return [
        TrajectoryRow(step, layer, f"{step}.{layer}", "", step / 7) for step in range(first, last) for layer in (0, 1)
    ]


def floats(*values: float, shape: tuple[int, ...] = (), pieces: int = 1) -> StoredTensor:
    data = struct.pack(f"<{len(values)}f", *values)
    cut = len(data) // pieces
    parts = tuple(memoryview(data[at : at + cut]) for at in range(0, len(data), cut))
    return StoredTensor("float32", shape or (len(values),), parts)


def test_a_resumed_run_has_the_hash_of_the_whole_one_after_each_step() -> None:
    """The summary had two different hashes, of all steps of each run, and nothing showed that the bits were equal."""
    whole, resumed = rows(0, 9), rows(5, 9)
    assert step_hash(resumed) == step_hash(whole) != step_hash(rows(0, 8))
    assert step_hash(reversed(resumed)) == step_hash(whole)
    assert step_hash([]) == ""
    assert step_hash([*whole[:-1], replace(whole[-1], state="other")]) != step_hash(whole)


def test_the_rows_of_common_steps_are_compared_and_counted() -> None:
    whole, resumed = rows(0, 9), rows(5, 9)
    found = equal_rows(resumed, whole)
    assert (found.equal, found.rows, found.steps, found.last, found.difference) == (8, 8, 4, 8, None)
    assert found.hashes == (step_hash(whole), step_hash(whole))
    changed = [replace(row, state="other") if (row.step, row.layer) == (7, 1) else row for row in whole]
    found = equal_rows(resumed, changed)
    assert found.difference is not None
    assert (found.equal, found.difference.step, found.difference.layer) == (7, 7, 1)
    assert equal_rows(rows(0, 2), rows(5, 9)).steps == 0


@looped(
    ("dtype", "ours", "theirs", "place", "words"),
    [
        ("<4f", (0, 1, 2, 3), (0, 1, 2, 3.5), (1, 1), ("3 (0x40400000)", "3.5 (0x40600000)")),
        ("<4f", (0, 1, -0.0, 3), (0, 1, 0.0, 3), (1, 0), ("-0 (0x80000000)", "0 (0x00000000)")),
        ("<4d", (0, 1, 2, 3), (0, 1.5, 2, 3), (0, 1), ("1.0 (0x3ff0000000000000)", "1.5 (0x3ff8000000000000)")),
        ("<4h", (1, 2, 3, 4), (1, -2, 3, 4), (0, 1), ("2 (0x0002)", "-2 (0xfffe)")),
        ("bfloat16", (0x3F80,) * 4, (0x3F80, 0x3F80, 0x3F80, 0x4000), (1, 1), ("1 (0x3f80)", "2 (0x4000)")),
        ("float8_e5m2", (0, 1, 2, 3), (0, 1, 2, 4), (1, 1), ("0x03", "0x04")),
    ],
)
def test_the_first_element_that_differs_is_found_and_its_bits_are_shown(
    dtype: str, ours: tuple[float, ...], theirs: tuple[float, ...], place: tuple[int, ...], words: tuple[str, str]
) -> None:
    form = {"bfloat16": "<4H", "float8_e5m2": "<4B"}.get(dtype, dtype)
    name = {"<4f": "float32", "<4d": "float64", "<4h": "int16"}.get(dtype, dtype)
    one, other = (StoredTensor(name, (2, 2), (memoryview(struct.pack(form, *each)),)) for each in (ours, theirs))
    assert first_element(one, other) == (place, *words)
    assert first_element(one, one) is None


def test_a_difference_behind_the_first_megabyte_and_between_shards_is_found() -> None:
    zeros, ones = floats(*[0.0] * 300_000, shape=(3, 100_000)), [0.0] * 300_000
    ones[299_999] = 1.0
    found = first_element(zeros, floats(*ones, shape=(3, 100_000), pieces=3))
    assert found is not None and found[0] == (2, 99_999)
    assert first_element(floats(1, 2, pieces=2), floats(1, 2)) is None


def test_the_first_tensor_that_differs_is_named_with_its_layer() -> None:
    ours = [NamedTensor(0, "a", floats(1, 2)), NamedTensor(1, "b", floats(3, 4))]
    assert first_tensor_difference(ours, reversed(ours)) is None
    found = first_tensor_difference(ours, [ours[0], NamedTensor(1, "b", floats(3, 5))])
    assert str(found) == "layer 1, tensor b, element [1]: 4 (0x40800000) and 5 (0x40a00000)"
    found = first_tensor_difference(ours, [ours[0], NamedTensor(None, "b", floats(3, 4, shape=(1, 2)))])
    assert str(found) == "layer 1, tensor b: float32 [2] and float32 [1, 2]"
    assert str(first_tensor_difference(ours, ours[:1])) == "layer 1, tensor b: float32 [2] and none"
    assert str(first_tensor_difference(ours[:1], ours)) == "layer 1, tensor b: none and float32 [2]"
