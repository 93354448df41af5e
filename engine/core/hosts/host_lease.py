"""The time of a host's lease: when it is renewed, and when the host has to end its workers.

Rule: the store cannot let a lease expire before its time has passed since the last renewal was *sent* that was
answered. A second before that the host ends its workers, so none of them computes when others may act on the loss. The
times are of a clock that counts the suspension of the host.
"""

from __future__ import annotations

from typing import NamedTuple

_S = 1_000_000_000
MARGIN_NS = _S  # from the end of the workers until the lease may expire
LEAST_S, USUAL_S, MOST_S = 3, 5, 600  # of a lease
_RENEWALS = 10  # in the time of a lease


class LeaseTime(NamedTuple):
    """A lease of `ttl_ns`; its last answered renewal was sent at `sent_ns`."""

    ttl_ns: int
    sent_ns: int

    @property
    def renew_ns(self) -> int:
        """When the next renewal is due."""
        return self.sent_ns + self.ttl_ns // _RENEWALS

    @property
    def end_ns(self) -> int:
        """When the workers have to be ended."""
        return self.sent_ns + self.ttl_ns - MARGIN_NS

    def renewed(self, sent_ns: int) -> LeaseTime:
        """Returns the lease after the answer to a renewal."""
        return self._replace(sent_ns=max(sent_ns, self.sent_ns))
