"""Faults of etcd under a running job: short ones cost nothing, long ones end it cleanly, strangers get no access."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import InvariantError
from engine.core.job.job import Job
from engine.runtime.agent.session import run_session
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import DEADLINE_S, EndpointClient, rpc
from engine.runtime.store.etcd_settings import SOCKET, Endpoint, EtcdSettings
from tests.e2e.launcher import Done, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Launch = Callable[..., Launcher]

STEPS = 40
# A step takes some 20 ms, so that faults of etcd fall into the training.
ARGUMENTS: dict[str, Any] = {"forward_ms": 2, "backward_ms": 4}
JOB = ("run", "--json", "--model", "timed", "--stages", "2", "--microbatches", "2", "--validate-every", "0")
RUN = (
    *JOB,
    "--no-check-pure",
    "--steps",
    str(STEPS),
    *(f"--set=model_args.{name}={value}" for name, value in ARGUMENTS.items()),
)
ENDLESS = (*RUN, "--steps", "100000")
SMALL = Job(model="mlp", stages=2, steps=2, validate_every=0)
PASSWORD = "correct horse"  # noqa: S105 made up
BESIDE = {b"/bamboo": b"1", b"/bamboo/": b"2", b"/bamboo0": b"3", b"/bamboo/other/state": b"4", b"zoo": b"5"}


class Kept:
    """An etcd that outlives the runs, with keys of other programs."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = Endpoint(*free.getsockname())
        url = f"http://{endpoint}"
        # The port lasts through a restart.
        self.server = EmbeddedEtcd(folder, (f"--listen-client-urls=unix://{SOCKET},{url}",))
        self.server.start()
        self.server.settings()
        self.settings = EtcdSettings((endpoint,))
        self.option = f"--etcd={endpoint}"
        self.bare = EndpointClient(endpoint, timeout=5)
        for key, value in BESIDE.items():
            self.bare.put(key, value)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.server.pidfd, number)

    def keys(self) -> dict[bytes, bytes]:
        """Returns all keys and values."""
        return {meta.key: value for value, meta in self.bare.get_all()}

    def close(self) -> None:
        self.bare.close()
        self.signal(signal.SIGCONT)
        self.server.stop()


@pytest.fixture(name="keep_etcd")
def _keep_etcd(tmp_path: Path) -> Iterator[Callable[[], Kept]]:
    """Returns a function that starts one more etcd."""
    started: list[Kept] = []

    def keep() -> Kept:
        started.append(Kept(tmp_path / f"etcd-{len(started)}"))
        return started[-1]

    yield keep
    for each in started:
        each.close()


@pytest.fixture(name="kept")
def _kept(keep_etcd: Callable[[], Kept]) -> Kept:
    return keep_etcd()


def after_commits(launcher: Launcher, count: int) -> Launcher:
    """Waits until a run has committed some steps."""
    launcher.wait_until(lambda: len(launcher.events("commit")) >= count)
    return launcher


def result(launcher: Launcher, num_steps: int = STEPS) -> dict[str, Any]:
    """Returns the result of a run that finished."""
    done = launcher.wait()
    assert done.code == 0, done
    assert launcher.leftovers() == []
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["steps"] == num_steps
    return said


def prefix_of(launcher: Launcher) -> str:
    """Returns the prefix of a run's keys."""
    (store,) = launcher.events("store")
    return f"/bamboo/{store['run_id']}/"


def check_stopped(launcher: Launcher, done: Done) -> None:
    """Checks that a run ended because it lost its coordinator, at the step that it names."""
    assert done.code == 69, done
    last = launcher.events("commit")[-1]["step"]
    assert f"; last committed step {last}\n" in done.stderr
    assert json.loads(done.stdout)["steps"] == last + 1
    assert "Traceback" not in done.stderr
    assert launcher.leftovers() == []


def test_a_short_outage_changes_nothing(launch: Launch, kept: Kept) -> None:
    """Compares a run without faults, one with its private etcd killed twice, and one with its kept etcd away."""
    plain, private, outer = launch(*RUN), launch(*RUN), launch(*RUN, kept.option)
    after_commits(outer, 3)
    kept.signal(signal.SIGKILL)
    for num_commits in (12, 24):
        after_commits(private, num_commits)
        (etcd,) = [pid for name, pid in private.processes().items() if name.startswith("etcd-")]
        os.kill(etcd, signal.SIGKILL)
    num_commits = len(outer.events("commit"))
    time.sleep(0.5)
    assert len(outer.events("commit")) == num_commits < STEPS
    kept.server.start()
    kept.server.settings()
    assert result(private)["trajectory"] == result(outer)["trajectory"] == result(plain)["trajectory"]
    assert len(private.events("store_ended")) == 2
    assert kept.keys() == BESIDE


