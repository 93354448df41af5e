"""The coordinator on both stores: what the next one finds, what a late one may not do, and how many keys there are."""

from __future__ import annotations

import json

import pytest

from engine.codec.documents import documents
from engine.core import messages
from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.kv import KV, Lease
from engine.core.program.inventory import PreparedMessage, PreparePartMessage
from engine.core.protocol.coordinator_state import ROLE, STATE, CoordinatorState
from engine.core.protocol.events import Notice, Takeover
from engine.core.protocol.inputs_outputs import ClockTick, CoordinatorInput, CoordinatorOutput, Stop
from engine.core.protocol.state import Phase
from engine.runtime.agent.coordinator import Coordinator
from engine.runtime.store.election import Election
from tests.core.coordinator_cases import answers, begun, heard, killed, told, votes
from tests.doubles.kv_double import Fault
from tests.runtime.kv_backends import Backend

S = 1_000_000_000
TTL_S = 60
JOINED = tuple(heard(worker, messages.ReadyMessage()) for worker in range(3))


def candidate(client: KV, name: str, ttl_s: int = TTL_S) -> Election:
    """Returns a candidate for the role."""
    return Election(client, ROLE, name.encode(), ttl_s)


def start(client: KV, first: CoordinatorState, name: str = "first") -> Coordinator:
    """Returns a coordinator that has just been elected."""
    election = candidate(client, name)
    assert election.poll()
    return Coordinator(client, election, first, 0)


