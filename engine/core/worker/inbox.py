"""The inbox of a worker: messages wait in it until the main thread can take them.

Rules: agent and worker share one channel that keeps the order, so all messages behind an epoch belong to it. An epoch
therefore drops the messages in front of it: a commit among them comes with the epoch. It interrupts, as the end does.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.message_codec import ToWorker
from engine.core.messages import EpochMessage
from engine.core.process_messages import StopMessage


class Inbox(NamedTuple):
    """The messages that wait, in the order in which they are taken; `epoch` is the newest that has come."""

    waiting: tuple[ToWorker, ...] = ()
    epoch: int = 0

    @property
    def is_urgent(self) -> bool:
        """Whether the first message interrupts the main thread."""
        return bool(self.waiting) and isinstance(self.waiting[0], (EpochMessage, StopMessage))


def arrived(inbox: Inbox, message: ToWorker) -> Inbox:
    """Returns the inbox after a message; an epoch that is not newer changes nothing."""
    waiting, epoch = inbox
    if isinstance(message, StopMessage):
        return Inbox((message, *waiting), epoch)
    if not isinstance(message, EpochMessage):
        return Inbox((*waiting, message), epoch)
    if message.epoch <= epoch:
        return inbox
    stops = tuple(each for each in waiting if isinstance(each, StopMessage))
    return Inbox((*stops, message), message.epoch)


def taken(inbox: Inbox) -> tuple[ToWorker, Inbox]:
    """Returns the first message, and the inbox without it."""
    return inbox.waiting[0], Inbox(inbox.waiting[1:], inbox.epoch)


def without(inbox: Inbox, message: ToWorker) -> Inbox:
    """Returns the inbox without one of its messages, which was taken out of turn by a worker that has not joined."""
    return inbox._replace(waiting=tuple(each for each in inbox.waiting if each is not message))
