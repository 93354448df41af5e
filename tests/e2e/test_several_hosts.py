"""Several hosts as processes of this machine: real agents, real streams with TLS, a real etcd, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.codec.records import decoded
from engine.core.errors import ExitCode
from engine.core.history.evidence import unlinked
from engine.core.history.run_records import ActionRecord, AuditRecord, CommitRecord
from engine.core.history.step_files import FOLDER
from engine.core.hosts.ends import USUAL_S
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.files.host_folders import collect, folders_of
from engine.files.run_folder import RunFolder
from engine.runtime.agent.run_state import Ending
from tests.e2e.conftest import Train
from tests.e2e.host_bed import HostBed, kept_etcd, settings, trajectory_of
from tests.e2e.launcher import ROOT, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
MLP = Job(model="mlp", stages=4, steps=40, microbatches=2)
STREAM = replace(MLP, data="tests.e2e.stream_models:Vectors", validate_every=0)
GPT = Job(model="gpt", stages=4, steps=8)
GPT_TWICE = Job(model="gpt", stages=2, steps=6, pipelines=2)
RESNET = Job(model="resnet18", stages=3, steps=4, microbatches=2)
Hosts = Callable[..., HostBed]


@pytest.fixture(name="hosts")
def _hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Returns a function that starts the agents of a run on some hosts; `names` are the fields of the job."""
    beds: list[HostBed] = []
    with kept_etcd(tmp_path) as etcd:

        def start(job: Job, names: str, number: int = 3, more: Sequence[str] = ()) -> HostBed:
            arguments = [*settings(job, *names.split()), *more]
            beds.append(HostBed(tmp_path / f"run{len(beds)}", etcd, number, arguments))
            return beds[-1]

        yield start
        for each in beds:
            each.close()


def rows_of(ending: Ending) -> list[object]:
    return [row.texts() for row in ending.view.run_state.rows]


def failovers(bed: HostBed) -> list[list[int]]:
    """Returns for each epoch that no boundary began the workers that are out; the first epoch has none."""
    return [[out[0] for out in each["verdict"]] for each in bed.chief.events("epoch") if not each["planned"]]


def workers_of(agent: Launcher) -> dict[int, int]:
    """Returns the workers of one host, and their pids."""
    found = agent.processes().items()
    return {int(number): pid for name, pid in found if (number := name.removeprefix("bamboo-")).isdecimal()}


