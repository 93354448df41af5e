"""The clock of the records of a host: one for all of its processes."""

from __future__ import annotations

import time

now_ns = time.monotonic_ns
TICK_S = 0.25  # between two looks at the clock of a loop, and two signs of life of a worker