def test_a_long_outage_ends_the_run_in_time(launch: Launch, keep_etcd: Callable[[], Kept]) -> None:
    """One etcd is killed, and its run waits for the deadline; one is stopped, and a Ctrl-C to its run does not wait."""
    stores = [keep_etcd() for _ in range(2)]
    launchers = [after_commits(launch(*ENDLESS, store.option), 3) for store in stores]
    stores[0].signal(signal.SIGKILL)
    stores[1].signal(signal.SIGSTOP)
    since_s = time.monotonic()
    time.sleep(1)
    launchers[1].process.send_signal(signal.SIGINT)
    interrupted = launchers[1].wait(DEADLINE_S - 3)
    assert interrupted.code == 130, interrupted
    assert json.loads(interrupted.stdout)["steps"] == len(launchers[1].events("commit"))
    assert launchers[1].leftovers() == []
    check_stopped(launchers[0], launchers[0].wait(DEADLINE_S + 3))
    assert "does not answer" in (launchers[0].folder / "stderr").read_text()
    assert DEADLINE_S - 1 < time.monotonic() - since_s < DEADLINE_S + 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("state", "another client has written the key 'state'"),
        ("coordinator", "the key 'coordinator' now names 'somebody'"),
    ],
)
def test_who_has_been_replaced_writes_no_more(launch: Launch, kept: Kept, key: str, message: str) -> None:
    launcher = after_commits(launch(*ENDLESS, kept.option), 3)
    theirs = f"{prefix_of(launcher)}{key}"
    kept.bare.put(theirs, b"somebody")
    since = kept.bare.get(theirs)[1].mod_revision
    done = launcher.wait(10)
    check_stopped(launcher, done)
    assert message in done.stderr
    assert kept.bare.get(theirs)[0] == b"somebody"
    for deciding in ("state", "epoch", "commit", "status", "verdicts"):
        assert kept.bare.get(f"{prefix_of(launcher)}{deciding}")[1].mod_revision <= since
    assert BESIDE.items() <= kept.keys().items()


def test_the_loss_of_all_keys_ends_the_run(launch: Launch, kept: Kept) -> None:
    launcher = after_commits(launch(*ENDLESS, kept.option), 3)
    kept.bare.delete_prefix(prefix_of(launcher))
    done = launcher.wait(10)
    check_stopped(launcher, done)
    assert "the key 'coordinator' is gone" in done.stderr


def test_garbage_where_a_run_begins_is_named_and_left_alone(kept: Kept, tmp_path: Path) -> None:
    garbage = b"/bamboo/mine/state"
    kept.bare.put(garbage, b"\xff\x00")
    with pytest.raises(InvariantError, match="the key 'state' of this run is not of a coordinator"):
        run_session(SMALL, tmp_path / "events.jsonl", tmp_path, run_id="mine", etcd=kept.settings)
    assert {**BESIDE, garbage: b"\xff\x00"}.items() <= kept.keys().items()


def test_garbage_that_nobody_reads_goes_with_the_run(launch: Launch, kept: Kept) -> None:
    launcher = after_commits(launch(*RUN, kept.option, "--steps=15"), 3)
    for key in (b"members/0", b"members/99", b"heartbeats", b"plan", b"\xff"):
        kept.bare.put(prefix_of(launcher).encode() + key, b"\xff garbage")
    result(launcher, 15)
    assert kept.keys() == BESIDE


def test_a_password_is_shown_to_nobody(launch: Launch, kept: Kept) -> None:
    auth = rpc.AuthStub(kept.bare.channel)
    auth.UserAdd(rpc.AuthUserAddRequest(name="root", password=PASSWORD))
    auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
    auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
    auth.AuthEnable(rpc.AuthEnableRequest())
    right = launch(*RUN, kept.option, "--steps=2", BAMBOO_ETCD_USER="root", BAMBOO_ETCD_PASSWORD=PASSWORD)
    wrong = launch(*RUN, kept.option, BAMBOO_ETCD_USER="root", BAMBOO_ETCD_PASSWORD=PASSWORD * 2)
    result(right, 2)
    done = wrong.wait()
    assert (done.code, wrong.leftovers()) == (69, [])
    assert "refused" in done.stderr
    files = [each for launcher in (right, wrong) for each in launcher.folder.rglob("*") if each.is_file()]
    assert len(files) > 10
    assert [each for each in files if PASSWORD.encode() in each.read_bytes()] == []
