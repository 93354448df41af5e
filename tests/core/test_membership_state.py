"""The state of the membership protocol outlives its coordinator, as JSON."""

from __future__ import annotations

import json

import pytest

from engine.codec.documents import state_of, state_text
from engine.core.errors import InvariantError
from engine.core.protocol.events import ExitSeen, Notice
from engine.core.protocol.state import Phase, State
from tests.core.membership_cases import S, holds, in_phase, plans, running, suspects, told
from tests.looped import looped

GATHERED = told(in_phase(Phase.FAILING_OVER), *(holds(6, worker, 2, '{"1": [2]}') for worker in (0, 1)))
STATES = [
    *(in_phase(phase) for phase in Phase),
    told(GATHERED, plans(7, 0, 2, "0" * 64)),
    told(running(), suspects(7, 0, 1, 2), Notice(8, 1, S)),
    told(running(redundant=False), ExitSeen(9, 1, -9)),
    running()._replace(repeats={"a transfer failed at workers 1 and 2": 2}),
]


@looped("state", STATES)
def test_the_next_coordinator_goes_on_from_what_was_decided(state: State) -> None:
    text = state_text(state)
    again = state_of(text, 77 * S)
    assert again.decided() == state.decided()
    assert state_text(again) == text
    assert "\n" not in text


@looped("state", STATES)
def test_times_begin_afresh(state: State) -> None:
    again = state_of(state_text(state), 77 * S)
    assert {again.moved_ns, again.repeated_ns, again.looked_ns, again.ticked_ns} == {77 * S}
    assert {seen.heard_ns for seen in again.sightings.values()} <= {77 * S}
    assert set(again.sightings) == set(state.members) & set(state.nodes)


@looped(
    "text",
    [
        "",
        "garbage",
        "null",
        "[]",
        "{}",
        state_text(running()).replace("running", "walking"),
        json.dumps({**json.loads(state_text(running())), "more": 1}),
        state_text(running()).replace('"epoch"', '"age"'),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvariantError, match="invalid state of the membership protocol"):
        state_of(text, 0)
