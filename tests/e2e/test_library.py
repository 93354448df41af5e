"""Every scenario of the library keeps what it promises, under its bare name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.core.faults.fault import ANY_HOSTS
from engine.files.jobs.library import scenario_names
from engine.files.jobs.scenario_file import load_scenario
from engine.harness.case import case_of_file
from engine.harness.case_runner import run_case
from engine.harness.leak_check import mark_processes
from engine.harness.screen import lines_only
from engine.runtime.faults.registry import kinds
from engine.runtime.process.fork_client import ForkServer
from tests.soaked import soaked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]


@dataclass(frozen=True, slots=True)
class House:
    """The state that all scenarios share: one twin for all with the same job, and one import of torch."""

    results: Path
    server: ForkServer


@pytest.fixture(name="house", scope="module")
def _house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    results: Path = tmp_path_factory.mktemp("results")
    mark_processes()
    with ForkServer() as server:
        yield House(results, server)


def strikes_hosts(name: str) -> bool:
    """Says whether a scenario of the library strikes hosts."""
    return any(kinds()[each.do].by == "bed" for each in load_scenario(name, kinds(), on=ANY_HOSTS).faults)


# Those of hosts by name: each process of the tests would read all files for their faults. A test below compares.
OF_HOSTS = """
coordinator-loss coordinator-power-loss etcd-leader-loss host-agent-killed host-cut-off host-loss host-worker-killed
several-hosts slow-network slow-network-cut-off slow-network-host-loss two-hosts-at-once
""".split()
ON_ONE_HOST = [name for name in scenario_names() if name not in OF_HOSTS]
# The soak has them: the same fault in the same job, at another action or in another shape, is in the file behind each.
ELSEWHERE = {
    "adjacent-pair-two-pipelines": "test_real_kills.py",  # two pipelines with each redundancy
    "crash-by-exception": "test_faults.py",
    "exit-zero-too-early": "test_faults.py",
    "kill-first-stage": "test_real_kills.py",  # each kind of action at the first, a middle and the last stage
    "kill-last-stage": "test_real_kills.py",
    "last-worker-standing": "test_real_kills.py",
    "out-of-memory": "test_faults.py",
    "slow-worker": "test_faults.py",
    "stop-harmless-pause": "test_faults.py",
}


def test_each_scenario_that_strikes_hosts_is_known() -> None:
    assert [name for name in scenario_names() if strikes_hosts(name)] == OF_HOSTS


# tests/e2e/test_inject_hosts.py has the others
@pytest.mark.parametrize("name", [soaked(name) if name in ELSEWHERE else name for name in ON_ONE_HOST])
def test_a_scenario_passes(house: House, name: str) -> None:
    # The check of pure forwards takes as long as such a run, before any of it; the commands of other files have it.
    loaded = load_scenario(name, kinds(), settings=[f"results={house.results}", "check_pure=false"])
    case = run_case(case_of_file(loaded), None, lines_only(print), house.server)
    assert [each for each in case.checks if each.result != "passed"] == []
    assert case.exit_code == 0
