"""How a client finds out what became of a transaction whose reply was lost.

Every transaction also writes a new receipt into one key of its client, on the condition that the key still holds the
receipt before it. After a lost reply, the client writes one more receipt on that same condition. If that succeeds,
the transaction was not applied, and never will be, however late it may arrive: its condition no longer holds. If not,
the key says whose receipt was first. So the answer is never a guess, and at most one of several tries is applied.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import InvariantError
from engine.core.store.kv import Condition, KeyValue, Outcome, Put, Txn, absent, equal

RECEIPTS = "receipts/"

# Sends a transaction once and returns its outcome, or None when the reply was lost. Raises when the time is up.
Send = Callable[[Txn], Outcome | None]


def is_receipt(key: str) -> bool:
    """Returns whether `key` is the store's own bookkeeping, which reads of a prefix and watches leave out."""
    return key.startswith(RECEIPTS)


class ReceiptBook:
    """The receipts of one client, whose `name` no other client has ever had."""

    def __init__(self, name: str):
        self.key = RECEIPTS + name
        self._name = name
        self._count = 0
        self._last: bytes | None = None  # what the key holds
        self._doubtful: list[bytes] = []  # receipts that may have been written on top of the last one: at most one was

    @property
    def is_blank(self) -> bool:
        """Whether nothing was ever written."""
        return self._count == 0

    def transact(self, txn: Txn, send: Send) -> Outcome:
        """Runs a transaction exactly once.

        When `send` raises, the fate of the transaction is unknown, and is sealed before the next one. Raises
        InvariantError when somebody else has deleted the receipt by which a lost reply would have been made up for.
        """
        self._settle(send)
        while True:
            outcome = self._try(txn, send)
            if outcome is not None:
                return outcome

    def _try(self, txn: Txn, send: Send) -> Outcome | None:
        """Returns the outcome, or None when nothing was applied and it should be tried again."""
        receipt = self._new_receipt()
        outcome = send(Txn((self._unchanged(), *txn.conditions), (*txn.changes, Put(self.key, receipt))))
        if outcome is None:
            is_known, written = self._settle(send)
            if not is_known:
                raise InvariantError(f"{self.key!r} was deleted by somebody else: the fate of a transaction is unknown")
            return Outcome(True, written.revision) if written is not None and written.value == receipt else None
        self._doubtful.clear()
        if outcome.succeeded:
            self._last = receipt
            return outcome
        holder, *found = outcome.found
        if self._unchanged().holds(holder):
            return Outcome(False, outcome.revision, tuple(found))
        # Somebody has swept the receipt away. This attempt was not applied, which is all that matters.
        self._last = _value(holder)
        return None

    def _settle(self, send: Send) -> tuple[bool, KeyValue | None]:
        """Seals the fate of all doubtful receipts; returns whether it is known, and the one that was written if any."""
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
