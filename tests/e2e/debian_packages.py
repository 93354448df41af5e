"""Programs of Debian's packages in a folder: got by apt and unpacked, and never installed.

`BAMBOO_TEST_PACKAGES` names the folder in which they are kept; by default it is one of this user's under /tmp. A test
that needs them is skipped with the reason where apt has them not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MOST_S = 120.0
SLURM = ("slurmd", "slurmctld", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "libnuma1", "libmunge2")
SSH = ("openssh-server", "openssh-client", "openssh-sftp-server", "libwrap0")


class NoPackagesError(Exception):
    """The packages cannot be had here; its text says why."""


def unpacked(kind: str, packages: Sequence[str]) -> Path:
    """Returns a folder with the files of packages, as they would lie under /; raises NoPackagesError."""
    kept = Path(os.environ.get("BAMBOO_TEST_PACKAGES") or f"{tempfile.gettempdir()}/bamboo-packages-{os.getuid()}")
    place = kept / kind
    if place.is_dir():
        return place
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise NoPackagesError(f"no {program}: the packages of Debian cannot be had")
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as text:
        fresh = Path(text)
        _called(["apt-get", "download", *packages], fresh)
        for each in fresh.glob("*.deb"):
            _called(["dpkg", "-x", each.name, "root"], fresh)
        (fresh / "root").rename(place)
    return place


def _called(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoPackagesError(f"{' '.join(command[:2])} did not end within {_MOST_S:g} s") from None
    if done.returncode:
        raise NoPackagesError(f"{' '.join(command[:2])} exited with {done.returncode}: {done.stderr.strip()}")


def laid_over(root: Path) -> list[str]:
    """Returns a command that lays the files over /usr, in the mounts of a host: some look for others in that place."""
    return ["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={root / 'usr'}:/usr", "/usr"]
