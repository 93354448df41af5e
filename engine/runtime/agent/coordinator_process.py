"""The process of a coordinator: waits for the role, then decides on each input and answers with its outputs.

Rule: an answer is sent when the state is in the store, and whole. A coordinator that ends before that has told nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import BambooError, CoordinatorUnavailableError, required
from engine.core.job.job import Job
from engine.core.kv import KV
from engine.core.message_codec import Message
from engine.core.protocol import state as membership_state
from engine.core.protocol.coordinator_state import ROLE, begin
from engine.core.protocol.events import Takeover
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput
from engine.core.protocol.wire import (
    BeginCoordinatorMessage,
    DecidedMessage,
    StepMessage,
    TakeOverMessage,
    decided,
    parts_of,
    read_step,
)
from engine.runtime.agent.coordinator import Coordinator
from engine.runtime.ipc.clock import now_ns
from engine.runtime.ipc.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.store.etcd_kv import LEASE_TTL_S, PRIVATE_TTL_S, RENEW_EVERY_NS, Election
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings, Secret, private_settings

_POLL_S = 0.002


def _settings(plain: Any) -> EtcdSettings:
    if "private" in plain:
        return private_settings(Path(plain["private"]))
    endpoints = tuple(Endpoint(host, port) for host, port in plain["endpoints"])
    ca_file, cert_file, key_file = plain["files"]
    return EtcdSettings(endpoints, ca_file, cert_file, key_file, plain["user"], Secret(plain["password"]))


def main(control_fd: int) -> int:
    """Runs one coordinator over the link to its agent, until that link is closed."""
    sleep_exactly()
    link = Link.from_fd(control_fd)
    told = link.receive()
    if isinstance(told, BeginCoordinatorMessage):
        from engine.runtime.store.etcd_kv import EtcdKV  # imports gRPC

        _Process(link, told, EtcdKV(_settings(told.store), f"/bamboo/{told.run_id}/")).run()
    return 0


class _Process:
    """One candidate for the role, and the coordinator once it has won."""

    def __init__(self, link: Link, told: BeginCoordinatorMessage, kv: KV):
        self._link, self._kv = link, kv
        self._job, self._membership = Job(**told.job), told.membership
        ttl_s = PRIVATE_TTL_S if "private" in told.store else LEASE_TTL_S
        self._election = Election(kv, ROLE, told.name.encode(), ttl_s)
        self._coordinator: Coordinator | None = None
        self._renewed_ns = now_ns()

    def run(self) -> None:
        """Answers each message of the agent."""
        self._kv.get(ROLE)  # connects
        while (message := self._link.receive()) is not None:
            try:
                for output in self._answer(message):
                    for part in parts_of(output):
                        self._link.send(part)
                self._link.send(decided(required(self._coordinator, "a coordinator answers").state))
            except BambooError as error:  # also one about an output, which then none of this answer is
                self._link.send(DecidedMessage({}, {}, str(error), int(error.exit_code)))

    def _answer(self, message: Message) -> tuple[CoordinatorOutput, ...]:
        if isinstance(message, TakeOverMessage):
            self._win()
            return () if message.is_first else self._handle(Takeover(now_ns()))
        if isinstance(message, StepMessage):
            given = read_step(message, self._received())
            self._renew()
            return self._handle(given)
        return ()

    def _handle(self, given: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        return required(self._coordinator, "a coordinator decides after it has taken the role").handle(given)

    def _received(self) -> Iterator[Message]:
        while (message := self._link.receive()) is not None:
            yield message

    def _win(self) -> None:
        until_s = time.monotonic() + 2 * LEASE_TTL_S
        while not self._election.poll():
            if time.monotonic() > until_s:
                raise CoordinatorUnavailableError("another coordinator holds this run")
            time.sleep(_POLL_S)
        at_ns = now_ns()
        first = begin(self._job, membership_state.resume(self._membership, at_ns), at_ns)
        self._coordinator = Coordinator(self._kv, self._election, first, at_ns)

    def _renew(self) -> None:
        if now_ns() - self._renewed_ns >= RENEW_EVERY_NS:
            self._renewed_ns = now_ns()
            if not self._election.renew():
                raise CoordinatorUnavailableError("the lease of the coordinator has expired")
