"""A port that refuses proves the end of the process that listened there; silence proves nothing."""

from __future__ import annotations

import socket

import pytest

from engine.harness.host_agent import refuses


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_place_refuses_when_its_listener_has_ended(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        assert not refuses(place)
    assert refuses(place)


def test_a_listener_that_does_not_answer_has_not_ended() -> None:
    """Its queue is full, as that of a stopped process may be."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = "{}:{}".format(*listener.getsockname())
        waiting = []
        for _ in range(3):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listener.getsockname())
        assert not refuses(place)
        for each in waiting:
            each.close()


def test_a_host_that_cannot_be_reached_has_not_ended() -> None:
    assert not refuses("240.0.0.1:9")
