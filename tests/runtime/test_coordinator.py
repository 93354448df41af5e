"""The coordinator on both stores: what the next one finds, what a late one may not do, and how many keys there are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.membership.effects import (
    AnnounceCommit,
    Finish,
    GatherInventories,
    Halt,
    PublishEpoch,
    PublishPlanInput,
    StartTraining,
)
from engine.core.membership.events import (
    Done,
    Event,
    ExitSeen,
    Heartbeat,
    InventoryReceived,
    Joined,
    Notice,
    PlanAcknowledged,
    StepCommitted,
    Suspicion,
    Tick,
)
from engine.core.membership.state import Options, Phase, State, begin, to_json
from engine.core.store.kv import KV, Lease
from engine.runtime.agent.coordinator import ROLE, STATE, Coordinator
from engine.runtime.store.election import Election
from tests.doubles.kv_double import Fault
from tests.runtime.kv_backends import Backend

S = 1_000_000_000
TTL_S = 60
RING = ((2,), (0,), (1,))  # the shadow of each of three stages
JOINED = tuple(Joined(1, worker, "host") for worker in range(3))


def first_state(redundant: bool = True, last_step: int = 9, max_repeats: int = 2) -> State:
    """Returns the state of three stages on three workers, of whom nobody has joined."""
    options = Options(stages=3, redundant=redundant, max_repeats=max_repeats)
    return begin(options, (0, 1, 2), RING if redundant else ((), (), ()), last_step, 0)


def candidate(client: KV, name: str, ttl_s: int = TTL_S) -> Election:
    """Returns a candidate for the role."""
    return Election(client, ROLE, name.encode(), ttl_s)


def start(client: KV, first: State, name: str = "first") -> Coordinator:
    """Returns a coordinator that has just been elected."""
    election = candidate(client, name)
    assert election.poll()
    return Coordinator(client, election, first, 0)


def tell(coordinator: Coordinator, *events: Event) -> tuple[Any, ...]:
    """Tells a coordinator some events and returns what the last one brings about."""
    return [coordinator.handle(event) for event in events][-1]


def keys_of(client: KV) -> dict[str, bytes]:
    """Returns all keys of the run."""
    return {item.key: item.value for item in client.read_prefix("").items}


def test_every_decision_is_in_the_store_when_its_effects_come_back(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, first_state())
    assert keys_of(reader).keys() == {ROLE, STATE, "status"}
    assert keys_of(reader)["status"] == b"forming"
    effects = tell(coordinator, *JOINED)
    assert [type(effect) for effect in effects] == [PublishEpoch, StartTraining]
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"]) == (b"running", b"1")
    assert json.loads(keys["verdicts"]) == [[1, "every worker has joined"]]
    (effect,) = tell(coordinator, StepCommitted(2, 1, 0))
    assert effect == AnnounceCommit(1, 0, "step")
    assert keys_of(reader)["commit"] == b"0"
    assert GatherInventories(2) in tell(coordinator, ExitSeen(3, 1, -9))
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"]) == (b"failing over", b"2")
    assert keys[STATE] == to_json(coordinator.state).encode()
    tell(coordinator, *(InventoryReceived(4, worker, 2, f"held by {worker}") for worker in (0, 2)))
    assert json.loads(keys_of(reader)["plan"])["inventories"] == [[0, "held by 0"], [2, "held by 2"]]


def test_the_last_reconfiguration_can_be_read(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, first_state())
    tell(coordinator, *JOINED, Notice(2, 1, 60 * S), StepCommitted(3, 1, 0))
    keys = keys_of(reader)
    assert keys["status"] == b"reconfiguring"
    assert json.loads(keys["reconfigured"]) == {"epoch": 2, "reason": "worker 1 handed over after step 0"}


def test_events_that_come_as_one_are_written_as_one(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, first_state())
    tell(coordinator, *JOINED, Notice(2, 2, S))
    before = reader.read_prefix("").revision
    answers = [InventoryReceived(3, worker, 2, f"held by {worker}") for worker in range(3)]
    plans = [PlanAcknowledged(3, worker, 2, "plan") for worker in range(3)]
    effects = coordinator.handle(StepCommitted(3, 1, 0), *answers, *plans)
    kinds = [AnnounceCommit, PublishEpoch, GatherInventories, PublishPlanInput, StartTraining, AnnounceCommit]
    assert [type(effect) for effect in effects] == kinds
    assert reader.read_prefix("").revision == before + 1
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"], keys["commit"]) == (b"running", b"2", b"0")
    assert json.loads(keys["reconfigured"])["epoch"] == 2
    assert json.loads(keys["plan"])["inventories"][2] == [2, "held by 2"]
    assert keys[STATE] == to_json(coordinator.state).encode()


def test_what_decides_nothing_writes_nothing(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, first_state())
    tell(coordinator, *JOINED)
    before = reader.read_prefix("").revision
    tell(coordinator, Heartbeat(2, 0, 1, 0, 3, True), Tick(3), JOINED[1], StepCommitted(4, 7, 0))
    assert reader.read_prefix("").revision == before


def test_an_answer_that_orders_nothing_is_not_written_and_a_notice_is(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, first_state())
    tell(coordinator, *JOINED, StepCommitted(2, 1, 0), ExitSeen(3, 1, -9))
    before = reader.read_prefix("").revision
    assert tell(coordinator, InventoryReceived(4, 0, 2, "held by 0")) == ()
    assert reader.read_prefix("").revision == before
    assert tell(coordinator, Notice(4, 0, S)) == ()
    assert json.loads(keys_of(reader)[STATE])["leaving"] == [0]


def test_the_next_coordinator_goes_on_where_the_first_one_stopped(backend: Backend) -> None:
    client, later = backend.client(), backend.client()
    lost, late = candidate(client, "first", ttl_s=1), candidate(later, "second")
    assert lost.poll() and not late.poll()
    first = Coordinator(client, lost, first_state(), 0)
    tell(first, *JOINED, StepCommitted(2, 1, 0), ExitSeen(3, 1, -9))
    known = first.state.decided()
    tell(first, InventoryReceived(4, 0, 2, "held by 0"))  # an answer that orders nothing: the next one asks again
    (held,) = later.read_prefix(ROLE).items
    backend.outlast(Lease(held.lease_id, 1))
    assert late.poll()
    second = Coordinator(later, late, first_state(), 1000 * S)  # on another clock
    assert second.state.decided() == known
    assert second.state.sightings.keys() == {0, 2}
    # The first has been asleep. Nothing that it decides is written, or done.
    with pytest.raises(
        CoordinatorUnavailableError, match=r"^this coordinator was replaced.*'coordinator' now names 'second'"
    ):
        first.handle(InventoryReceived(5, 2, 2, "held by 2"))
    assert keys_of(later)[STATE] == to_json(second.state).encode()
    assert GatherInventories(2) in tell(second, Tick(1001 * S))
    tell(second, *(InventoryReceived(1001 * S, worker, 2, f"held by {worker}") for worker in (0, 2)))
    tell(second, *(PlanAcknowledged(1000 * S, worker, 2, "plan") for worker in (0, 2)))
    assert (second.state.phase, second.state.epoch, second.state.committed) == (Phase.RUNNING, 2, 0)
    verdicts = json.loads(keys_of(later)["verdicts"])
    assert [epoch for epoch, _ in verdicts] == [1, 2]


def test_the_role_without_a_holder_stops_it_too(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, first_state())
    coordinator._election.resign()
    before = keys_of(client)
    with pytest.raises(CoordinatorUnavailableError, match="the key 'coordinator' is gone"):
        tell(coordinator, *JOINED)
    assert keys_of(client) == before


def test_a_state_that_another_has_written_is_left_alone(backend: Backend) -> None:
    client, other = backend.client(), backend.client()
    coordinator = start(client, first_state())
    other.put(STATE, b"theirs")
    with pytest.raises(CoordinatorUnavailableError, match="another client has written the key 'state'"):
        tell(coordinator, *JOINED)
    assert keys_of(other)[STATE] == b"theirs"
    assert "epoch" not in keys_of(other)


def test_a_decision_whose_reply_was_lost_is_made_once(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, first_state())
    for joined in JOINED:
        backend.lose(client, Fault.LOSE_REPLY, Fault.LOSE_REQUEST)
        coordinator.handle(joined)
    assert (coordinator.state.epoch, coordinator.state.phase) == (1, Phase.RUNNING)
    assert keys_of(client)[STATE] == to_json(coordinator.state).encode()


@pytest.mark.parametrize(
    ("key", "value"), [(STATE, b"\xff"), (STATE, b"{}"), (STATE, b"[]"), ("verdicts", b"{"), ("verdicts", b"[3]")]
)
def test_garbage_is_named_and_left_alone(backend: Backend, key: str, value: bytes) -> None:
    client = backend.client()
    client.put(key, value)
    with pytest.raises(InvariantError, match=f"^the key '{key}' of this run is not of a coordinator"):
        start(client, first_state())
    assert keys_of(client)[key] == value


def test_a_failure_that_nobody_can_take_over_from_halts(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, first_state(redundant=False))
    effects = tell(coordinator, *JOINED, ExitSeen(2, 1, -9))
    assert [type(effect) for effect in effects] == [Halt]
    assert keys_of(client)["status"] == b"halted"


def test_the_history_of_verdicts_is_bounded(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, first_state(max_repeats=1000))
    tell(coordinator, *JOINED)
    now_ns = 2
    for _ in range(80):
        epoch = coordinator.state.epoch
        tell(coordinator, Suspicion(now_ns, 0, epoch, 1))
        now_ns += S
        # One look is 0.2 s; everybody was heard meanwhile.
        tell(coordinator, *(Heartbeat(now_ns, worker, epoch, 0, 0, False) for worker in range(3)), Tick(now_ns))
        members = coordinator.state.members
        tell(coordinator, *(InventoryReceived(now_ns, each, epoch + 1, "all") for each in members))
        tell(coordinator, *(PlanAcknowledged(now_ns, each, epoch + 1, "plan") for each in members))
    assert coordinator.state.epoch == 81
    verdicts = json.loads(keys_of(client)["verdicts"])
    assert [epoch for epoch, _ in verdicts] == list(range(18, 82))
    assert len(keys_of(client)) == 6


@pytest.mark.parametrize("backend", ["etcd"], indirect=True)
def test_ten_thousand_steps_leave_no_more_keys_than_a_hundred(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, first_state(last_step=9_999))
    tell(coordinator, *JOINED)
    counts, sizes = {}, {}
    for step in range(10_000):
        tell(coordinator, StepCommitted(2, 1, step))
        if step in (99, 9_999):
            counts[step] = {key for key in backend.all_keys() if key.startswith(backend.root)}
            sizes[step] = sum(map(len, keys_of(client).values()))
    assert counts[99] == counts[9_999]
    assert len(counts[99]) == 6
    assert sizes[9_999] - sizes[99] < 20  # a longer number here and there
    assert isinstance(tell(coordinator, *(Done(3, worker, 1) for worker in range(3)))[0], Finish)
