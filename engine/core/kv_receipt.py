"""How a client finds out what became of a transaction whose reply was lost.

Every transaction also writes a new receipt into one key of its client, on the condition that the key still holds the
receipt before it. After a lost reply, the client writes one more receipt on that same condition. If that succeeds,
the transaction was not applied, and never will be, however late it may arrive: its condition no longer holds. If not,
the key says whose receipt was first. So the answer is never a guess, and at most one of several tries is applied.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import InvariantError
from engine.core.kv import Condition, KeyValue, Outcome, Put, Txn, absent, equal

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
        """Runs a transaction exactly once. When `send` raises, its fate is settled before the next one."""
        self._settle(send)
        while True:
            outcome = self._try(txn, send)
            if outcome is not None:
                return outcome

    def forget(self) -> None:
        """Takes note that the key was deleted, together with all that a doubtful transaction may have written."""
        self._last = None
        self._doubtful.clear()

    def _try(self, txn: Txn, send: Send) -> Outcome | None:
        """Returns the outcome, or None when nothing was applied and it should be tried again."""
        receipt = self._new_receipt()
        outcome = send(Txn((self._unchanged(), *txn.conditions), (*txn.changes, Put(self.key, receipt))))
        if outcome is None:
            holder = self._settle(send)
            return Outcome(True, holder.revision) if holder is not None and holder.value == receipt else None
        self._doubtful.clear()
        if outcome.succeeded:
            self._last = receipt
            return outcome
        holder, *found = outcome.found
        if self._unchanged().holds(holder):
            return Outcome(False, outcome.revision, tuple(found))
        # Somebody has swept the receipt away. This attempt was not applied, which is all that matters.
        self._last = holder.value if holder is not None else None
        return None

    def _settle(self, send: Send) -> KeyValue | None:
        """Decides the fate of all doubtful receipts; returns what the key holds if one of them was written."""
        while self._doubtful:
            fence = self._new_receipt()
            outcome = send(Txn((self._unchanged(),), (Put(self.key, fence),)))
            if outcome is None:
                continue
            holder = None if outcome.succeeded else outcome.found[0]
            if not outcome.succeeded and (holder is None or holder.value not in self._doubtful):
                raise InvariantError(f"{self.key!r} was changed by somebody else: the fate of a transaction is unknown")
            self._last = fence if holder is None else holder.value
            self._doubtful.clear()
            return holder
        return None

    def _unchanged(self) -> Condition:
        return absent(self.key) if self._last is None else equal(self.key, self._last)

    def _new_receipt(self) -> bytes:
        self._count += 1
        receipt = f"{self._name} {self._count}".encode()
        self._doubtful.append(receipt)
        return receipt
