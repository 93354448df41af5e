"""The kernel's state of a process, as a letter such as R (running), S (sleeping) or T (stopped)."""

from __future__ import annotations

from pathlib import Path

from engine.runtime.process.fork_client import Child
from engine.runtime.process.subprocesses import is_readable


def process_state(child: Child) -> str | None:
    """Returns the state of the main thread of a child, or None if the child has ended."""
    letter = _letter(child.pid)
    # If the child has ended, its pid may belong to another process. Its pidfd tells, after the read.
    return None if letter is None or is_readable(child.pidfd) else letter


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that has ended and that its parent has not waited for does not."""
    return _letter(pid) not in (None, "Z", "X")


def _letter(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]
