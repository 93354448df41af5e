"""Errors of storage that pass by themselves, and the wait before a data source is asked again.

Rule: only an error that names its cause as one that passes counts; any other may be a mistake in the user's code, which
a second try would hide. A user's own class counts if it, or the exception, has `is_transient = True`.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

MARK = "is_transient"
_NUMBERS = frozenset({errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ESTALE, errno.EBUSY})
_FIRST_S, _LONGEST_S = 0.1, 5.0
_IN_TEXT = re.compile(r"\[Errno (\d+)\]")  # all that torch keeps of an error in a process of a DataLoader


def is_transient(error: BaseException) -> bool:
    """Returns whether what raised this may succeed a moment later."""
    marked = getattr(error, MARK, None)
    if isinstance(marked, bool):
        return marked
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, OSError):
        return False
    named = _IN_TEXT.search(str(error)) if error.errno is None and type(error) is OSError else None
    return (int(named[1]) if named else error.errno) in _NUMBERS


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """At most so many further tries for one call, and so many seconds from its first error on."""

    tries: int
    total_s: float

    def wait_s(self, number: int, spent_s: float) -> float | None:
        """Returns the wait before the further try `number` (from 1), `spent_s` after the first error; None for none."""
        wait_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(number - 1, 10))
        return wait_s if number <= self.tries and spent_s + wait_s <= self.total_s else None
