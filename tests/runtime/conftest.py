"""What the tests of this folder share: one server of peers, because its start takes a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.peers import PeerServer, peer_server


@pytest.fixture(scope="package")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    """Starts functions of test modules in processes of their own."""
    with peer_server(tmp_path_factory.mktemp("peers")) as server:
        yield server
