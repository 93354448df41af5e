"""Exactly-once transactions: a client learns the fate of a transaction whose reply was lost.

Every transaction also writes a new receipt into one key of its client, if the key still holds the previous receipt.
After a lost reply, the client writes one more receipt under the same condition, a fence:

- The fence is written: the transaction was not applied and never will be, because its condition no longer holds.
- The fence is refused: the key holds the receipt of the transaction that was applied.

So of several attempts at most one is applied, and the client knows which.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import InvariantError
from engine.core.store.kv import Condition, KeyValue, Outcome, Put, Txn, absent, equal

RECEIPTS = "receipts/"

# Sends a transaction once; returns its outcome, or None if the reply was lost. Raises after its deadline.
Send = Callable[[Txn], Outcome | None]


def is_receipt(key: str) -> bool:
    """Returns whether `key` holds a receipt; reads of a prefix leave receipts out."""
    return key.startswith(RECEIPTS)


class ReceiptBook:
    """The receipts of one client; `name` is unique among all clients that ever lived."""

    def __init__(self, name: str):
        self.key = RECEIPTS + name
        self._name = name
        self._count = 0
        self._last: bytes | None = None  # the value of the key
        self._doubtful: list[bytes] = []  # receipts of unknown fate; at most one of them was written

    @property
    def is_blank(self) -> bool:
        """Whether the client has never tried to write a receipt."""
        return self._count == 0

    def transact(self, txn: Txn, send: Send) -> Outcome:
        """Runs a transaction exactly once and returns its outcome.

        If `send` raises, the fate of the transaction is unknown until the next call settles it. Raises InvariantError
        if another client has deleted the receipt that would have told the fate.
        """
        self._settle(send)
        while True:
            outcome = self._try(txn, send)
            if outcome is not None:
                return outcome

    def _try(self, txn: Txn, send: Send) -> Outcome | None:
        """Returns the outcome, or None if the transaction was not applied and must be sent again."""
        receipt = self._new_receipt()
        outcome = send(Txn((self._unchanged(), *txn.conditions), (*txn.changes, Put(self.key, receipt))))
        if outcome is None:
            is_known, written = self._settle(send)
            if not is_known:
                raise InvariantError(f"{self.key!r} was deleted by another client: a transaction's fate is unknown")
            return Outcome(True, written.revision) if written is not None and written.value == receipt else None
        self._doubtful.clear()
        if outcome.succeeded:
            self._last = receipt
            return outcome
        holder, *found = outcome.found
        if self._unchanged().holds(holder):
            return Outcome(False, outcome.revision, tuple(found))
        # Another client deleted the receipt, so this attempt was not applied.
        self._last = _value(holder)
        return None

    def _settle(self, send: Send) -> tuple[bool, KeyValue | None]:
        """Fences all doubtful receipts; returns whether their fate is known, and the key if one of them was written."""
        while self._doubtful:
            fence = self._new_receipt()
            outcome = send(Txn((self._unchanged(),), (Put(self.key, fence),)))
            if outcome is None:
                continue
            doubtful, self._doubtful = self._doubtful, []
            if outcome.succeeded:
                self._last = fence
                return True, None
            (holder,) = outcome.found
            self._last = _value(holder)
            return self._last in doubtful, holder
        return True, None

    def _unchanged(self) -> Condition:
        return absent(self.key) if self._last is None else equal(self.key, self._last)

    def _new_receipt(self) -> bytes:
        self._count += 1
        receipt = f"{self._name} {self._count}".encode()
        self._doubtful.append(receipt)
        return receipt


def _value(item: KeyValue | None) -> bytes | None:
    return None if item is None else item.value
