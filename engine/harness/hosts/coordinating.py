"""A host that coordinates: it runs the job with the fork servers of all hosts, and tells the outcome to all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.config.job import Job
from engine.core.coordinator.state import COMMIT, FACTS, READERS, ROLE, STATE
from engine.core.errors import BambooError, CoordinatorUnavailableError, ExitCode
from engine.core.store.kv import KV, Lease
from engine.harness.screen import Screen
from engine.runtime.agent.taken_run import HandedOverError, Seat
from engine.runtime.hosts.host_registry import HostOutcome, HostRegistry
from engine.runtime.hosts.host_servers import HostServers
from engine.runtime.process.fork_client import ForkServer

OF_COORDINATOR = (ROLE, STATE, COMMIT, FACTS, *READERS)  # keys in the store, and prefixes
RunOn = Callable[[ForkServer, Seat], Any]  # runs the job with the servers of all hosts; returns the result of its case


@dataclass(frozen=True, slots=True)
class HostRunEnd:
    """The end of a run on this host; `result` is there on the host that coordinated last."""

    outcome: HostOutcome
    result: Any = None


@dataclass(frozen=True, slots=True)
class OwnHost:
    """This host in a run; `label` is the name of the case and the id of the run."""

    job: Job
    label: str
    registry: HostRegistry
    lease: Lease
    kv: KV  # to revoke leases with, and to read the state
    screen: Screen
    run: RunOn
    give_back: Callable[[], None]  # the lease
    room: int = 0  # for workers on each host; 0: for any


def coordinate(
    run: RunOn, servers: HostServers, registry: HostRegistry, seat: Seat, give_back: Callable[[], None]
) -> HostRunEnd:
    """Runs the job as on one host, with the workers of all hosts, and tells the outcome.

    If all workers of this host have left after a notice, it gives its lease back, and with it the role.
    """
    result, error = None, None
    try:
        result = run(servers, seat)
        plain = result.to_plain()
        outcome = HostOutcome(int(plain["exit_code"]), str(plain["outcome"]))
    except HandedOverError:
        give_back()
        return HostRunEnd(left(registry.own.name))
    except BambooError as found:
        error, outcome = found, HostOutcome(int(found.exit_code), f"failed: {found}")
    except BaseException:
        tell(HostOutcome(ExitCode.INTERNAL, "failed: the agent that coordinated it has ended"), servers, registry)
        raise
    tell(outcome, servers, registry)
    if error is not None:
        raise error
    return HostRunEnd(outcome, result)


def left(name: str) -> HostOutcome:
    """Returns the end of a host whose workers have handed over."""
    return HostOutcome(ExitCode.OK, f"left: host {name} has handed over, and the run goes on")


def tell(outcome: HostOutcome, servers: HostServers, registry: HostRegistry) -> None:
    """Tells the outcome to the store and to all hosts; a signal, which may have ended the run, breaks neither off."""
    servers.stop_watching()

    def to_store() -> None:
        with contextlib.suppress(CoordinatorUnavailableError):  # then the hosts hear it over their streams alone
            registry.tell(outcome)
            registry.forget(OF_COORDINATOR)

    telling = threading.Thread(target=to_store, name="outcome", daemon=True)
    telling.start()
    servers.tell(outcome.code, outcome.words)
    telling.join()


def place_of_host(address: str, port: int) -> str:
    """Returns the place where a host listens, as one text."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
