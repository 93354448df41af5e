"""The probes on the real machine, and with the one call that each depends on made to fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from engine.harness import host_checks


def refuse(*_args: object, **_kwargs: object) -> NoReturn:
    """Stands for a system call that is not allowed."""
    raise PermissionError(1, "Operation not permitted")


def test_kernel_calls_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.missing_kernel_calls() == []
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.delattr(os, "pidfd_open")
    pidfd, memfd = host_checks.missing_kernel_calls()
    assert pidfd.startswith("pidfd (")
    assert "memfd ([Errno 1] Operation not permitted)" in memfd


def test_loopback_says_why_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.loopback_error() == ""
    monkeypatch.setattr(socket, "create_server", refuse)
    assert "Operation not permitted" in host_checks.loopback_error()


def test_links_say_why_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.link_error() == ""
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert host_checks.link_error() == "Operation not permitted"


def test_folder_probe_looks_where_the_folder_would_be_and_leaves_nothing(tmp_path: Path) -> None:
    free_bytes, error = host_checks.probe_folder(tmp_path / "not" / "yet")
    assert error == ""
    assert free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_folder_probe_says_why_it_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert host_checks.probe_folder(tmp_path / "file") == (0, "Not a directory")
    assert host_checks.probe_folder(Path("/proc/bamboo"))[1] != ""


def child(code: str) -> subprocess.Popen[str]:
    """Starts a child in the place of the torch probe."""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libfoo is missing')", "ImportError: libfoo is missing"),
        ("import os; os._exit(9)", "importing torch ended with code 9"),
    ],
)
def test_torch_that_cannot_be_imported_is_a_finding(code: str, error: str) -> None:
    with child(code) as probe:
        assert host_checks.finish_torch_probe(probe) == ({}, error)


def test_torch_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "TORCH_TIMEOUT_S", 0.05)
    with child("import time; time.sleep(60)") as probe:
        assert host_checks.finish_torch_probe(probe) == ({}, "importing torch took longer than 0.05 s")
    assert probe.returncode is not None
