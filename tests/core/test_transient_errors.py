"""Which errors of storage may pass, and how long a data source is waited for."""

from __future__ import annotations

import errno
from itertools import accumulate

import pytest

from engine.core.transient_errors import RetryLimits, is_transient
from tests.looped import looped


class Marked(RuntimeError):
    is_transient = True


class Final(ConnectionError):
    is_transient = False


@looped(
    ("error", "passes"),
    [
        *((OSError(number, "x"), True) for number in (errno.EIO, errno.EAGAIN, errno.ESTALE, errno.EBUSY)),
        *((OSError(number, "x"), True) for number in (errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE)),
        *((OSError(number, "x"), False) for number in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EISDIR)),
        (OSError("Caught OSError in DataLoader worker process 0.\n[Errno 5] Input/output error"), True),
        (OSError("Caught OSError in DataLoader worker process 0.\n[Errno 2] No such file"), False),
        (OSError("no number"), False),
        (ConnectionError("x"), True),
        (TimeoutError("x"), True),
        (Marked("x"), True),
        (Final("x"), False),
        (ValueError("[Errno 5]"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_errors_that_name_a_cause_that_passes_are_transient(error: BaseException, passes: bool) -> None:
    assert is_transient(error) is passes


def test_one_exception_may_be_marked_alone() -> None:
    error = ValueError("x")
    error.is_transient = True  # type: ignore[attr-defined]
    assert is_transient(error)


@looped(
    ("tries", "total_s", "waits"),
    [
        (0, 60.0, []),
        (3, 60.0, [0.1, 0.2, 0.4]),
        (99, 1.0, [0.1, 0.2, 0.4]),  # the next one would end after 1.5 s
        (8, 60.0, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (10**6, 25.0, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]),
        (9, 0.0, []),
    ],
)
def test_waits_double_up_to_both_limits(tries: int, total_s: float, waits: list[float]) -> None:
    limits, found = RetryLimits(tries, total_s), list[float]()
    while (wait_s := limits.wait_s(len(found) + 1, sum(found))) is not None:
        found.append(wait_s)
    assert found == pytest.approx(waits)
    assert all(spent_s <= total_s for spent_s in accumulate(found))
