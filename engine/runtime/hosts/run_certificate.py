"""The certificate of a run: one key pair, which each host of the run has and no other one.

Rules: `openssl` makes it, in a folder in memory that only this user can open; nothing of it stays on a disk. Both ends
of a stream, and of a link between workers of two hosts, show it, and take no other one. It has no end and no begin that
matters, as the clocks of hosts differ: it is forgotten with the run.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import EnvironmentLacksError
from engine.core.hosts.host_options import CLEAR
from engine.files.atomic_write import write_atomically

NAME = "bamboo"  # in the certificate
_MOST_S = 20.0
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
