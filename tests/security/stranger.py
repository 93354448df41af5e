"""Another user of the host, who has read gloo's sources: takes the places of workers, or stands between two of them.

stranger.py take         connects to each port that a line of stdin names, as every peer that gloo may wait for
stranger.py relay PORT   passes bytes on between the first two connections to PORT, and changes each 1.0 to 2.0
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading

NOBODY = 65534
_PLACES = 40  # gloo's numbers of peers
_ONE, _TWO = struct.pack("<f", 1.0), struct.pack("<f", 2.0)


def take() -> None:
    held = []
    for line in sys.stdin:
        for place in range(_PLACES):
            with contextlib.suppress(OSError):  # the port is closed by now
                held.append(socket.socket())
                held[-1].settimeout(0.2)
                held[-1].connect(("127.0.0.1", int(line)))
                held[-1].sendall(struct.pack("<Q", place))
        print("taken", flush=True)


def relay(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        ends = [listener.accept()[0] for _ in range(2)]
    for end in ends:
        end.recv(8, socket.MSG_WAITALL)  # gloo's number of the peer
    print("between", flush=True)
    ways = [threading.Thread(target=_pass_on, args=way) for way in (ends, ends[::-1])]
    for way in ways:
        way.start()
    for way in ways:
        way.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(1 << 16):
        target.sendall(data.replace(_ONE, _TWO))
    target.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    take() if sys.argv[1] == "take" else relay(int(sys.argv[2]))
