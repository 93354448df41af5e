"""The ladder: the source of a lost state, the nearest first, and the end of a run that has none.

    shadow -> the same stage in another pipeline -> newest good checkpoint -> an older one -> stop

The first two rungs are heirs, which the membership protocol names. Below them, the launcher goes on in the same run
from a checkpoint, but a few times in an hour only: a cause that comes again and again would never end.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.errors import ExitCode

_WITHIN_NS = 3600 * 1_000_000_000


class Ladder(NamedTuple):
    """The times at which a run went on from a checkpoint; it may do so `most` times in an hour."""

    most: int
    at_ns: tuple[int, ...] = ()

    def used(self, now_ns: int) -> int:
        """Returns how many times it went on in the last hour."""
        return sum(now_ns - each < _WITHIN_NS for each in self.at_ns)


def next_rung(ladder: Ladder, good: int | None, now_ns: int) -> tuple[Ladder, ExitCode | None]:
    """Returns the ladder after the loss of a state, and the exit code of a run that must stop, else None.

    `good` is the step of the newest good checkpoint, None if there is none.
    """
    if good is None:
        return ladder, ExitCode.STATE_LOST
    if ladder.used(now_ns) >= ladder.most:
        return ladder, ExitCode.STOPPED_RESUMABLE
    return ladder._replace(at_ns=(*ladder.at_ns, now_ns)), None
