"""Transactions over a line that loses requests and replies, and delivers requests late: each state is written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import CoordinatorUnavailableError
from engine.core.kv import Condition, Lease, Put, Txn, absent, equal, settled
from tests.doubles.kv_double import LostError, StoreDouble
from tests.doubles.kv_double_client import ClientDouble

ROOT = "/bamboo/run/"
STATE = ROOT + "state"
DELIVER, LOSE_REPLY, DELAY = "deliver", "lose reply", "delay"

Reply = TypeVar("Reply")


class BadLine(StoreDouble):
    """A store behind a line that treats each request by the next of `fates`; `late` requests are still on the way."""

    def __init__(self, fates: list[str]):
        super().__init__()
        self.late: list[Callable[[], object]] = []
        self._fates = iter(fates)

    def serve(self, request: Callable[[], Reply]) -> Reply:
        """Carries out a request now, or later, and loses its reply or not."""
        fate = next(self._fates, DELIVER)
        if fate == DELAY:
            self.late.append(request)
            raise LostError
        reply = request()
        if fate == LOSE_REPLY:
            raise LostError
        return reply

    def deliver_late(self) -> None:
        """Carries out the late requests."""
        while self.late:
            self.late.pop(0)()


@given(
    fates=st.lists(st.sampled_from([DELIVER, LOSE_REPLY, DELAY]), max_size=40), late_after=st.sets(st.integers(0, 11))
)
def test_each_state_of_a_chain_is_written_once_whatever_is_lost_or_late(fates: list[str], late_after: set[int]) -> None:
    store = BadLine(fates)
    kv = ClientDouble(store, ROOT)
    before, number = absent("state"), 0
    for number in range(12):
        value = str(number).encode()
        try:
            outcome = kv.transact(Txn((before,), (Put("state", value), Put("commit", value))))
        except CoordinatorUnavailableError:
            break  # the coordinator stops
        item = store.items[STATE]
        assert outcome.succeeded and outcome.revision == item.revision == store.items[ROOT + "commit"].revision
        assert (item.value, item.version) == (value, number + 1)
        if number in late_after:
            store.deliver_late()
            assert store.items[STATE] == item
        before = equal("state", value)
    store.deliver_late()
    assert STATE not in store.items or store.items[STATE].version <= number + 1


def read_back(put: Put, *conditions: Condition, then: Put | None = None) -> tuple[bool, bool]:
    """Returns whether a transaction that is sent twice seems to succeed the second time, before and after reading back.

    In between another client may write.
    """
    store = StoreDouble()
    store.grant(60)
    txn = Txn(conditions, (put,))
    assert store.commit(txn).succeeded
    if then is not None:
        store.commit(Txn((), (then,)))
    again = store.commit(txn)
    return again.succeeded, settled(txn, again).succeeded


def test_only_reading_back_tells_an_applied_transaction_from_a_refused_one() -> None:
    assert read_back(Put("state", b"1"), absent("state")) == (False, True)
    assert read_back(Put("role", b"me", Lease(1, 60)), absent("role")) == (False, True)
    assert read_back(Put("state", b"1"), absent("state"), then=Put("state", b"2")) == (False, False)


def test_the_same_value_on_another_lease_is_not_ours() -> None:
    ours = Put("role", b"host:1", Lease(1, 60))
    assert read_back(ours, absent("role"), then=Put("role", b"host:1")) == (False, False)