def hashes_in(folder: Path) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Returns the worker, the step, the pipeline and the layers of all hashes that a host has recorded."""
    lines = [line for each in sorted((folder / FOLDER).glob("*.jsonl")) for line in each.read_text().splitlines()]
    found = [decoded(unlinked(line)[0]) for line in lines]
    return [
        (each.of, each.step, each.pipeline, tuple(row[0] for row in each.rows))
        for each in found
        if isinstance(each, AuditRecord)
    ]


def test_the_loss_of_an_agent_is_one_epoch_and_changes_no_bit(hosts: Hosts, train: Train) -> None:
    bed = hosts(MLP, "model stages steps microbatches")
    bed.until_commits(3)
    lost, agent = next(iter(bed.others.items()))
    workers = workers_of(agent)
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    assert ends.pop(lost).code == -signal.SIGKILL
    assert {each.code for each in ends.values()} == {0}, ends
    assert failovers(bed) == [[], sorted(workers)]
    assert bed.trajectory() == rows_of(train(MLP))
    assert agent.leftovers() == []
    chief = bed.chief  # its disk has the records of all hosts
    hosts_told = {each["node"]: each for each in collect(folders_of(chief.folder / "results", "latest", ()))["hosts"]}
    assert {*hosts_told} == {*bed.agents}
    assert [name for name, each in hosts_told.items() if each["incomplete"]] == [lost]
    assert max(each["within_ms"] for each in hosts_told.values()) < 1000
    merged = read_history(chief.run_folder / "collected" / "events.jsonl", every_action=True)
    assert len(merged.of(CommitRecord)) == MLP.steps
    # The lost host may have shipped nothing yet: all that it has lost is of its last half second.
    assert {each.worker for each in merged.of(ActionRecord)} | {*workers} == {*range(MLP.stages)}
    hashes, *others = (hashes_in(each.path) for each in bed.folders)
    assert len(hashes) == len({*hashes}) and {step for _, step, *_ in hashes} == {*range(MLP.steps)}
    for name, own in zip(bed.others, others, strict=True):  # each host has those of its workers, whoever coordinates
        last = max(step for _, step, *_ in own)
        shipped = {each for each in own if each in hashes or name != lost or each[1] != last}
        assert shipped < {*hashes} and len({worker for worker, *_ in own}) <= 2
    assert sorted(hashes_in(bed.folders[0].path / "collected")) == sorted(hashes)
    words = ["status", "--wait", bed.run_id, "--etcd", bed.etcd, "--json"]  # the outcome stays for an hour
    told = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert told == {"run": bed.run_id, "outcome": "finished", "exit_code": 0}


@pytest.mark.soak
def test_a_stream_goes_on_when_its_workers_and_a_host_are_lost(hosts: Hosts, train: Train) -> None:
    bed = hosts(STREAM, "model data validate_every stages steps microbatches", more=("--kill", "2:0"))
    bed.until_commits(4)
    lost, agent = next(iter(bed.others.items()))
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    assert ends.pop(lost).code == -signal.SIGKILL
    assert {each.code for each in ends.values()} == {0}, ends
    assert [0] in failovers(bed) and len(failovers(bed)) == 3
    assert bed.trajectory() == rows_of(train(STREAM))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("job", "number"),
    [(GPT, 2), (GPT, 3), (GPT_TWICE, 3), (RESNET, 3)],
    ids=["gpt-2", "gpt-3", "gpt-twice-3", "resnet18-3"],
)
def test_the_bits_are_those_of_one_host(hosts: Hosts, train: Train, job: Job, number: int) -> None:
    bed = hosts(job, "model stages steps pipelines microbatches", number)
    assert {each.code for each in bed.ends().values()} == {0}
    assert failovers(bed) == [[]]
    assert bed.trajectory() == rows_of(train(job))


@pytest.mark.soak
def test_the_last_host_that_is_left_is_named(hosts: Hosts) -> None:
    bed = hosts(MLP, "model stages steps microbatches", 2)
    bed.until_commits(3)
    assert bed.chief.events("deadly") == [], "each host may be lost"
    ((lost, agent),) = bed.others.items()
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    del ends[lost]
    ((left, end),) = ends.items()
    text = f"the run cannot survive the loss of host {left}: no other host holds stages 0, 1, 2, 3"
    assert [(each["hosts"], each["text"]) for each in bed.chief.events("deadly")] == [([left], text)]
    assert end.code == 0 and text in end.stdout + end.stderr
    for command in ("status", "report"):
        told = CliRunner().invoke(app, [command, str(bed.chief.run_folder)], catch_exceptions=False)
        assert text in " ".join(told.stdout.split()), told.output


@pytest.mark.soak
def test_a_worker_that_waits_takes_the_place_of_those_of_a_lost_host(hosts: Hosts, train: Train) -> None:
    job = replace(MLP, standby=1)
    bed = hosts(job, "model stages steps microbatches standby")
    bed.until_commits(3)
    bed.chief.wait_until(lambda: bed.chief.events("waiting"))
    lost, agent = next((name, each) for name, each in bed.others.items() if 4 not in workers_of(each))
    workers = workers_of(agent)
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    del ends[lost]
    assert {each.code for each in ends.values()} == {0}, ends
    assert failovers(bed) == [[], sorted(workers)]
    assert any(4 in each["members"] for each in bed.chief.events("epoch"))
    assert bed.trajectory() == rows_of(train(MLP))


@pytest.mark.soak
def test_all_workers_begin_again_when_one_dies_before_training(hosts: Hosts, train: Train) -> None:
    bed = hosts(MLP, "model stages steps microbatches", 2)
    started = bed.until_started()
    agent = next(each for each in bed.agents.values() if each is not started)
    bed.until(lambda: workers_of(agent))
    os.kill(min(workers_of(agent).values()), signal.SIGKILL)
    assert {each.code for each in bed.ends().values()} == {0}
    assert len(bed.chief.events("started")) == 2 * MLP.stages
    assert bed.trajectory() == rows_of(train(MLP))


@pytest.mark.soak
@pytest.mark.parametrize("coordinates", [False, True], ids=["another one", "the one that coordinates"])
def test_a_host_is_lost_before_training_and_all_workers_begin_again(
    hosts: Hosts, train: Train, coordinates: bool
) -> None:
    bed = hosts(MLP, "model stages steps microbatches")
    started = bed.until_started()
    lost, agent = next((name, each) for name, each in bed.agents.items() if (each is started) is coordinates)
    bed.until(lambda: workers_of(agent))
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    assert ends.pop(lost).code == -signal.SIGKILL
    assert {each.code for each in ends.values()} == {0}, ends
    (chief,) = (each for name, each in bed.agents.items() if name != lost and each.events("commit"))
    assert [each["verdict"] for each in chief.events("epoch")] == [[]]
    last = {each["of"]: each["node"] for each in chief.events("started")}
    assert lost not in last.values() and len({*last.values()}) == 2
    assert trajectory_of(chief) == rows_of(train(MLP))


@pytest.mark.soak
def test_hosts_without_room_for_the_workers_of_a_lost_one_say_so(hosts: Hosts) -> None:
    bed = hosts(MLP, "model stages steps microbatches", 2, more=("--workers", "2"))
    started = bed.until_started()
    lost, agent = next((name, each) for name, each in bed.agents.items() if each is not started)
    bed.until(lambda: workers_of(agent))
    os.kill(agent.process.pid, signal.SIGKILL)
    ends = bed.ends()
    del ends[lost]
    assert {each.code for each in ends.values()} == {ExitCode.NOT_RECOVERED}, ends
    assert f"host {lost} is lost" in "".join(each.stderr for each in ends.values())


@pytest.mark.soak
def test_a_worker_of_another_host_is_killed(hosts: Hosts, train: Train) -> None:
    bed = hosts(GPT, "model stages steps", 2)
    bed.until_commits(2)
    (agent,) = bed.others.values()
    victim, pid = max(workers_of(agent).items())
    os.kill(pid, signal.SIGKILL)
    assert {each.code for each in bed.ends().values()} == {0}
    assert failovers(bed) == [[], [victim]]
    assert [each["code"] for each in bed.chief.events("exit") if each["of"] == victim] == [-signal.SIGKILL]
    assert bed.trajectory() == rows_of(train(GPT))


@pytest.mark.soak
def test_a_sigterm_to_an_agent_is_a_notice_for_its_workers(hosts: Hosts, train: Train) -> None:
    bed = hosts(MLP, "model stages steps microbatches", 2)
    bed.until_commits(3)
    (agent,) = bed.others.values()
    workers = workers_of(agent)
    agent.interrupt(signal.SIGTERM)
    assert {each.code for each in bed.ends().values()} == {0}
    assert failovers(bed) == [[]]
    assert {each["of"] for each in bed.chief.events("notice")} == {*workers}
    assert bed.trajectory() == rows_of(train(MLP))


@pytest.mark.soak
def test_a_silent_host_is_lost_and_ends_when_it_comes_back(hosts: Hosts, train: Train) -> None:
    bed = hosts(MLP, "model stages steps microbatches")
    bed.until_commits(3)
    lost, agent = next(iter(bed.others.items()))
    workers = workers_of(agent)
    os.kill(agent.process.pid, signal.SIGSTOP)
    bed.chief.wait_until(lambda: len(failovers(bed)) == 2)
    os.kill(agent.process.pid, signal.SIGCONT)
    ends = bed.ends()
    assert ends.pop(lost).code == ExitCode.FENCED
    assert {each.code for each in ends.values()} == {0}, ends
    assert failovers(bed) == [[], sorted(workers)]
    assert bed.trajectory() == rows_of(train(MLP))
    assert agent.leftovers() == []


@pytest.mark.soak
def test_an_interrupted_run_ends_all_agents_with_one_code(hosts: Hosts) -> None:
    bed = hosts(replace(MLP, steps=2000), "model stages steps microbatches")
    bed.until_commits(3)
    command = [sys.executable, "-m", "bamboo_cli", "status", "--wait", bed.run_id, "--etcd", bed.etcd]
    with subprocess.Popen(command) as waiting:
        time.sleep(1.0)
        bed.chief.interrupt(signal.SIGINT)
        assert waiting.wait(60) == ExitCode.INTERRUPTED
    assert {each.code for each in bed.ends().values()} == {ExitCode.INTERRUPTED}


@pytest.mark.soak
def test_a_sigterm_to_the_agent_that_coordinates_hands_over_workers_and_role(hosts: Hosts, train: Train) -> None:
    bed = hosts(MLP, "model stages steps microbatches")
    bed.until_commits(3)
    agent, others = bed.chief, bed.others
    agent.interrupt(signal.SIGTERM)
    assert {each.code for each in bed.ends().values()} == {0}
    (heir,) = (each for each in others.values() if each.events("commit"))
    assert [each["verdict"] for each in heir.events("epoch")] == [[]]
    assert trajectory_of(heir) == rows_of(train(MLP))


@pytest.mark.soak
def test_a_notice_to_all_hosts_ends_the_run_with_its_last_commit_and_one_code(hosts: Hosts) -> None:
    bed = hosts(replace(MLP, steps=2000), "model stages steps microbatches")
    bed.until_commits(3)
    for each in bed.agents.values():
        each.interrupt(signal.SIGTERM)
    ends = bed.ends()
    assert {each.code for each in ends.values()} == {ExitCode.TERMINATED}, ends
    assert [each["outcome"] for each in bed.chief.events("ended")] == ["interrupted"]


@pytest.mark.parametrize("job", [MLP, pytest.param(GPT_TWICE, marks=pytest.mark.soak)], ids=["mlp", "gpt-twice"])
def test_another_host_goes_on_when_the_one_that_coordinates_is_killed(hosts: Hosts, train: Train, job: Job) -> None:
    bed = hosts(job, "model stages steps pipelines microbatches")
    bed.until_commits(3)
    lost, agent = next((name, each) for name, each in bed.agents.items() if each is bed.chief)
    workers, others = workers_of(agent), {**bed.others}
    before = {name: workers_of(each) for name, each in others.items()}
    os.kill(agent.process.pid, signal.SIGKILL)
    bed.until(lambda: any(each.events("commit") for each in others.values()), lost=agent)
    assert {name: workers_of(each) for name, each in others.items()} == before  # the same processes go on
    ends = bed.ends()
    assert ends.pop(lost).code == -signal.SIGKILL
    assert {each.code for each in ends.values()} == {0}, ends
    (heir,) = (each for each in others.values() if each.events("commit"))
    epochs = heir.events("epoch")
    assert [sorted(out[0] for out in each["verdict"]) for each in epochs] == [sorted(workers)]
    assert trajectory_of(heir) == rows_of(train(job))
    assert agent.leftovers() == []
    folder = RunFolder(heir.run_folder.resolve())
    steps = [*range(job.steps)]
    assert [each.step for each in read_history(folder.events).records if isinstance(each, CommitRecord)] == steps
    told = collect(folders_of(heir.folder / "results", "latest", ()))["hosts"]  # its disk has the records of all hosts
    assert [each["node"] for each in told if each["incomplete"]] == [lost]
    merged = read_history(folder.path / "collected" / "events.jsonl", every_action=True)
    assert [each.step for each in merged.of(CommitRecord)] == steps
    assert {each.worker for each in merged.of(ActionRecord)} | {*workers} == {*range(job.stages * job.pipelines)}


@pytest.mark.soak
def test_another_host_goes_on_when_the_one_that_coordinates_is_silent(hosts: Hosts, train: Train) -> None:
    """Nothing proves its end before its lease is over; when it comes back, it is out."""
    bed = hosts(MLP, "model stages steps microbatches")
    bed.until_commits(3)
    agent, others = bed.chief, bed.others
    workers, began_s = workers_of(agent), time.monotonic()
    os.kill(agent.process.pid, signal.SIGSTOP)
    bed.until(lambda: any(each.events("commit") for each in others.values()), lost=agent)
    assert USUAL_S - 2 < time.monotonic() - began_s < USUAL_S + 2
    os.kill(agent.process.pid, signal.SIGCONT)
    assert agent.wait().code == ExitCode.FENCED
    assert {each.wait().code for each in others.values()} == {0}
    (heir,) = (each for each in others.values() if each.events("commit"))
    assert [sorted(out[0] for out in each["verdict"]) for each in heir.events("epoch")] == [sorted(workers)]
    assert trajectory_of(heir) == rows_of(train(MLP))
    assert agent.leftovers() == []


@pytest.mark.soak
def test_two_hosts_that_coordinate_are_lost_one_after_the_other(hosts: Hosts, train: Train) -> None:
    job = replace(MLP, steps=80)
    bed = hosts(job, "model stages steps microbatches")
    bed.until_commits(3)
    first, others = bed.chief, bed.others
    os.kill(first.process.pid, signal.SIGKILL)
    bed.until(lambda: any(len(each.events("commit")) > 4 for each in others.values()), lost=first)
    second = next(each for each in others.values() if each.events("commit"))
    os.kill(second.process.pid, signal.SIGKILL)
    (last,) = (each for each in others.values() if each is not second)
    assert last.wait().code == 0
    assert trajectory_of(last) == rows_of(train(job))


@pytest.mark.soak
def test_hosts_listen_on_their_addresses_only(hosts: Hosts) -> None:
    bed = hosts(MLP, "model stages steps microbatches")
    bed.until_commits(3)
    for number, agent in enumerate(bed.agents.values(), 1):
        found = {each.address.removeprefix("::ffff:") for each in agent.listeners()}
        assert found == {f"127.0.0.{number}"}
    bed.ends()


@pytest.mark.soak
def test_hosts_that_cannot_renew_their_leases_have_ended_before_these_expire(tmp_path: Path) -> None:
    with kept_etcd(tmp_path) as etcd:
        bed = HostBed(tmp_path / "run", etcd, 3, settings(MLP, "model", "stages", "microbatches"))
        bed.until_commits(3)
    began_s = time.monotonic()  # etcd was killed
    ends = bed.ends()
    assert {each.code for each in ends.values()} <= {ExitCode.FENCED, ExitCode.COORDINATOR_UNAVAILABLE}, ends
    assert ExitCode.FENCED in {each.code for each in ends.values()}
    assert time.monotonic() - began_s < USUAL_S
    assert [each.leftovers() for each in bed.agents.values()] == [[], [], []]


@pytest.mark.soak
def test_a_worker_joins_where_the_fewest_are_through_the_host_that_coordinates(hosts: Hosts, train: Train) -> None:
    job = replace(MLP, steps=300, elastic=True)
    bed = hosts(job, "model stages steps microbatches elastic")
    bed.until_commits(3)
    refused = join(bed.others.popitem()[1])
    assert refused.returncode == ExitCode.USAGE
    assert "the host that coordinates" in refused.stderr
    done = join(bed.chief)
    assert done.returncode == 0, done.stderr
    assert {each.code for each in bed.ends().values()} == {0}
    nodes = {each["of"]: each["node"] for each in bed.chief.events("started")}
    members = {worker: [node for each, node in nodes.items() if each < 4].count(nodes[worker]) for worker in nodes}
    assert members[4] == min(members.values())
    assert any(4 in each["members"] for each in bed.chief.events("epoch"))
    assert bed.trajectory() == rows_of(train(replace(MLP, steps=300)))


def join(agent: Launcher) -> subprocess.CompletedProcess[str]:
    """Adds a worker to the run of an agent, and follows it."""
    folder = agent.run_folder.resolve()
    command = [sys.executable, "-m", "bamboo_cli", "agent", "--join", folder.name, "--results", str(folder.parent)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
