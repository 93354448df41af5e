"""What the kernel says of a process: the letter of its state, such as R (runs), S (waits), T (stopped)."""

from __future__ import annotations

import select
from pathlib import Path

from engine.runtime.process.children import Child


def process_state(child: Child) -> str | None:
    """Returns the letter for the main thread of a child, or None when the child has ended."""
    try:
        text = Path(f"/proc/{child.pid}/stat").read_text()
    except OSError:
        return None
    # If the child had ended, its pid could be another's by now; as long as it has not, what was read is its own.
    poll = select.poll()
    poll.register(child.pidfd, select.POLLIN)
    return None if poll.poll(0) else text.rpartition(")")[2].split()[0]
