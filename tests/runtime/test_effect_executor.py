"""What workers are told of an epoch or a commit, who first, and from when on the events say it was so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.core import messages
from engine.core.config.job import Job
from engine.core.membership.effects import Effect
from engine.core.membership.events import Event, ExitSeen, InventoryReceived, PlanAcknowledged, StepCommitted
from engine.core.membership.protocol import step
from engine.core.membership.state import State
from engine.core.message_codec import Message, decode
from engine.core.messages import EpochMessage, GoMessage
from engine.core.recovery.ballot import Commit
from engine.runtime.agent.effect_executor import EffectExecutor
from engine.runtime.agent.run_state import RunState
from engine.runtime.ipc.recorder import Recorder, now_ns, open_events
from tests.core.membership_cases import JOINED, forming


class Told:
    """Orders for three workers, and what each was told, as (worker, message)."""

    def __init__(self, events: Path | None = None) -> None:
        self.words: list[tuple[int, Message]] = []
        self.heard_ns: list[int] = []
        self.members: dict[int, Any] = {
            worker: SimpleNamespace(slots=(), exit_code=None, link=SimpleNamespace(send_packet=self._ear(worker)))
            for worker in range(3)
        }
        job = Job(model="mlp", stages=3)
        recorder = Recorder(open_events(events) if events else os.open(os.devnull, os.O_WRONLY), -1)
        self.effects = EffectExecutor(job, self.members, recorder, RunState(job))

    def _ear(self, worker: int) -> Callable[[bytes], None]:
        def hear(data: bytes) -> None:
            self.heard_ns.append(now_ns())
            self.words.append((worker, decode(data)))

        return hear

    def epochs(self) -> list[tuple[int, GoMessage | None]]:
        """Returns who was told of an epoch, and whether to go on at once; fails if anything else was told."""
        assert all(isinstance(word, EpochMessage) for _, word in self.words)
        return [(worker, word.go) for worker, word in self.words if isinstance(word, EpochMessage)]

    def decide(self, state: State, *events: Event) -> State:
        """Carries out what some events bring, which are decided as one; returns the new state."""
        self.words.clear()
        effects: list[Effect] = []
        for event in events:
            state, found = step(state, event)
            effects += found
        for effect in effects:
            self.effects.execute(effect, state)
        return state


def test_who_has_nothing_to_answer_hears_of_an_epoch_and_its_start_at_once() -> None:
    told = Told()
    told.decide(forming(), *JOINED)
    assert told.epochs() == [(worker, GoMessage(end=False, validate=False)) for worker in range(3)]


def test_who_has_to_answer_hears_of_the_start_when_all_have_and_the_first_stage_hears_first() -> None:
    told = Told()
    state = told.decide(forming(), *JOINED)
    told.members[0].exit_code = -9
    state = told.decide(state, ExitSeen(3, 0, -9))
    assert state.owners == (2, 1, 2)
    assert told.epochs() == [(2, None), (1, None)]
    state = told.decide(state, *(InventoryReceived(4, worker, 2, "") for worker in (1, 2)))
    state = told.decide(state, *(PlanAcknowledged(5, worker, 2, "plan") for worker in (1, 2)))
    assert told.words == [(2, GoMessage(False, False)), (1, GoMessage(False, False))]


def test_nobody_hears_of_a_commit_before_the_time_at_which_it_is_said_to_have_been(tmp_path: Path) -> None:
    """What a worker did after it, a heal for one, would lie before it, and be taken for nothing."""
    told = Told(tmp_path / "events.jsonl")
    state = told.decide(forming(), *JOINED)
    told.effects.decided(Commit(0, 0.5, 1.0, 1.0))
    told.heard_ns.clear()
    told.decide(state, StepCommitted(6, state.epoch, 0, state.shadows))
    assert told.words == [(worker, messages.CommitMessage(0, 1.0, "step")) for worker in range(3)]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (commit,) = [event for event in events if event["event"] == "commit"]
    assert commit["at_ns"] <= min(told.heard_ns)
