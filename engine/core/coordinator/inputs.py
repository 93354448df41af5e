"""Inputs of the coordinator, each with the time at which it came.

Rules: some events of the membership protocol are inputs as they are. `TakenOver` is the first input of a coordinator
that goes on with the state of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.core.membership.events import Cramped, Heard, LeaseExpired, Notice, Restarted, TakenOver, Wanted
from engine.core.membership.evidence import HostWord, Sight


class Place(NamedTuple):
    """The last action that a worker has begun; `is_struck`: a fault was injected into the worker."""

    step: int
    action: str
    is_struck: bool = False


class Ended(NamedTuple):
    """The process of a worker has ended at a place, if that is known; a negative `code` is the number of a signal."""

    now_ns: int
    worker: int
    code: int
    at: Place | None = None


class Passed(NamedTuple):
    """Time has passed; `places` and `sights` are those of the workers, as far as they are known.

    Of the `unseen` workers, which are on other hosts, no sign of life has come for a while. `words` are those of the
    agents there on their workers: one decision takes the heartbeats of all hosts.
    """

    now_ns: int
    places: Mapping[int, Place] = {}
    sights: Mapping[int, Sight] = {}
    unseen: tuple[int, ...] = ()
    words: Mapping[int, HostWord] = {}


class Stopping(NamedTuple):
    """The run is ending: from now on nothing is decided."""

    now_ns: int


class Resumed(NamedTuple):
    """All workers of a job that could not go on have ended; others start with this ownership after a committed step."""

    now_ns: int
    committed: int
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]


CoordinatorInput = (
    Heard[Any] | Ended | Passed | Stopping | Notice | Wanted | Cramped | LeaseExpired | TakenOver | Restarted | Resumed
)
