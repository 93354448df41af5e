"""Notices that are asked for: a command or an address of the machine that tells of its coming end, and its answers.

Rules: nothing, and a word for no, are no notice. Numbers name workers: a JSON list, one number, or words such as
"workers 1 2". Any other answer concerns the whole host, as those of clouds do. A list of scheduled events is a notice
only if an event ends this machine: others of its group are listed too.
"""

from __future__ import annotations

import json
from typing import NamedTuple

MOST_BYTES = 64 * 1024  # of an answer
_NO = frozenset({"", "false", "none", "null", "no", "[]", "{}"})
_WORKER = frozenset({"worker", "workers", "and"})


class NoticeFrom(NamedTuple):
    """A command or URL asked every `every_s` s."""

    command: tuple[str, ...] = ()
    url: str = ""
    every_s: float = 5.0
    token_url: str = ""  # asked first, for a token to show
    name_url: str = ""  # gives the name of this machine in a list of events

    @property
    def name(self) -> str:
        """The option that has named it."""
        if any(self.url == cloud.source.url for cloud in CLOUDS.values()):
            return "--spot"
        return "--notice-url" if self.url else "--notice-command"


class Cloud(NamedTuple):
    """Where a cloud announces the end of a spot machine, and the least time between the notice and the end."""

    source: NoticeFrom
    grace: str


_METADATA = "http://169.254.169.254"  # the same address in each of them
CLOUDS = {
    "aws": Cloud(
        NoticeFrom((), f"{_METADATA}/latest/meta-data/spot/instance-action", 5.0, f"{_METADATA}/latest/api/token"),
        "120s",
    ),
    "gcp": Cloud(NoticeFrom((), f"{_METADATA}/computeMetadata/v1/instance/preempted", 1.0), "30s"),
    "azure": Cloud(
        NoticeFrom(
            (),
            f"{_METADATA}/metadata/scheduledevents?api-version=2020-07-01",
            1.0,
            name_url=f"{_METADATA}/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        ),
        "30s",
    ),
}
_ENDING_EVENTS = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})  # "Freeze" is a pause of seconds


class NoticeAnswer(NamedTuple):
    """The workers that an answer names; None for all of the host."""

    workers: tuple[int, ...] | None
    text: str


def answer_of(answer: bytes, machine: str = "") -> NoticeAnswer | None:
    """Returns the notice in an answer, or None; what is beyond the limit does not count.

    `machine` is the name of this one; without it, an event of any machine counts.
    """
    text = answer[:MOST_BYTES].decode("utf-8", "replace").strip()
    if text.lower() in _NO or _has_no_ending_event(text, machine):
        return None
    return NoticeAnswer(_named(text), text)


def _has_no_ending_event(text: str, machine: str) -> bool:
    """Returns whether an answer is a list of scheduled events, and none of them ends the machine."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    events = value.get("Events") if isinstance(value, dict) else None
    if not isinstance(events, list):
        return False
    return not any(_ends(each, machine) for each in events if isinstance(each, dict))


def _ends(event: dict[str, object], machine: str) -> bool:
    resources = event.get("Resources")
    is_here = not machine or not isinstance(resources, list) or machine in resources
    return event.get("EventType") in _ENDING_EVENTS and is_here


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
