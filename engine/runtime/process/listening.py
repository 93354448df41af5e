"""Which port a process of this host listens on, as the kernel knows it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTEN = "0A"


def listening_port(pid: int) -> int | None:
    """Returns the first TCP port (IPv4) that a process listens on, or None: not yet, or it has ended."""
    with contextlib.suppress(OSError):
        own = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            # number, local address:port in hexadecimal, remote, state, ... and the inode in the tenth place
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                return int(fields[1].rpartition(":")[2], 16)
    return None
