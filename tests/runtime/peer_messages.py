"""Control messages that only tests have."""

from __future__ import annotations

from typing import Any

from engine.core.message_codec import Message, ToAgent, ToWorker, message
from engine.core.messages import CommitMessage, EpochMessage


@message
class Call(Message):
    """A peer is to call a function."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    keys: str  # path of the file in which all peers meet


@message
class Result(Message):
    """What the function has returned."""

    value: Any


@message
class Word(ToAgent, ToWorker):
    """Anything; a control gives it a meaning of no kind."""

    text: str = ""


@message
class SmallPlan(ToWorker):
    """What a worker of a small run needs for an epoch."""

    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    healing: tuple[tuple[int, int, int], ...]
    committed: int
    commit: CommitMessage | None
    inventories: tuple[str, ...] | None


@message
class Report(ToAgent):
    """What a worker of a small run holds at the end: pipeline, stage and hashes."""

    rows: tuple[tuple[int, int, str, str, str], ...]


def an_epoch(number: int, members: tuple[int, ...] = (0,), *, regroup: bool = False) -> EpochMessage:
    """Returns the message of an epoch in which every member has to answer."""
    return EpochMessage(number, members, True, regroup, None, None, None)
