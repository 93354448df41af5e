"""A real Slurm: three slurmds and a head, each on a host of namespaces, and an etcd over TLS on the head.

Nobody proves to Slurm who he is (`auth/none`), so this is for tests. A slurmd starts /usr/sbin/slurmstepd, so the
packages lie over /usr of each host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.harness.host_checks import hosts_error
from engine.harness.testbed import BedEtcd, BedHost, HostBed
from tests.e2e.debian_packages import SLURM, NoPackagesError, laid_over, unpacked

NODES = 3
_START_S = 60.0
_CONF = """
ClusterName=bed
SlurmctldHost={head}({head_address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_min_interval=100000
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=debug
SlurmctldDebug=debug
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmBed:
    """The hosts: h0 to h2 have a slurmd each, h3 is the head, with slurmctld and etcd."""

    def __init__(self, bed: HostBed, etcd: BedEtcd, folder: Path):
        self.nodes, self.head, self.folder = bed.hosts[:NODES], bed.hosts[NODES], folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.variables = {**etcd.variables, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}

    def start(self) -> None:
        """Starts the daemons and waits for the nodes."""
        text = _CONF.format(head=self.head.name, head_address=self.head.address, folder=self.folder)
        for each in self.nodes:
            (self.folder / f"spool-{each.name}").mkdir()
            text += f"NodeName={each.name} NodeAddr={each.address} CPUs=2 State=UNKNOWN\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        self._daemon(self.head, "/usr/sbin/slurmctld-wlm", "-D")
        for each in self.nodes:
            self._daemon(each, "/usr/sbin/slurmd-wlm", "-D", "-N", each.name)
        self.until(lambda: self.told("sinfo", "--noheader", "--format=%D %T").split() == [str(NODES), "idle"])

    def _daemon(self, host: BedHost, *command: str) -> None:
        with (self.folder / f"{host.name}.daemon").open("wb") as log:
            host.start(*command, environment=self.variables, log=log)

    def ask(self, *command: str, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
        """Runs a program on the head to its end."""
        words = self.head.words("env", f"--chdir={cwd}", *command)  # who enters other mounts is in their root
        env = {**os.environ, **self.variables}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)

    def told(self, *command: str) -> str:
        """Returns what a program prints on the head."""
        return self.ask(*command).stdout.strip()

    def until(self, is_so: Callable[[], object], within_s: float = _START_S) -> None:
        """Waits for a condition."""
        until_s = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < until_s, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """Returns the ends of all logs, for the reader of a failure."""
        found = [path for kind in ("*.log", "*.daemon") for path in sorted(self.folder.glob(kind))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found)


@contextlib.contextmanager
def slurm_bed(folder: Path) -> Iterator[SlurmBed]:
    """Makes the bed; skips the test, with the reason, where it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("slurmd starts tasks as other users, and so runs as root")
    if why := hosts_error():
        pytest.skip(why)
    try:
        root = unpacked("slurm", SLURM)
    except NoPackagesError as error:
        pytest.skip(str(error))
    for name in ("slurmctld", "slurmd", "slurmstepd"):  # names that an installation would make
        link = root / "usr/sbin" / name
        if not link.is_symlink():
            link.symlink_to(f"{name}-wlm")
    with HostBed(NODES + 1) as bed:
        for each in bed.hosts:
            each.run(*laid_over(root))
        with BedEtcd(bed.hosts[NODES:], folder) as etcd:
            made = SlurmBed(bed, etcd, folder)
            made.start()
            yield made
