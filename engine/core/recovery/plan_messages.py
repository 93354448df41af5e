"""The control messages of a recovery: inventories, the document of a plan, and the digest of the plan that was made.

`epoch` of a worker's message is the one that it has accepted.
"""

from __future__ import annotations

from engine.core.message_codec import ToAgent, ToWorker, message


@message
class PlanMessage(ToWorker):
    """The document that every member makes the plan of an epoch from, when the last inventory is in."""

    epoch: int
    committed: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]  # members that had given notice when the epoch was made; they become no shadows
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    inventories: tuple[tuple[int, str], ...]  # worker and text
    wanted: tuple[int, ...] = ()  # the wanted owner of each slot, which becomes a shadow; empty if no slot is to move
    hosts: tuple[int, ...] = ()  # a number for the host of each member; empty if all are on one


@message
class PrepareMessage(ToWorker):
    """The document of an epoch that will begin with the coming commit; the answer has the same number."""

    number: int
    plan: PlanMessage


@message
class InventoryMessage(ToAgent):
    """All that a frozen worker holds, as text; `whole` are the places of the slots of which it has a whole replica."""

    epoch: int
    holds: str
    whole: tuple[int, ...]


@message
class PlannedMessage(ToAgent):
    """The worker has made the plan: its digest, and the stages that it cannot bring back."""

    epoch: int
    digest: str
    lost_stages: tuple[int, ...]


@message
class PreparedMessage(ToAgent):
    """The worker has made the plan of a coming epoch, for the order with this number."""

    epoch: int
    number: int
    digest: str
