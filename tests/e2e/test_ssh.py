"""`bamboo launch ssh --submit` with a real sshd on each of three hosts: the loss of one ends no other."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.harness.host_checks import hosts_error
from engine.harness.testbed import BedEtcd, HostBed
from tests.e2e.debian_packages import SSH, NoPackagesError, laid_over, unpacked

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]
HOSTS = 3
JOB = "model: gpt\nstages: 3\nsteps: 16\ncheckpoint_every: 0\n"
CONF = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
PidFile none
"""
CLIENT = """
Host *
    IdentityFile {folder}/key
    StrictHostKeyChecking accept-new
    UserKnownHostsFile {folder}/known
"""


@pytest.fixture(name="root", scope="module")
def _root() -> Path:
    if why := hosts_error():
        pytest.skip(why)
    try:
        return unpacked("ssh", SSH)
    except NoPackagesError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("loses", [False, True], ids=["nothing", "a host"])
def test_an_agent_on_each_host_and_a_lost_one_ends_no_other(tmp_path: Path, root: Path, loses: bool) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.yaml").write_text(JOB)
    (tmp_path / "sshd.conf").write_text(CONF.format(folder=tmp_path))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text(CLIENT.format(folder=tmp_path))
    users = f"root:x:0:0::{tmp_path}/home:/bin/bash\nsshd:x:33:33::/run/sshd:/usr/sbin/nologin\n"
    (tmp_path / "passwd").write_text(users)
    with HostBed(HOSTS + 1) as bed:
        *hosts, head = bed.hosts
        for each in bed.hosts:
            each.run(*laid_over(root))
            each.run("mount", "--bind", str(tmp_path / "passwd"), "/etc/passwd")
            each.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        head.run("ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(tmp_path / "key"))
        for each in hosts:
            with (tmp_path / f"{each.name}.sshd").open("wb") as out:
                each.start(
                    "sh", "-c", f"mkdir -p /run/sshd; exec /usr/sbin/sshd -D -e -f {tmp_path}/sshd.conf", log=out
                )
        with BedEtcd(bed.hosts[HOSTS:], tmp_path) as etcd:
            names = ",".join(each.address for each in hosts)
            line = [f"{Path(sys.executable).parent}/bamboo", "launch", "ssh", "job.yaml", "--hosts", names]
            line += ["--trusted-network", "10.99.0.0/24", "--submit"]
            path = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"
            variables = [f"{name}={value}" for name, value in etcd.variables.items()]
            done = head.run("env", f"--chdir={work}", path, *variables, *line, timeout_s=60)
            assert done.returncode == 0, done.stderr
            log = work / "launch-job" / "job.log"
            if loses:
                until_s = time.monotonic() + 100
                while not re.search(r"^step [4-9]", log.read_text(), re.MULTILINE):
                    assert time.monotonic() < until_s, log.read_text()
                    time.sleep(0.1)
                hosts[1].power_off()
            until_s = time.monotonic() + 150
            while log.read_text().count("an agent has ended with") < HOSTS:
                assert time.monotonic() < until_s, log.read_text()
                time.sleep(0.1)
    told = log.read_text()
    codes = sorted(map(int, re.findall(r"an agent has ended with (\d+)", told)))
    assert codes == ([0, 0, 255] if loses else [0, 0, 0]), told
    command = [f"{Path(sys.executable).parent}/bamboo", "run", "job.yaml"]
    one = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=200, check=True)
    assert {*re.findall(r"trajectory (\w+)", told)} == {*re.findall(r"trajectory (\w+)", one.stdout)}
