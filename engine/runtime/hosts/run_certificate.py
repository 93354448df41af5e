"""The certificate of a run: one key pair, which each host of the run has and no other one.

Rules: `openssl` makes it, in a folder in memory that only this user can open; nothing of it stays on a disk. Both ends
of a stream show it, and take no other one. It has no end and no begin that matters, as the clocks of hosts differ: it
is forgotten with the run.

Gloo takes it too, where its transfers leave loopback in a network that nobody trusts. It reads files, and these are
memory of the agent, which is gone with it; their places are known before there is a certificate, as the fork server
starts before the election. Here is the one place of the environment that tells Gloo so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import EnvironmentLacksError
from engine.core.hosts.host_options import CLEAR
from engine.files.atomic_write import write_atomically

NAME = "bamboo"  # in the certificate
_MOST_S = 20.0
_OF_GLOO = "GLOO_DEVICE_TRANSPORT"
_SETTINGS = f"""
[ca]
default_ca = run
[run]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = named
x509_extensions = both
unique_subject = no
[named]
commonName = supplied
[both]
subjectAltName = DNS:{NAME}
basicConstraints = critical,CA:TRUE
[req]
distinguished_name = of_request
[of_request]
"""
_MADE = ("-startdate", "20000101000000Z", "-enddate", "20991231235959Z", "-out", "certificate")
_COMMANDS = (
    ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "key"],
    ["req", "-new", "-key", "key", "-subj", f"/CN={NAME}", "-config", "settings", "-out", "request"],
    ["ca", "-selfsign", "-batch", "-notext", "-config", "settings", "-keyfile", "key", "-in", "request", *_MADE],
)


class RunCertificate(NamedTuple):
    """The certificate and its key, each as PEM."""

    certificate: str
    key: str


def new_certificate() -> RunCertificate:
    """Makes one; raises EnvironmentLacksError where `openssl` is not there or fails."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a new folder in it, of this user alone
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        for file, text in (("settings", _SETTINGS), ("index", ""), ("serial", "01\n")):
            write_atomically(folder / file, text)
        for command in _COMMANDS:
            _run(command, folder)
        return RunCertificate((folder / "certificate").read_text(), (folder / "key").read_text())


def _run(command: list[str], folder: Path) -> None:
    program = shutil.which("openssl") or "openssl"
    try:
        done = subprocess.run([program, *command], cwd=folder, capture_output=True, timeout=_MOST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentLacksError(f"a run on several hosts needs the program `openssl`: {error}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise EnvironmentLacksError(f"openssl {command[0]} failed: {''.join(why)}")


def network_of(made: RunCertificate, transfers: str) -> dict[str, str]:
    """Returns what the links between hosts are secured with: nothing in a network that the user trusts."""
    return {} if transfers == CLEAR else made._asdict()


class TransferTls:
    """The files in memory, and the `environment` of the processes that read them; without `is_used` both are empty."""

    def __init__(self, is_used: bool):
        self._fds = {name: os.memfd_create(name) for name in RunCertificate._fields} if is_used else {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the fork server of this host, whose children find the files by the pid of this process."""
        if not self._fds:
            return {}
        place = {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in self._fds.items()}
        of_files = {"PKEY": place["key"], "CERT": place["certificate"], "CA_FILE": place["certificate"]}
        return {_OF_GLOO: "TCP_TLS"} | {f"{_OF_GLOO}_TCP_TLS_{name}": path for name, path in of_files.items()}

    def hold(self, made: RunCertificate) -> RunCertificate:
        """Takes the certificate of the run, before the first group of workers forms; returns it."""
        for name, fd in self._fds.items():
            os.ftruncate(fd, 0)
            os.pwrite(fd, getattr(made, name).encode(), 0)
        return made

    def close(self) -> None:
        """Forgets the certificate."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


@contextlib.contextmanager
def transfer_tls(is_used: bool) -> Iterator[TransferTls]:
    """Yields the files of a run, or none."""
    tls = TransferTls(is_used)
    try:
        yield tls
    finally:
        tls.close()
