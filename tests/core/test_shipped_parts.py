"""Parts of the files of records on their way: whole lines and entries, and nothing of any other form is taken."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.core.history.step_files import ENTRY_BYTES
from engine.core.hosts.host_messages import (
    EVENTS,
    MOST_SHIPPED_BYTES,
    ShippedHostMessage,
    ShippedPart,
    is_shipped,
    whole_bytes,
)
from engine.runtime.agent.frames import MOST_BYTES, frame, read_frame, shipped_frame, shipped_parts
from tests.looped import looped

ACTIONS = "steps/actions-0-0.bin"


def read(data: bytes) -> list[tuple[ShippedPart, bytes]]:
    header, packet = read_frame(data)
    assert isinstance(header, ShippedHostMessage)
    return shipped_parts(header, packet)


def refused(*parts: tuple[str, str, int, int], packet: bytes = b"") -> str:
    with pytest.raises(InvariantError) as caught:
        shipped_parts(ShippedHostMessage(tuple(map(ShippedPart._make, parts)), is_last=False), packet)
    return str(caught.value)


@given(st.lists(st.tuples(st.sampled_from(["a", "h-1"]), st.sampled_from([EVENTS, ACTIONS]), st.binary(max_size=50))))
def test_parts_travel(given_parts: list[tuple[str, str, bytes]]) -> None:
    parts = [(ShippedPart(node, file, 7, len(data)), data) for node, file, data in given_parts]
    assert read(shipped_frame(parts)) == parts


def test_bytes_that_cannot_be_compressed_fit_into_a_frame() -> None:
    data = random.Random(1).randbytes(MOST_SHIPPED_BYTES)  # noqa: S311
    part = ShippedPart("a" * 63, "steps/actions-999999999-999999999999999999.bin", 10**18, len(data))
    assert len(shipped_frame([(part, data)])) < MOST_BYTES
    assert read(shipped_frame([(part, data)])) == [(part, data)]


def test_a_part_ends_behind_a_line_or_an_entry() -> None:
    assert whole_bytes(EVENTS, 5, b"a\nb\nc") == 4
    assert whole_bytes(EVENTS, 5, b"torn") == 0
    long_line = b"x" * MOST_SHIPPED_BYTES
    assert whole_bytes(EVENTS, 5, long_line) == len(long_line)  # else it would never go
    assert whole_bytes(ACTIONS, 2 * ENTRY_BYTES, bytes(3 * ENTRY_BYTES + 5)) == 3 * ENTRY_BYTES
    assert whole_bytes(ACTIONS, 5, bytes(ENTRY_BYTES)) == ENTRY_BYTES - 5  # of a copy that ends inside of an entry
    assert whole_bytes(ACTIONS, 0, bytes(5)) == 0


@looped(
    "file",
    ["run.json", "../events.jsonl", "/etc/passwd", "steps/../events.jsonl", "logs/worker-0.log", "steps/x.bin", ""],
)
def test_only_records_are_written(file: str) -> None:
    assert not is_shipped(file)
    assert "no part of the records" in refused(("a", file, 0, 0))


@looped("node", ["", "..", ".", "a/b", "/a", "a\n", "a/..", "x" * 64])
def test_a_host_has_a_name_that_is_no_path(node: str) -> None:
    assert "no part of the records" in refused((node, EVENTS, 0, 0))


def test_bytes_are_those_of_the_parts() -> None:
    packet = zlib.compress(b"abc")
    one = ShippedPart("a", EVENTS, 0, 3)
    assert shipped_parts(ShippedHostMessage((one,), is_last=False), packet) == [(one, b"abc")]
    for length in (2, 4):
        assert "do not have" in refused(("a", EVENTS, 0, length), packet=packet)
    assert "do not have" in refused(one, packet=packet + b"more")
    assert "do not have" in refused(one, packet=packet[:-3])
    assert "cannot be read" in refused(one, packet=b"abc")
    assert "no part" in refused(("a", EVENTS, -1, 3), packet=packet)
    assert "no part" in refused(("a", EVENTS, 0, 9), ("a", EVENTS, 0, -6), packet=packet)


def test_few_bytes_that_stand_for_millions_are_not_unpacked() -> None:
    bomb = zlib.compress(bytes(10_000_000), 9)
    assert len(frame(ShippedHostMessage((), is_last=False), bomb)) < MOST_BYTES
    assert "do not have" in refused(("a", EVENTS, 0, 10), packet=bomb)
    assert "at most" in refused(("a", EVENTS, 0, MOST_SHIPPED_BYTES + 1), packet=bomb)
