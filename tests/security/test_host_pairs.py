"""Another user of the host can neither take the place of a worker's peer nor stand between two workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import FileStore, Store

from engine.core.errors import TransferFailedError
from engine.core.pair_proof import claim_of, indirect, proof, unclaimed
from engine.runtime.doctor.host_checks import judge_pairs
from engine.runtime.process.network_namespace import inside, new_network
from engine.runtime.process.sockets import descriptors_by_inode
from engine.runtime.transport import pair_guard
from engine.runtime.transport.pair_guard import PairGuard
from tests.runtime.peers import Peer, PeerServer, peer_server

STRANGER = Path(__file__).with_name("stranger.py")
KEY = "ab" * 32
HOLD_S = 0.5  # between listening and connecting
TIMEOUT_S = 20.0
BETWEEN = "is not at the other end of a connection"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


class Altered(Store):
    """A store in which a stranger has put its own port in place of every worker's, in the first attempt."""

    def __init__(self, of: Store, port: int):
        super().__init__()
        self._of, self._port = of, port

    def set(self, key: str, value: Any) -> None:
        self._of.set(key, value)

    def wait(self, keys: Any, timeout: timedelta) -> None:  # type: ignore[override]
        self._of.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        value = bytes(self._of.get(key))
        if not re.fullmatch("0/0/[01]", key):  # gloo's keys in the first attempt
            return value
        loopback = bytes((127, 0, 0, 1))
        return re.sub(
            rb"\x02\0..(?=" + re.escape(loopback) + b")", b"\2\0" + self._port.to_bytes(2), value, flags=re.DOTALL
        )


def connect_late(late_s: float) -> None:
    """Has this worker listen for a while before it connects, for the first time, as on a busy machine."""
    where: Any = pair_guard
    real, pauses_s = where.ProcessGroupGloo, iter([late_s])

    def late(*arguments: Any) -> Any:
        time.sleep(next(pauses_s, 0.0))
        return real(*arguments)

    vars(late).update(_Options=real._Options, create_device=real.create_device)
    where.ProcessGroupGloo = late


def doubt_once() -> None:
    """Has this worker doubt the first proofs that it gets, which are good."""
    real, doubts = pair_guard._prove, iter([[(1, "is doubted")]])
    pair_guard._prove = lambda *given: [*real(*given), *next(doubts, [])]


def takes_part(
    store: str, worker: int, key: str, late_s: float, relay: int, patience_s: float, connect_s: float, doubter: int
) -> dict[str, Any]:
    """Runs a worker that forms a group of two and tells the other one a number, 1 for worker 0."""
    if late_s:
        connect_late(late_s)
    if doubter == worker:
        doubt_once()
    pair_guard._PATIENCE_S, pair_guard._CONNECT_S = patience_s, connect_s
    told: list[tuple[int | None, str]] = []
    its_store: Store = FileStore(store, 2)
    guard = PairGuard(key=bytes.fromhex(key), tell=lambda peer, words: told.append((peer, words)))
    try:
        group = guard.form(Altered(its_store, relay) if relay else its_store, "group", worker, (0, 1), TIMEOUT_S)
    except TransferFailedError as error:
        return {"told": told, "error": str(error)}
    number = torch.zeros(1)
    sent, taken = (
        group.gloo.send([torch.tensor([1.0 + worker])], 1 - worker, 0),
        group.gloo.recv([number], 1 - worker, 0),
    )
    sent.wait(timedelta(seconds=TIMEOUT_S))
    taken.wait(timedelta(seconds=TIMEOUT_S))
    return {"told": told, "number": number.item(), "sockets": len(group.sockets)}


@pytest.fixture(name="peers", scope="module")
def _peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    with peer_server(tmp_path_factory.mktemp("peers")) as server:
        yield server


def is_free(port: int) -> bool:
    return port not in {each.laddr.port for each in psutil.net_connections("tcp") if each.laddr}


