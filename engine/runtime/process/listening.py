"""The TCP port on which a process of this host listens, from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTEN = "0A"


def listening_port(pid: int) -> int | None:
    """Returns the first TCP port (IPv4) on which a process listens; None if it listens on none or has ended."""
    with contextlib.suppress(OSError):
        own = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            # number, local address:port in hexadecimal, remote, state, ...; the tenth field is the inode
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                return int(fields[1].rpartition(":")[2], 16)
    return None
