"""Control messages that only tests have."""

from __future__ import annotations

from typing import Any

from engine.core.message_kinds import Message, ToAgent, ToWorker, message
from engine.core.messages import EpochMessage
from engine.core.ownership import Members


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
class Hello(ToAgent):
    """A peer says which worker it is, of which group of peers."""

    group: str
    worker: int


@message
class Word(ToAgent, ToWorker):
    """Anything; a control gives it a meaning of no kind."""

    text: str = ""


def an_epoch(number: int, members: tuple[int, ...] = (0,), *, regroup: bool = False) -> EpochMessage:
    """Returns the message of an epoch in which every member has to answer."""
    return EpochMessage(number, Members.of(members), True, regroup, None, None, None)
