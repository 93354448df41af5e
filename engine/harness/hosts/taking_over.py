"""A host that takes over a run from one that is lost: it waits for the other hosts, and runs the job from the store.

    others come      each says its processes, the decisions that this host has not heard, and words that come once only
    after a commit   the workers go on, as the same processes
    before one       they are ended, and all workers begin again on the hosts that are left

Rules: this host serves its own workers as those of others, over a stream to itself, so there is one path. A host that
does not come is lost. Nothing that is needed is on the disk of the lost host alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from engine.core.coordinator.state import FACTS, STATE
from engine.core.coordinator.succession import TakenProcess, begins_again, last_number, succession
from engine.core.errors import BambooError
from engine.core.hosts.host_loss import SILENT_NS
from engine.core.message_codec import ToWorker
from engine.core.messages import WelcomeMessage
from engine.files.run_folder import RunFolder
from engine.harness.hosts.coordinating import OF_COORDINATOR, HostRunEnd, OwnHost, coordinate, tell
from engine.runtime.agent.taken_run import HeldProcess, Seat, TakenRun
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.host_registry import Elected, HostOutcome
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.hosts.host_workers import HostWorkers
from engine.runtime.hosts.run_certificate import network_of
from engine.runtime.hosts.wire import WireServer
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.keeping.scribe import Scribe
from engine.runtime.process.fork_client import Child

_COME_S = SILENT_NS / 1e9  # from the election until a host has to have come
_LOOK_S = 0.05
_END_S = 1.0  # from the outcome until the thread has ended that serves the workers of this host


def take_over(
    at: OwnHost,
    chosen: Elected,
    before: Elected,
    wire_server: WireServer,
    workers: HostWorkers,
    own_place: tuple[RunFolder, Scribe],
    stream: Callable[[], AbstractContextManager[object]],
) -> HostRunEnd:
    """Goes on with the run as the host that coordinates it; the workers of this host are served by a thread.

    `own_place` is the folder of this host, and the scribe that has written there. `stream` opens the stream of this
    host to itself.
    """
    away = {each.name: AwayServer(each, takes_over=True) for each in at.registry.of_run(chosen)}
    own = away[chosen.name]
    network = network_of(before.made, at.registry.own.facts["transfers"])
    servers = HostServers(own, [*away.values()], at.kv, at.room, network)
    for name, each in away.items():
        wire_server.admit(name, each.peer)
    for name, each in away.items():
        if not each.known.lease_id or name == before.name:
            servers.lose(name, "it coordinated the run, and has ended" if name == before.name else "its lease is over")
    with stream(), _served(workers):
        wait_for_words(away.values())
        for name, each in away.items():
            if not each.has_said.is_set():
                servers.lose(name, f"it did not come to host {chosen.name}, which coordinates now")
        try:
            taken = _taken(at, before, away, servers, workers, own_place[0].path)
        except BambooError as error:
            tell(HostOutcome(int(error.exit_code), f"failed: {error}"), servers, at.registry)
            raise
        return coordinate(at.run, servers, at.registry, Seat(at.lease, own_place[0], taken, own_place[1]), at.give_back)


def wait_for_words(away: Collection[AwayServer], patience_s: float = _COME_S) -> None:
    """Waits until each host has said all. Looks are counted: while this process stood still, it heard no host."""
    looks = round(patience_s / _LOOK_S)
    while looks and (missing := [each for each in away if not each.has_said.is_set()]):
        looks -= not missing[0].has_said.wait(_LOOK_S)


@contextlib.contextmanager
def _served(workers: HostWorkers) -> Iterator[None]:
    """Serves the workers of this host by a thread, until the outcome has come to it, or at most a little longer."""
    is_over = threading.Event()
    serving = threading.Thread(target=workers.run, args=(None, is_over.is_set, is_over.is_set), name="own", daemon=True)
    serving.start()
    try:
        yield
        serving.join(_END_S)
    finally:
        is_over.set()
        serving.join(_END_S)


def _taken(
    at: OwnHost, before: Elected, away: dict[str, AwayServer], servers: HostServers, workers: HostWorkers, folder: Path
) -> TakenRun | None:
    """Returns the run to go on with, None if all workers begin again; raises CoordinatorUnavailableError."""
    stored = {key: at.kv.get(key) for key in (STATE, FACTS)}
    texts = {key: each.value.decode() for key, each in stored.items() if each is not None}
    living = {name: each for name, each in away.items() if not each.peer.is_lost}
    results = workers.heard
    results.complete(each.told for each in living.values())
    if begins_again(texts, has_results=bool(results.results.losses)):
        at.registry.forget(OF_COORDINATOR)
        servers.go_on_after(results)
        for host in away.values():
            host.end_held()
        return None
    processes = []
    held = {name: each.held for name, each in living.items()}
    found = succession(texts, held, before.name, results.results.committed)
    for each in found:
        server = away[each.host]
        processes.append(HeldProcess(each.worker, each.host, partial(_adopt, server, each)))
        for number, packet in server.words():
            if number == each.number:
                results.hear_again(each.worker, packet)
    servers.go_on_after(results)
    servers.dealt = {each.worker: each.host for each in processes}

    def hear_again() -> None:
        for server in away.values():
            server.hear_again()

    results.results.taken_over(now_ns())
    welcomes, place = taught(away, {each.host for each in found if not each.ended})
    home = home_of(next(iter(welcomes.values()), None), folder)
    taken = TakenRun(home, results.results, processes, hear_again, results.faults, before.name, welcomes, place, -1, 0)
    return taken._replace(last=last_number(texts, found), notices=workers.num_notices)


def taught(away: Mapping[str, AwayServer], hosts: Collection[str]) -> tuple[dict[int, WelcomeMessage], list[ToWorker]]:
    """Returns the messages that the workers of hosts were told: the welcome of each, the cut and the borders.

    Another host may know an earlier start; a lost one has told nothing. One whose first worker has just come may lack
    the cut and the borders.
    """
    known = [away[each].taught for each in sorted(hosts)]
    welcomes = {each.worker: each for told in known for each in told if isinstance(each, WelcomeMessage)}
    places = ([each for each in told if not isinstance(each, WelcomeMessage)] for told in known)
    return welcomes, max(places, key=len, default=[])


def home_of(welcome: WelcomeMessage | None, folder: Path) -> Path:
    """Returns the folder in which the run began: the checkpoints of all its hosts have the name of that one.

    `folder` is that of this host. The folder of the first host may not be there; then the job names another place.
    """
    if welcome is None:
        return folder
    inside = Path(welcome.checkpoints).parent
    return inside if inside.name == welcome.run else folder.with_name(welcome.run)


def _adopt(server: AwayServer, taken: TakenProcess, far: int, board_fd: int) -> Child:
    return server.adopt(taken.number, taken.worker, taken.pid, taken.ended, far, board_fd)
