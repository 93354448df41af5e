"""The time of a host's lease: the host has ended its workers before anyone may act on the loss of the lease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.hosts.ends import LEAST_S, MARGIN_NS, LeaseTime

S = 1_000_000_000


@given(st.integers(LEAST_S, 600), st.integers(0, 10**15), st.integers(0, 10 * S))
def test_workers_end_a_second_before_the_lease_can_expire(ttl_s: int, sent_ns: int, way_ns: int) -> None:
    """The store counts from the arrival of the renewal, which is later than its sending."""
    expires_ns = sent_ns + way_ns + ttl_s * S
    lease = LeaseTime(ttl_s * S, sent_ns)
    assert lease.end_ns + MARGIN_NS <= expires_ns
    assert sent_ns < lease.renew_ns < lease.end_ns  # there is time for more than one attempt


def test_the_answer_to_an_older_renewal_changes_nothing() -> None:
    lease = LeaseTime(5 * S, 0).renewed(3 * S)
    assert lease.renewed(S) == lease == LeaseTime(5 * S, 3 * S)
    assert (lease.renew_ns, lease.end_ns) == (7 * S // 2, 7 * S)
