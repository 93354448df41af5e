"""The TLS of Gloo: its files are memory of the agent, which its children find, and its variables reach them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.runtime.doctor import host_probes
from engine.runtime.hosts.run_certificate import RunCertificate, transfer_tls
from engine.runtime.process.fork_client import ForkServer

OF_FILES = ("PKEY", "CERT", "CA_FILE")
pytestmark = pytest.mark.timeout(60)


def test_children_read_the_certificate_from_memory_of_this_process() -> None:
    with transfer_tls(True) as tls:
        for made in (RunCertificate("a long certificate", "a long key"), RunCertificate("certificate", "key")):
            assert tls.hold(made) is made
        places = [tls.environment[f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{each}"] for each in OF_FILES]
        code = "import sys; print(*[open(each).read() for each in sys.argv[1:]])"
        done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["key", "certificate", "certificate"]
        assert tls.environment["GLOO_DEVICE_TRANSPORT"] == "TCP_TLS"
    assert not tls.environment
    assert not any(Path(each).exists() for each in places)


def test_the_fork_server_has_the_variables_where_tls_is_used() -> None:
    for is_used in (True, False):
        with transfer_tls(is_used) as tls, ForkServer(tls.environment) as server:
            environment = Path(f"/proc/{server.pid}/environ")
            while not environment.read_bytes():  # its program is being loaded
                time.sleep(0.001)
            told = environment.read_bytes().decode().split("\0")
            assert ("GLOO_DEVICE_TRANSPORT=TCP_TLS" in told) is is_used
            assert bool([each for each in told if each.startswith("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY=")]) is is_used


def test_gloo_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_probes.gloo_tls_error()  # which a build of torch with TLS has not
    assert found == "" or "unsupported gloo device" in found
    monkeypatch.setenv("PATH", "/nowhere")
    assert "openssl" in host_probes.gloo_tls_error()
