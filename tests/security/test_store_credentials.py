"""The user and the password of an etcd go to an address that the user named, and never to one that a folder names."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bamboo_cli.status import status
from engine.files.run_folder import create_run_folder
from tests.core.made_records import lines_of

APP = typer.Typer()
APP.command()(status)
USER, PASSWORD = "alice", "correct-horse-battery"
SETTINGS_OF_HTTP2 = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # an empty frame: now a client of gRPC sends its calls


class Listener:
    """Accepts connections on a loopback port as an etcd would, and keeps all that it receives."""

    def __init__(self) -> None:
        self.received = b""
        self.num_connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.num_connections += 1
                connection.sendall(SETTINGS_OF_HTTP2)
                connection.settimeout(1.5)
                try:
                    while data := connection.recv(65536):
                        self.received += data
                except OSError:
                    pass

    def close(self) -> None:
        """Ends it."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture(name="listener")
def _listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(name="credentials", autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_ETCD_USER", USER)
    monkeypatch.setenv("BAMBOO_ETCD_PASSWORD", PASSWORD)
    monkeypatch.delenv("BAMBOO_ETCD", raising=False)


def look(results: Path, endpoint: str, *arguments: str, private: bool = False) -> tuple[dict[str, object], str]:
    """Makes a folder from elsewhere that names a store; returns the object that `status` prints, and its stderr."""
    folder = create_run_folder(results, "mlp", datetime(2026, 1, 1), "abcd")
    store = {"event": "store", "endpoints": [endpoint], "run_id": "x", "private": private}
    folder.events.write_text(lines_of([{"event": "job", "steps": 9, "stages": 2}, store]))
    done = CliRunner().invoke(APP, ["--json", "--results", str(results), *arguments])
    return json.loads(done.stdout), done.stderr


def test_an_address_that_only_a_folder_names_is_not_asked(tmp_path: Path, listener: Listener) -> None:
    """Before, `bamboo status` sent the user's name and password in clear text to any port that a run folder named."""
    found, told = look(tmp_path, listener.address)
    assert (listener.num_connections, listener.received) == (0, b"")
    assert found["live"] is False
    assert f"its store was not contacted: '{listener.address}' is none that --etcd or BAMBOO_ETCD names" in told


def test_another_address_than_that_of_the_user_is_not_asked(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the record of a folder was asked instead of the cluster that the environment names."""
    monkeypatch.setenv("BAMBOO_ETCD", "127.0.0.1:1")
    _, told = look(tmp_path / "a", listener.address)
    assert "its store was not contacted" in told
    _, told = look(tmp_path / "b", listener.address, "--etcd", "127.0.0.1:2")
    assert "its store was not contacted" in told
    assert (listener.num_connections, listener.received) == (0, b"")


def test_a_private_store_is_asked_in_its_run_folder_only(tmp_path: Path, listener: Listener) -> None:
    """Before, the record of a folder named the port of a private store."""
    for number, address in enumerate((listener.address, "192.0.2.1:2379", "unix:/etc/passwd")):
        found, _ = look(tmp_path / str(number), address, "--etcd-plain-http", private=True)
        assert found["live"] is False
    assert (listener.num_connections, listener.received) == (0, b"")


def test_no_key_of_the_client_is_shown_to_an_address_that_only_a_folder_names(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the client's certificate went to the address in the folder, too."""
    for name in ("CA", "CERT", "KEY"):
        (tmp_path / name).write_text("text")
        monkeypatch.setenv(f"BAMBOO_ETCD_{name}", str(tmp_path / name))
    look(tmp_path / "results", listener.address)
    assert (listener.num_connections, listener.received) == (0, b"")


@pytest.mark.parametrize("is_option", [True, False])
def test_an_address_that_the_user_names_gets_them(
    is_option: bool, tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener of these tests would see a password: here it does."""
    if not is_option:
        monkeypatch.setenv("BAMBOO_ETCD", f"127.0.0.1:1,{listener.address}")
    _, told = look(tmp_path, listener.address, *(["--etcd", listener.address] if is_option else []))
    assert PASSWORD.encode() in listener.received
    assert "is not asked" not in told
