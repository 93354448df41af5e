"""When a host counts as lost: its stream has ended and is not back, or it is silent.

Rule: a host whose words wait here, because this host is slow to take them, is not silent.
"""

from __future__ import annotations

from typing import NamedTuple

BACK_NS = 200_000_000  # from the end of a stream until it has to be back
SILENT_NS = 2_000_000_000
LATER_NS = BACK_NS + 500_000_000  # from the end of a host until all hear of it; a broken transfer is no proof before


class HostSight(NamedTuple):
    """The last word of a host, the end of its stream if it has ended, and whether its words wait here."""

    heard_ns: int
    ended_ns: int | None = None
    is_waiting: bool = False

    def why_lost(self, now_ns: int) -> str:
        """Returns why the host counts as lost, in words; empty if it does not."""
        if self.ended_ns is not None and now_ns - self.ended_ns >= BACK_NS:
            return "its stream has ended"
        if not self.is_waiting and now_ns - self.heard_ns >= SILENT_NS:
            return f"it was silent for {SILENT_NS / 1e9:g} s"
        return ""
