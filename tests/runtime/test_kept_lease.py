"""The lease of a host: renewed beside other work; a host that cannot renew it ends before it could expire."""

from __future__ import annotations

import os
import signal
import time

import pytest

from engine.core.errors import CoordinatorUnavailableError, ExitCode
from engine.core.hosts.ends import LEAST_S
from engine.core.kv import Lease
from engine.runtime.agent.host_registry import KeptLease, boottime_ns, lease_s

pytestmark = pytest.mark.timeout(60)
S = 1_000_000_000


class LeaseStore:
    """A store that grants leases, and answers renewals for `answers_s`; then it does not, or says that it is over."""

    def __init__(self, answers_s: float, *, is_revoked: bool = False) -> None:
        self.until_s = time.monotonic() + answers_s
        self.is_revoked = is_revoked
        self.num_renewed = 0
        self.is_given_back = False

    def grant(self, ttl_s: int) -> Lease:
        """Grants one."""
        return Lease(1, ttl_s)

    def keep_alive(self, lease: Lease) -> bool:
        """Renews it, or does not."""
        if time.monotonic() < self.until_s:
            self.num_renewed += 1
            return True
        if self.is_revoked:
            return False
        time.sleep(1.0)
        raise CoordinatorUnavailableError("no answer")

    def revoke(self, lease: Lease) -> None:
        """Takes it back."""
        self.is_given_back = True


def end_of_host(store: LeaseStore, *, stops_s: float = 0.0) -> tuple[int, float, str]:
    """Runs a host that only waits; returns its exit code, the seconds from its lease to its end, and why it ended.

    It tells them itself: on a busy machine this process may be late to fork it and to see its end.
    """
    reads, writes = os.pipe()
    is_ready, ready = os.pipe()
    if (pid := os.fork()) == 0:
        made: object = store
        os.write(ready, b"!")
        began_ns = boottime_ns()

        def tell(why: str) -> bool:
            return bool(os.write(writes, f"{(boottime_ns() - began_ns) / S} {why}".encode()))

        KeptLease(made, LEAST_S).cover(tell)  # type: ignore[arg-type]
        time.sleep(30)
        os._exit(1)
    os.close(writes)
    os.read(is_ready, 1)
    if stops_s:
        time.sleep(1.0)  # it has renewed its lease
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stops_s)
        os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    for each in (is_ready, ready):
        os.close(each)
    with os.fdopen(reads) as told:
        after_s, _, why = told.read().partition(" ")
        return os.waitstatus_to_exitcode(status), float(after_s), why


def test_a_host_without_an_answer_has_ended_before_its_lease_can_expire() -> None:
    code, after_s, why = end_of_host(LeaseStore(0.0))
    assert (code, why) == (ExitCode.FENCED, "the lease of this host could not be renewed in time")
    assert LEAST_S - 1 <= after_s < LEAST_S


def test_a_host_whose_lease_was_revoked_ends_at_once() -> None:
    code, after_s, why = end_of_host(LeaseStore(0.0, is_revoked=True))
    assert code == ExitCode.FENCED
    assert "revoked" in why
    assert after_s < LEAST_S - 1


@pytest.mark.soak
def test_a_host_that_stood_still_ends_as_soon_as_it_goes_on() -> None:
    code, after_s, _ = end_of_host(LeaseStore(60.0), stops_s=LEAST_S + 0.5)
    assert code == ExitCode.FENCED
    assert after_s < LEAST_S + 4


def test_a_lease_is_renewed_while_nothing_else_happens_and_given_back() -> None:
    store = LeaseStore(60.0)
    made: object = store
    kept = KeptLease(made, LEAST_S)  # type: ignore[arg-type]
    time.sleep(2.0)
    kept.close()
    assert 4 <= store.num_renewed <= 7
    assert store.is_given_back


class SlowStore:
    """A store that is as slow as its network, and its first answer twice as slow."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s, self._is_first = answer_s, True

    def get(self, key: str) -> None:
        """Answers."""
        time.sleep(self.answer_s * (1 + self._is_first))
        self._is_first = False


def test_a_lease_is_longer_where_the_store_is_slow_to_answer() -> None:
    fast, slow = map(SlowStore, (0.0, 0.1))
    assert lease_s(fast, 5) == 5  # type: ignore[arg-type]
    assert lease_s(slow, 5) == 6  # type: ignore[arg-type]
