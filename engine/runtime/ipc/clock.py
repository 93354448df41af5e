"""The clock of the records of a host: one for all of its processes."""

from __future__ import annotations

import time

now_ns = time.monotonic_ns
