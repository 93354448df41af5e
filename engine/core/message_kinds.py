"""Control messages: the base classes, and the registry of kinds; `engine/codec/messages.py` encodes and decodes them.

The kind of a message is the name of its class in small letters, without its last word. Descriptors travel beside a
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from engine.core.errors import ensure

MAX_BYTES = 160_000  # of a message; below the kernel's default socket buffer of 208 KiB
CUT = "... (cut)"

Made = TypeVar("Made", bound="Message")
Plain = Mapping[str, Any]  # values of JSON, of a module that has their form


class Message:
    """One control message; its class is made by `message`. A `cut_note` ends each text that is cut."""

    __slots__ = ()
    cut_note = ""


class ToWorker(Message):
    """A message from the agent to a worker."""

    __slots__ = ()


class ToAgent(Message):
    """A message from a worker to the agent."""

    __slots__ = ()


class TextsToAgent(ToAgent):
    """A message from a worker to the agent with texts of the user's."""

    __slots__ = ()
    cut_note = CUT


class LastWords(ToAgent):
    """The last message of a worker, which has written its texts to its log."""

    __slots__ = ()
    cut_note = "... (cut; the log of the worker has the whole text)"


_KINDS: dict[str, type[Message]] = {}


def kind_of(message_class: type[Message]) -> str:
    """Returns the kind of a message as it travels, such as ``commit``."""
    return message_class.__name__.removesuffix("Message").lower()


def head_of(kind: type[Message]) -> bytes:
    """Returns the first bytes of every packet of a kind, by which a relay knows it without reading the rest."""
    return f'{{"kind":"{kind_of(kind)}"'.encode()


@dataclass_transform(frozen_default=True)
def message(message_class: type[Made]) -> type[Made]:
    """Makes a class a frozen data class with slots, and the one kind of message that has its name."""
    message_class = dataclass(frozen=True, slots=True)(message_class)
    kind = kind_of(message_class)
    ensure(kind not in _KINDS, f"two kinds of message are called {kind!r}")
    _KINDS[kind] = message_class
    return message_class


def kinds() -> Mapping[str, type[Message]]:
    """Returns the class of every kind."""
    return dict(_KINDS)


def class_of(kind: str) -> type[Message] | None:
    """Returns the class of a kind; None for an unknown one."""
    return _KINDS.get(kind)