def tell(coordinator: Coordinator, *inputs: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
    """Gives a coordinator some inputs and returns the outputs of the last one."""
    return [coordinator.handle(each) for each in inputs][-1]


def commit(coordinator: Coordinator) -> tuple[CoordinatorOutput, ...]:
    """Gives a coordinator all votes for the open step, and returns the outputs of the last one."""
    return tell(coordinator, *votes(coordinator.state))


def keys_of(client: KV) -> dict[str, bytes]:
    """Returns all keys of the run."""
    return {item.key: item.value for item in client.read_prefix("").items}


def test_every_decision_is_in_the_store_when_its_outputs_come_back(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, begun())
    assert keys_of(reader).keys() == {ROLE, STATE, "facts", "status"}
    assert keys_of(reader)["status"] == b"forming"
    (epoch,) = told(tell(coordinator, *JOINED))
    assert isinstance(epoch, messages.EpochMessage)
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"]) == (b"running", b"1")
    assert json.loads(keys["verdicts"]) == [[1, "every worker has joined"]]
    (announced,) = told(commit(coordinator))
    assert isinstance(announced, messages.CommitMessage)
    written = json.loads(keys_of(reader)["commit"])
    figures = {"loss": 0.5, "grad_norm": 0, "clip_factor": announced.clip_factor, "lr": None, "monitored": None}
    assert written | {"grad_norm": 0} == {"step": 0, **figures}
    tell(coordinator, killed(1))
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"]) == (b"failing over", b"2")
    assert_kept(coordinator, reader)
    tell(coordinator, *answers(coordinator.state)[:2])
    assert json.loads(keys_of(reader)["plan"])["inventories"] == [[0, "all"], [2, "all"]]


def assert_kept(coordinator: Coordinator, reader: KV) -> None:
    """Asserts that the store has all that the next coordinator needs."""
    wanted = {key: text.encode() for key, text in documents(coordinator.state).items()}
    assert wanted.items() <= keys_of(reader).items()


def test_the_last_reconfiguration_can_be_read(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, begun())
    tell(coordinator, *JOINED, Notice(2, 1, 1))
    commit(coordinator)
    keys = keys_of(reader)
    assert keys["status"] == b"reconfiguring"
    assert json.loads(keys["reconfigured"]) == {"epoch": 2, "reason": "worker 1 handed over after step 0"}


def test_a_prepared_hand_over_and_its_commit_are_written_as_one(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, begun())
    orders = told(tell(coordinator, *JOINED, Notice(2, 2, S)))
    assert [type(each) for each in orders] == [PreparePartMessage] * 3
    prepared = PreparedMessage(2, coordinator.state.preparation.number, "plan")
    tell(coordinator, *(heard(worker, prepared) for worker in range(3)))
    before = reader.read_prefix("").revision
    assert [type(each) for each in told(commit(coordinator))] == [messages.CommitMessage, messages.EpochMessage]
    assert reader.read_prefix("").revision == before + 1
    keys = keys_of(reader)
    assert (keys["status"], keys["epoch"], json.loads(keys["commit"])["step"]) == (b"running", b"2", 0)
    assert json.loads(keys["reconfigured"])["epoch"] == 2
    assert json.loads(keys["plan"])["inventories"][2][0] == 2
    assert_kept(coordinator, reader)


def test_what_decides_nothing_writes_nothing(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, begun())
    tell(coordinator, *JOINED)
    before = reader.read_prefix("").revision
    beat = heard(0, messages.HeartbeatMessage(1, 0, 3, True))
    tell(coordinator, beat, ClockTick(3), JOINED[1], *votes(coordinator.state)[:3])
    assert reader.read_prefix("").revision == before


def test_an_answer_that_has_no_effect_is_not_written_and_a_notice_is(backend: Backend) -> None:
    client, reader = backend.client(), backend.client()
    coordinator = start(client, begun())
    tell(coordinator, *JOINED, killed(1))
    before = reader.read_prefix("").revision
    assert tell(coordinator, answers(coordinator.state)[0]) == ()
    assert reader.read_prefix("").revision == before
    tell(coordinator, Notice(4, 0, S))
    assert json.loads(keys_of(reader)[STATE])["leaving"] == [0]


def test_the_next_coordinator_goes_on_where_the_first_one_stopped(backend: Backend) -> None:
    client, later = backend.client(), backend.client()
    lost, late = candidate(client, "first", ttl_s=1), candidate(later, "second")
    assert lost.poll() and not late.poll()
    first = Coordinator(client, lost, begun(), 0)
    tell(first, *JOINED)
    commit(first)
    tell(first, killed(1))
    known = first.state.membership.decided()
    inventory, answer, *_ = answers(first.state)
    tell(first, inventory)  # an answer without an effect: the next one asks again
    (held,) = later.read_prefix(ROLE).items
    backend.outlast(Lease(held.lease_id, 1))
    assert late.poll()
    second = Coordinator(later, late, begun(), 1000 * S)  # on another clock
    assert second.state.membership.decided() == known
    assert second.state.commit == first.state.commit
    # The first has been asleep. Nothing that it decides is written, or done.
    with pytest.raises(
        CoordinatorUnavailableError, match=r"^this coordinator was replaced.*'coordinator' now names 'second'"
    ):
        first.handle(answer)
    assert_kept(second, later)
    (epoch,) = told(tell(second, Takeover(1001 * S)))
    assert isinstance(epoch, messages.EpochMessage) and (epoch.epoch, epoch.commit) == (3, first.state.told)
    tell(second, *answers(second.state))
    now = second.state.membership
    assert (now.phase, now.epoch, now.committed) == (Phase.RUNNING, 3, 0)
    verdicts = json.loads(keys_of(later)["verdicts"])
    assert [epoch for epoch, _ in verdicts] == [1, 2, 3]


def test_the_role_without_a_holder_stops_it_too(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, begun())
    coordinator._election.resign()
    before = keys_of(client)
    with pytest.raises(CoordinatorUnavailableError, match="the key 'coordinator' is gone"):
        tell(coordinator, *JOINED)
    assert keys_of(client) == before


def test_a_state_that_another_has_written_is_left_alone(backend: Backend) -> None:
    client, other = backend.client(), backend.client()
    coordinator = start(client, begun())
    other.put(STATE, b"theirs")
    with pytest.raises(CoordinatorUnavailableError, match="another client has written the key 'state'"):
        tell(coordinator, *JOINED)
    assert keys_of(other)[STATE] == b"theirs"
    assert "epoch" not in keys_of(other)


def test_a_decision_whose_reply_was_lost_is_made_once(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, begun())
    for joined in JOINED:
        backend.lose(client, Fault.LOSE_REPLY, Fault.LOSE_REQUEST)
        coordinator.handle(joined)
    now = coordinator.state.membership
    assert (now.epoch, now.phase) == (1, Phase.RUNNING)
    assert_kept(coordinator, client)


@pytest.mark.parametrize(
    ("key", "value"), [(STATE, b"\xff"), (STATE, b"{}"), (STATE, b"[]"), ("verdicts", b"{"), ("verdicts", b"[3]")]
)
def test_garbage_is_named_and_left_alone(backend: Backend, key: str, value: bytes) -> None:
    client = backend.client()
    client.put(key, value)
    with pytest.raises(InvariantError, match=f"^the key '{key}' of this run is not of a coordinator"):
        start(client, begun())
    assert keys_of(client)[key] == value


def test_a_failure_that_nobody_can_take_over_from_halts(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, begun(redundant=False))
    outputs = tell(coordinator, *JOINED, killed(1))
    assert [type(each) for each in outputs] == [Stop]
    assert keys_of(client)["status"] == b"halted"


def test_the_history_of_verdicts_is_bounded(backend: Backend) -> None:
    client = backend.client()
    coordinator = start(client, begun())
    tell(coordinator, *JOINED)
    for number in range(80):
        tell(coordinator, Takeover(number), *answers(coordinator.state))
    assert coordinator.state.membership.epoch == 81
    verdicts = json.loads(keys_of(client)["verdicts"])
    assert [epoch for epoch, _ in verdicts] == list(range(18, 82))
    assert len(keys_of(client)) == 6


@pytest.mark.timeout(300)  # a transaction of etcd for each step, on a machine that may be busy
@pytest.mark.parametrize("backend", ["etcd"], indirect=True)
@pytest.mark.parametrize("num_steps", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_thousands_of_steps_leave_no_more_keys_than_a_hundred(backend: Backend, num_steps: int) -> None:
    client, last = backend.client(), num_steps - 1
    coordinator = start(client, begun(last_step=last))
    tell(coordinator, *JOINED)
    counts, sizes = {}, {}
    for step in range(num_steps):
        commit(coordinator)
        if step in (99, last):
            counts[step] = {key for key in backend.all_keys() if key.startswith(backend.root)}
            sizes[step] = sum(map(len, keys_of(client).values()))
    assert counts[99] == counts[last]
    assert len(counts[99]) == 7
    assert sizes[last] - sizes[99] < 20  # a longer number here and there
    assert coordinator.state.membership.phase is Phase.DRAINING
