"""The names of the built-in schedules; the registry has a generator for each."""

from __future__ import annotations

SCHEDULE_NAMES = (
    "1f1b",
    "dualpipev",
    "dualpipev-overlapped",
    "gpipe",
    "interleaved",
    "interleaved-flexible",
    "looped-bfs",
    "zb1p",
    "zbv",
)
