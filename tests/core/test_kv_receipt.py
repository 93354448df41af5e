"""Transactions over a line that loses requests and replies, and delivers requests late: applied once, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import CoordinatorUnavailableError, InvariantError
from engine.core.store.exactly_once import ReceiptBook, is_receipt
from engine.core.store.kv import Delete, Outcome, Put, Txn, absent, equal, present
from tests.doubles.kv_double import StoreDouble

DELIVER, LOSE_REPLY, DELAY, GIVE_UP = "deliver", "lose reply", "delay", "give up"


class BadLine:
    """A line that does with each request what is next in `fates`, and then delivers. `late` are still on the way."""

    def __init__(self, fates: list[str]):
        self.store = StoreDouble()
        self.late: list[Txn] = []
        self._fates = iter(fates)

    def send(self, txn: Txn) -> Outcome | None:
        """Sends a transaction."""
        fate = next(self._fates, DELIVER)
        if fate == DELIVER:
            return self.store.commit(txn)
        if fate == LOSE_REPLY:
            self.store.commit(txn)
            return None
        self.late.append(txn)
        if fate == GIVE_UP:
            raise CoordinatorUnavailableError("time is up")
        return None

    def deliver_late(self) -> None:
        """Lets everything that is still on the way arrive."""
        while self.late:
            self.store.commit(self.late.pop(0))

    def version(self, key: str) -> int:
        """Returns how often a key was put."""
        item = self.store.items.get(key)
        return item.version if item else 0


@given(st.lists(st.sampled_from([DELIVER, LOSE_REPLY, DELAY, GIVE_UP]), max_size=40), st.integers(0, 12))
def test_every_transaction_is_applied_once_or_is_known_not_to_be(fates: list[str], late_at: int) -> None:
    line = BadLine(fates)
    book = ReceiptBook("me")
    in_doubt: set[str] = set()
    for number in range(12):
        if number == late_at:
            line.deliver_late()
        key = f"k{number}"
        must_fail = number % 3 == 2
        try:
            outcome = book.transact(Txn((present("never"),) * must_fail, (Put(key, b""),)), line.send)
        except CoordinatorUnavailableError:
            in_doubt.add(key)
            continue
        assert outcome.succeeded != must_fail
        assert must_fail or line.store.items[key].revision == outcome.revision
        # The fate of those before is sealed by now.
        sealed = {key: line.version(key) for key in in_doubt}
        line.deliver_late()
        assert {key: line.version(key) for key in in_doubt} == sealed
        assert line.version(key) == (0 if must_fail else 1)
    assert all(line.version(key) <= 1 for key in in_doubt)


def test_a_request_that_arrives_after_the_answer_changes_nothing() -> None:
    line = BadLine([DELIVER, DELAY])
    book = ReceiptBook("me")
    book.transact(Txn((), (Put("a", b"0"),)), line.send)
    assert book.transact(Txn((equal("a", b"0"),), (Put("a", b"1"),)), line.send).succeeded
    book.transact(Txn((), (Put("a", b"0"),)), line.send)
    line.deliver_late()
    assert line.store.items["a"].value == b"0"


def test_conditions_that_fail_are_told_apart_from_a_receipt_that_was_swept_away() -> None:
    line = BadLine([])
    book = ReceiptBook("me")
    book.transact(Txn((), (Put("a", b"0"),)), line.send)
    line.store.commit(Txn((), (Delete(book.key),)))
    outcome = book.transact(Txn((absent("a"),), (Put("a", b"1"),)), line.send)
    assert (outcome.succeeded, [item and item.value for item in outcome.found]) == (False, [b"0"])
    assert book.transact(Txn((), (Put("a", b"1"),)), line.send).succeeded


def test_a_receipt_that_was_swept_away_in_doubt_is_an_error_and_no_guess() -> None:
    line = BadLine([DELIVER, LOSE_REPLY])
    book = ReceiptBook("me")
    book.transact(Txn((), (Put("a", b"0"),)), line.send)

    def send(txn: Txn) -> Outcome | None:
        outcome = line.send(txn)
        if outcome is None:
            line.store.commit(Txn((), (Delete(book.key),)))
        return outcome

    with pytest.raises(InvariantError, match="'receipts/me' was deleted by another client"):
        book.transact(Txn((), (Put("a", b"1"),)), send)
    assert book.transact(Txn((), (Put("a", b"2"),)), line.send).succeeded


def test_a_doubt_that_was_told_does_not_come_up_again() -> None:
    line = BadLine([DELIVER, GIVE_UP])
    book = ReceiptBook("me")
    book.transact(Txn((), (Put("a", b"0"),)), line.send)
    with pytest.raises(CoordinatorUnavailableError):
        book.transact(Txn((), (Put("a", b"1"),)), line.send)
    line.store.commit(Txn((), (Delete(book.key),)))
    assert book.transact(Txn((), (Put("a", b"2"),)), line.send).succeeded


def test_all_receipts_of_a_client_take_one_key() -> None:
    line = BadLine([LOSE_REPLY] * 5)
    book = ReceiptBook("me")
    for number in range(5):
        book.transact(Txn((), (Put("a", str(number).encode()),)), line.send)
    assert sorted(line.store.items) == ["a", "receipts/me"]
    assert is_receipt(book.key) and not is_receipt("a")