@contextlib.contextmanager
def stranger(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", str(STRANGER), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def start(peers: PeerServer, folder: Path, keys: tuple[str, str] = (KEY, KEY), **how: Any) -> list[Peer]:
    folder.mkdir(exist_ok=True)
    store = str(folder / "store")
    late_s: list[float] = how.get("late_s", [0.0, 0.0])
    rest = (how.get("relay", 0), how.get("patience_s", 30.0), how.get("connect_s", 5.0), how.get("doubter", -1))
    return [peers.start(takes_part, store, worker, keys[worker], late_s[worker], *rest) for worker in range(2)]


def port_of(pid: int) -> int:
    """Waits until a process listens, and returns its port."""
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        for each in psutil.Process(pid).net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                return int(each.laddr.port)
        time.sleep(0.005)
    raise AssertionError("it listens nowhere")


def take_places(port: int, process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{port}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "taken\n"


@as_root
def test_a_stranger_that_took_a_place_gets_no_tensor(peers: PeerServer, tmp_path: Path) -> None:
    """Before, uid 65534 that connected as peers 0 to 39 was taken for the late worker, and transfers timed out."""
    with stranger("take") as process:
        workers = start(peers, tmp_path, late_s=[HOLD_S, HOLD_S])
        for each in workers:
            take_places(port_of(each.child.pid), process)
        results = [each.result() for each in workers]
    assert [each["number"] for each in results] == [2.0, 1.0]
    doubts = [doubt for each in results for doubt in each["told"]]
    assert doubts and {words for _, words in doubts} <= {"gave no proof of the run's key", BETWEEN}


@as_root
def test_a_stranger_between_two_workers_is_left(peers: PeerServer, tmp_path: Path) -> None:
    """Before, a stranger whose port two workers had got in place of each other's read and changed every tensor."""
    port = next(each for each in range(78 << 8, 1 << 16, 256) if is_free(each))  # gloo lets such ports be connected to
    with stranger("relay", str(port)) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        results = [each.result() for each in start(peers, tmp_path, relay=port)]
        assert process.stdout.readline() == "between\n"
    assert [each["number"] for each in results] == [2.0, 1.0]
    assert [each["told"] for each in results] == [[[1, BETWEEN]], [[0, BETWEEN]]]


def test_a_member_that_comes_late_costs_no_attempt(peers: PeerServer, tmp_path: Path) -> None:
    """The seconds for the connections begin when all members are there; before them each waits at the store."""
    results = [each.result() for each in start(peers, tmp_path, late_s=[0.0, 1.5], connect_s=0.7)]
    assert [each["number"] for each in results] == [2.0, 1.0]
    assert [each["told"] for each in results] == [[], []]


def test_the_doubt_of_one_member_is_heard_by_the_other(peers: PeerServer, tmp_path: Path) -> None:
    """Else one of them would train in a group that the other has left."""
    results = [each.result() for each in start(peers, tmp_path, doubter=0)]
    assert [each["number"] for each in results] == [2.0, 1.0]
    assert [each["told"] for each in results] == [[[1, "is doubted"]], []]


def test_a_process_that_speaks_as_gloo_does_but_has_another_key_is_no_peer(peers: PeerServer, tmp_path: Path) -> None:
    """Before, there was no key: each process that found the rendezvous store could be a peer."""
    results = [each.result() for each in start(peers, tmp_path, ("ab" * 32, "cd" * 32), patience_s=0.1)]
    for worker, each in enumerate(results):
        assert {tuple(doubt) for doubt in each["told"]} == {(1 - worker, "gave a wrong proof of the run's key")}
        assert "no group without a doubt" in each["error"]


@pytest.mark.timeout(20)
def test_an_error_before_all_members_are_there_is_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise ValueError("no such address")

    monkeypatch.setattr(pair_guard, "_connected", fails)
    with pytest.raises(ValueError, match="no such address"):
        PairGuard(key=b"k").form(torch.distributed.HashStore(), "group", 0, (0, 1), TIMEOUT_S)


def test_a_proof_holds_for_one_pair_in_one_attempt_only() -> None:
    """Before, there was no proof; one of another pair, attempt, nonce or connection must not do."""
    key, claims = b"k", [claim_of(b"a", {("x:1", "x:2")}), claim_of(b"b", {("x:2", "x:1")})]
    good = proof(key, "epoch-1/0", 0, 1, claims)
    assert good == proof(key, "epoch-1/0", 0, 1, list(claims))
    others = [
        proof(b"l", "epoch-1/0", 0, 1, claims),
        proof(key, "epoch-1/1", 0, 1, claims),
        proof(key, "epoch-1/0", 1, 0, claims),
        proof(key, "epoch-1/0", 0, 1, [claim_of(b"c", {("x:1", "x:2")}), claims[1]]),
        proof(key, "epoch-1/0", 0, 1, [claims[0], claim_of(b"b", {("x:3", "x:1")})]),
    ]
    assert len({good, *others}) == 6


def test_only_a_connection_that_both_ends_claim_is_direct() -> None:
    """Before, no worker knew which process held the other end of a connection."""
    relayed = [claim_of(b"", {("x:1", "x:9")}), claim_of(b"", {("x:2", "x:8")})]
    assert [indirect(relayed, rank) for rank in range(2)] == [[1], [0]]
    assert unclaimed(relayed) == {("x:1", "x:9"), ("x:2", "x:8")}
    three = [
        claim_of(b"", {("x:1", "x:2"), ("x:1", "x:4")}),
        claim_of(b"", {("x:2", "x:1"), ("x:2", "x:5"), ("x:2", "x:7")}),
        claim_of(b"", {("x:4", "x:1"), ("x:5", "x:2")}),
    ]
    assert [indirect(three, rank) for rank in range(3)] == [[], [], []]
    assert unclaimed(three) == {("x:2", "x:7")}  # the stranger's; it has no worker's place
    assert indirect([*three[:2], b"\xff garbage"], 0) == [2]


@as_root
def test_ports_in_a_namespace_cannot_be_seen_or_reached_from_the_host() -> None:
    """Before, each port of a worker was one of the host's, open to every user."""
    network = new_network()
    before = descriptors_by_inode().keys()
    with inside(network):
        groups: list[Any] = [None, None]
        store = torch.distributed.HashStore()
        guard = PairGuard(network=network)
        threads = [
            threading.Thread(
                target=lambda rank=rank: groups.__setitem__(rank, guard.form(store, "", rank, (0, 1), 5.0))
            )
            for rank in range(2)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    mine = descriptors_by_inode().keys() - before
    number, one = torch.zeros(1), torch.ones(1)
    sent = groups[0].gloo.send([one], 1, 0)
    groups[1].gloo.recv([number], 0, 0).wait()
    sent.wait()
    assert number.item() == 1.0
    with inside(network):
        reached = sockets_of_network()
    assert len(mine & reached.keys()) == 4
    listening = {inode for inode, state in sockets_of_network().items() if state == "0A"}
    assert not mine & listening  # others are those of clients of other tests
    os.close(network)


def sockets_of_network() -> dict[int, str]:
    """Returns the TCP sockets of the network that this thread is in: inode -> state in hexadecimal."""
    rows = [line.split() for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[9]): row[3] for row in rows}


SLOW_MODEL = """
from torch import nn
from tests.security.test_host_pairs import connect_late

def net():
    connect_late(0.5)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
"""
LIMITED = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")  # as users who are not root


@as_root
@pytest.mark.e2e
def test_a_run_goes_on_with_its_bits_when_a_stranger_has_taken_places(tmp_path: Path) -> None:
    """Before, a run whose worker had a stranger for a peer waited for its transfers and did not train."""
    (tmp_path / "m.py").write_text(SLOW_MODEL)
    size = ("--stages", "3", "--microbatches", "2", "--steps", "2", "--seed", "7")
    command = [sys.executable, "-m", "bamboo_cli", "run", "--model", "m:net", *size, "--results"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{STRANGER.parents[2]}"}
    with (
        stranger("take") as process,
        subprocess.Popen([*LIMITED, *command, "attacked"], cwd=tmp_path, env=environment) as run,
    ):
        taken = attack_workers(run, process)
        assert run.wait() == 0
    subprocess.run([*command, "calm"], cwd=tmp_path, env=environment, check=True)
    attacked, calm = (tmp_path / each / "latest" for each in ("attacked", "calm"))
    assert (attacked / "trajectory.csv").read_bytes() == (calm / "trajectory.csv").read_bytes()
    guards = [record for folder in (attacked, calm) for record in records(folder) if record["event"] == "pairs"]
    assert [(each["guard"], each.get("why", "")) for each in guards] == [
        ("proof", "[Errno 1] unshare: Operation not permitted"),
        ("namespace", ""),
    ]
    doubts = [record for record in records(attacked) if record["event"] == "unproven"]
    assert len(taken) == 3 and doubts and {each["of"] for each in doubts} <= {0, 1, 2}


def attack_workers(run: subprocess.Popen[bytes], process: subprocess.Popen[str]) -> set[int]:
    """Has a stranger take places at the first port of every worker of a run; returns the ports."""
    taken: dict[int, int] = {}
    until_s = time.monotonic() + TIMEOUT_S
    while len(taken) < 3 and time.monotonic() < until_s and run.poll() is None:
        for each in psutil.Process(run.pid).children():
            if re.fullmatch(r"bamboo-\d", each.name()) and each.pid not in taken:
                for socket in each.net_connections("tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        taken[each.pid] = socket.laddr.port
                        take_places(socket.laddr.port, process)
        time.sleep(0.005)
    return set(taken.values())


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_doctor_names_the_guard_and_why_it_is_not_the_other() -> None:
    """Before, `bamboo doctor` had no word about it."""
    assert "network namespace" in judge_pairs("").found
    assert "proves" in judge_pairs("Operation not permitted").found and "CAP_SYS_ADMIN" in judge_pairs("x").found
