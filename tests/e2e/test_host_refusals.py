"""What hosts refuse, as a user sees it: real agents and a real etcd; each mistake with its exit code and its words."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.host_bed import kept_etcd
from tests.e2e.launcher import Done, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(120)]
SMALL = ("--set", "model=mlp", "--set", "stages=2", "--set", "microbatches=2", "--set", "steps=400")


class Agents:
    """Agents of this machine at one etcd, each with the address of its number."""

    def __init__(self, folder: Path, etcd: str):
        self._folder, self._etcd = folder, etcd
        self.started: list[Launcher] = []

    def start(self, number: int, node: str, *arguments: str) -> Launcher:
        place = ["--etcd", self._etcd, "--address", f"127.0.0.{number}", "--node", node]
        folder = self._folder / f"agent{len(self.started)}"
        self.started.append(Launcher(folder, ["agent", "--run", "r", *place, *arguments], {}))
        return self.started[-1]

    def end(self, number: int, node: str, *arguments: str) -> Done:
        return self.start(number, node, *arguments).wait()


@pytest.fixture(name="agents")
def _agents(tmp_path: Path) -> Iterator[Agents]:
    with kept_etcd(tmp_path) as etcd:
        made = Agents(tmp_path, etcd)
        yield made
        for each in made.started:
            each.kill_all()


def test_hosts_that_do_not_come_are_named(agents: Agents) -> None:
    done = agents.end(1, "a", "--hosts", "a,b,c", "--hosts-within", "1", "--set", "stages=3")
    assert done.code == 4
    assert "1 of 3 hosts registered within 1 s: a; missing: b, c" in done.stderr


@pytest.mark.parametrize(
    ("own", "of_b", "told"),
    [
        (("--set", "seed=1"), ("--set", "seed=2"), "seed: 1 on host a, 2 on host b"),
        ((), ("--isa", "portable"), "kernel_variables: None on host a, ['ATEN_CPU_CAPABILITY=default', "),
    ],
    ids=["job", "arithmetic"],
)
def test_hosts_that_are_not_equal_are_told_both_values(
    agents: Agents, own: tuple[str, ...], of_b: tuple[str, ...], told: str
) -> None:
    begun = [agents.start(1, "a", "--hosts", "a,b", *SMALL, *own)]
    begun[0].wait_until(lambda: "has registered" in begun[0].stderr())
    begun.append(agents.start(2, "b", "--hosts", "a,b", *SMALL, *of_b))
    for done in [each.wait() for each in begun]:
        assert done.code == 4
        assert told in done.stderr


def test_other_numbers_of_hosts_are_told_at_once(agents: Agents) -> None:
    b = agents.start(2, "b", "--hosts", "3", *SMALL, "--set", "stages=3")
    b.wait_until(lambda: "waits for 2 more" in b.stderr())
    for done in (agents.end(1, "a", "--hosts", "2", *SMALL, "--set", "stages=3"), b.wait()):
        assert done.code == 4
        assert "--hosts: '3' on host b, '2' on host a" in done.stderr


def test_a_name_twice_is_refused_with_its_holder(agents: Agents) -> None:
    first = agents.start(1, "a", "--hosts", "2", *SMALL)
    first.wait_until(lambda: "has registered" in first.stderr())
    done = agents.end(2, "a", "--hosts", "2", *SMALL)
    assert done.code == 2
    assert "--node: expected a name that no other host of the run has, found a (it is at 127.0.0.1;" in done.stderr


def test_a_run_that_is_taken_is_told_with_its_holder_also_when_that_has_gone(agents: Agents) -> None:
    held = agents.start(1, "a", "--hosts", "1", "--lease", "3", *SMALL)
    held.wait_until(lambda: held.events("commit"), 60)
    done = agents.end(2, "b", "--hosts", "1", *SMALL)
    assert done.code == 69
    assert "the run has begun without this host: host a at 127.0.0.1:" in done.stderr
    held.process.send_signal(signal.SIGKILL)
    held.wait()
    until_gone = agents.start(2, "c", "--hosts", "1", *SMALL)
    told = until_gone.wait()
    while "has begun without this host" in told.stderr:  # until the lease has expired
        told = agents.end(2, "c", "--hosts", "1", *SMALL)
    assert told.code == 69
    assert "run r was begun before: host a at 127.0.0.1:" in told.stderr
    assert "coordinated hosts a, and is gone; choose another --run" in told.stderr
