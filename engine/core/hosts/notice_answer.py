"""Notices that are asked for: a command or an address of the machine that tells of its coming end, and its answers.

Rule: nothing, and a word for no, are no notice. Numbers name workers: a JSON list, one number, or words such as
"workers 1 2". Any other answer concerns the whole host, as those of clouds do.
"""

from __future__ import annotations

import json
from typing import NamedTuple

MOST_BYTES = 64 * 1024  # of an answer
_NO = frozenset({"", "false", "none", "null", "no", "[]", "{}"})
_WORKER = frozenset({"worker", "workers", "and"})


class NoticeFrom(NamedTuple):
    """A command, or a URL, that is asked every `every_s` seconds."""

    command: tuple[str, ...] = ()
    url: str = ""
    every_s: float = 5.0

    @property
    def name(self) -> str:
        """The option that has named it."""
        return "--notice-url" if self.url else "--notice-command"


class NoticeAnswer(NamedTuple):
    """The workers that an answer names; None for all of the host."""

    workers: tuple[int, ...] | None
    text: str


def answer_of(said: bytes) -> NoticeAnswer | None:
    """Returns the notice in an answer, None if there is none; what is beyond the limit does not count."""
    text = said[:MOST_BYTES].decode("utf-8", "replace").strip()
    if text.lower() in _NO:
        return None
    return NoticeAnswer(_named(text), text)


def _named(text: str) -> tuple[int, ...] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        words = [word for word in text.replace(",", " ").lower().split() if word not in _WORKER]
        value = [int(word) if word.isascii() and word.isdigit() and len(word) < 10 else word for word in words]
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(type(each) is int and each >= 0 for each in numbers):
        return None
    return tuple(dict.fromkeys(numbers))
