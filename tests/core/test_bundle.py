"""A bundle has frames in their order; a bundle that was damaged has none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvariantError
from engine.runtime.agent.frames import MOST_BUNDLE_BYTES, MOST_BYTES, bundle, bundled_bytes, fits, frames_of

FRAMES = st.lists(st.binary(max_size=300), min_size=1, max_size=20)


@given(FRAMES)
def test_a_bundle_has_its_frames_in_order(frames: list[bytes]) -> None:
    data = bundle(frames)
    assert frames_of(data) == frames
    assert len(data) == sum(map(bundled_bytes, frames))


@given(FRAMES, st.data())
def test_a_bundle_that_is_cut_has_fewer_frames_or_is_refused(frames: list[bytes], drawn: st.DataObject) -> None:
    data = bundle(frames)
    cut = data[: drawn.draw(st.integers(0, len(data) - 1))]
    try:
        found = frames_of(cut)
    except InvariantError:
        return
    assert found == frames[: len(found)] and bundle(found) == cut, "it is cut between two frames"


@given(st.binary(max_size=100))
def test_any_bytes_are_a_bundle_or_are_refused(data: bytes) -> None:
    try:
        found = frames_of(data)
    except InvariantError:
        return
    assert found and bundle(found) == data


def test_the_longest_frame_fits_alone_and_nothing_beside_it() -> None:
    longest = bytes(MOST_BYTES)
    assert fits(0, longest) and bundled_bytes(longest) == MOST_BUNDLE_BYTES
    assert not fits(bundled_bytes(b"a"), longest)
    assert fits(bundled_bytes(b"a"), bytes(MOST_BYTES - 5)) and not fits(bundled_bytes(b"a"), bytes(MOST_BYTES - 4))
    with pytest.raises(InvariantError, match="ends inside of a frame"):
        frames_of(b"")
