"""What a host that has taken over still does: newcomers, notices, checkpoints; and the loss of two hosts at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.job.job import Job
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.jobs.checkpoint_choice import find_checkpoint
from tests.e2e.conftest import Train
from tests.e2e.host_bed import HostBed, kept_etcd, settings, trajectory_of
from tests.e2e.launcher import Launcher
from tests.e2e.test_several_hosts import MLP, join, rows_of, workers_of

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(240)]
Hosts = Callable[..., HostBed]


@pytest.fixture(name="hosts")
def _hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Returns a function that starts the agents of a run, and waits for its third commit."""
    beds: list[HostBed] = []
    with kept_etcd(tmp_path) as etcd:

        def start(job: Job, names: str, number: int = 3) -> HostBed:
            beds.append(HostBed(tmp_path / "run", etcd, number, settings(job, *names.split())))
            beds[-1].until_commits(3)
            return beds[-1]

        yield start
        for each in beds:
            each.close()


def kill(*agents: Launcher) -> None:
    """Kills agents at once."""
    for each in agents:
        os.kill(each.process.pid, signal.SIGKILL)


def heir_of(bed: HostBed, *lost: Launcher, by: str = "commit") -> Launcher:
    """Waits for the agent that takes over, until it has recorded an event; returns it."""
    left = [each for each in bed.agents.values() if each not in lost]
    left[0].wait_until(lambda: any(each.events(by) for each in left))
    return next(each for each in left if each.events(by))


def verdicts(heir: Launcher) -> list[list[int]]:
    """Returns for each epoch with a verdict the workers that are out."""
    return [sorted(out[0] for out in each["verdict"]) for each in heir.events("epoch") if each["verdict"]]


def test_a_worker_that_comes_after_a_take_over_takes_the_place_of_one_that_dies(hosts: Hosts, train: Train) -> None:
    job = replace(MLP, steps=400, elastic=True)
    bed = hosts(job, "model stages steps microbatches elastic")
    first, (*others,) = bed.chief, bed.others.values()
    kill(first)
    heir = heir_of(bed, first)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, heir)
        heir.wait_until(lambda: heir.events("waiting"))
        dying, pid = next((worker, pid) for each in others for worker, pid in workers_of(each).items() if worker < 4)
        os.kill(pid, signal.SIGKILL)
        done = joining.result()
    assert done.returncode == 0, done.stderr
    assert {each.wait().code for each in others} == {0}
    epoch = next(each for each in heir.events("epoch") if [out[0] for out in each["verdict"]] == [dying])
    assert 4 in epoch["members"]
    assert epoch["epoch"] in [each["epoch"] for each in heir.events("go")]
    assert [4] not in verdicts(heir)
    assert trajectory_of(heir) == rows_of(train(replace(MLP, steps=400)))


def test_a_notice_to_the_heir_while_it_takes_over_hands_on_the_run(hosts: Hosts, train: Train) -> None:
    job = replace(MLP, steps=100)
    bed = hosts(job, "model stages steps microbatches")
    first, others = bed.chief, [*bed.others.values()]
    kill(first)
    others[0].wait_until(lambda: any("this host takes over" in each.stderr() for each in others))
    heir = next(each for each in others if "this host takes over" in each.stderr())
    heir.interrupt(signal.SIGTERM)
    (last,) = (each for each in others if each is not heir)
    assert heir.wait().code == 0, heir.stderr()
    assert last.wait().code == 0, last.stderr()
    assert trajectory_of(last) == rows_of(train(job))


@pytest.mark.parametrize("takes_over", [False, True], ids=["serves", "takes over"])
def test_a_second_sigterm_kills_the_workers_of_that_host(hosts: Hosts, train: Train, takes_over: bool) -> None:
    """Its workers stand still, so no notice reaches them; the run continues without them."""
    job = replace(MLP, steps=200)
    bed = hosts(job, "model stages steps microbatches")
    first = bed.chief
    agent = next(iter(bed.others.values()))
    if takes_over:
        kill(first)
        agent = heir_of(bed, first)
        agent.wait_until(lambda: len(agent.events("commit")) > 8)  # there are copies of all stages again
    workers = workers_of(agent)
    for pid in workers.values():
        os.kill(pid, signal.SIGSTOP)
    agent.interrupt(signal.SIGTERM)
    time.sleep(0.5)
    agent.interrupt(signal.SIGTERM)
    assert agent.wait(20).code == 0, agent.stderr()
    left = [each for each in bed.agents.values() if each not in (agent, *([first] if takes_over else []))]
    assert {each.wait().code for each in left} == {0}
    (last,) = (each for each in left if (each.run_folder / "trajectory.csv").exists())
    assert trajectory_of(last) == rows_of(train(job))
    assert agent.leftovers() == []


def test_checkpoints_go_on_under_the_name_of_the_run(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    job = replace(MLP, steps=60, checkpoint_every="2", checkpoints=str(place), keep=3)
    bed = hosts(job, "model stages steps microbatches checkpoint_every checkpoints keep")
    first = bed.chief
    first.wait_until(lambda: first.events("kept"))
    kill(first)
    heir = heir_of(bed, first)
    assert {each.wait().code for each in bed.agents.values() if each is not first} == {0}
    name, folder = first.run_folder.resolve().name, checkpoints_at(place)
    found = [folder.verify(each) for each in folder.names()]
    assert {each.run for each in found} == {name}
    assert len(found) == job.keep  # the next host removes the old ones too
    newest = max(each.step for each in found)
    for agent in (first, heir):
        for text in ("latest", agent.run_folder.resolve().name):
            assert find_checkpoint(text, agent.folder / "results", print).origin.step == newest
    assert folder.orphans() == ()


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (Job(model="mlp", stages=2, pipelines=2, steps=40, microbatches=2), ""),
        (replace(MLP, redundancy_level=2), "redundancy_level"),
    ],
    ids=["two pipelines", "two shadows"],
)
def test_two_of_four_hosts_are_lost_at_once_one_of_them_the_one_that_coordinates(
    hosts: Hosts, train: Train, job: Job, names: str
) -> None:
    bed = hosts(job, f"model stages pipelines steps microbatches {names}", 4)
    first = bed.chief
    held = {agent: sorted(workers_of(agent)) for agent in bed.agents.values()}
    (own,) = held[first]
    second = next(
        agent for agent, (worker,) in held.items() if worker == own ^ 1
    )  # of the same pipeline, if there are two
    kill(first, second)
    heir = heir_of(bed, first, second)
    assert {each.wait().code for each in bed.agents.values() if each not in (first, second)} == {0}
    found = verdicts(heir)
    assert len(found) <= 2
    assert sorted(each for verdict in found for each in verdict) == sorted((*held[first], *held[second]))
    assert trajectory_of(heir) == rows_of(train(job))
