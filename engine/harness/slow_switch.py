"""``python -m engine.harness.slow_switch MS LINK...``: takes the place of a bridge, and carries frames after a while.

It does what netem would, which not every kernel has. It says when it has begun.
"""

from __future__ import annotations

import contextlib
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_ALL, _SOL_PACKET, _VNET_HEADER, _MEMBERSHIP, _PROMISCUOUS, _OUTGOING = 3, 263, 15, 1, 1, 4  # of linux/if_packet.h


def carry(late_ms: float, links: Sequence[str]) -> None:
    """Carries each frame between these links after `late_ms`, and a tenth more or less, until it is killed."""
    ports = {}
    for name in links:
        subprocess.run([str(shutil.which("ip")), "link", "set", name, "nomaster"], check=True)
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)  # with checksums and segments that are to be made yet
        port.bind((name, 0))
        request = struct.pack("iHH8s", socket.if_nametoindex(name), _PROMISCUOUS, 0, b"")
        port.setsockopt(_SOL_PACKET, _MEMBERSHIP, request)
        port.setblocking(False)
        ports[port.fileno()] = port
    print("ready", flush=True)
    frames: deque[tuple[float, int, bytes]] = deque()
    dice = random.Random(0)  # noqa: S311 - no secret
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        for fd in select.select(list(ports), [], [], wait_s)[0]:
            with contextlib.suppress(OSError):  # a link that was cut
                data, where = ports[fd].recvfrom(1 << 17)
                if where[2] != _OUTGOING:
                    due_s = time.monotonic() + late_ms * dice.uniform(0.9, 1.1) / 1e3
                    frames.append((max(due_s, frames[-1][0]) if frames else due_s, fd, data))
        while frames and frames[0][0] <= time.monotonic():
            _, source, data = frames.popleft()
            for fd, port in ports.items():
                if fd != source:
                    with contextlib.suppress(OSError):
                        port.send(data)


if __name__ == "__main__":
    carry(float(sys.argv[1]), sys.argv[2:])
