"""Calls to etcd that end: one attempt after the other, at one endpoint after the other, until a deadline.

Rules: every attempt has a timeout, every call a deadline. What gRPC and etcd raise ends here, as
CoordinatorUnavailableError, and no message holds a password. The calls belong to the process that made them: their
threads and locks do not survive a fork, and a forked child that used them would hang.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from engine.core.errors import CoordinatorUnavailableError, LeaseLostError
from engine.runtime.store.etcd3_import import import_etcd3
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings

etcd3 = import_etcd3()
rpc = etcd3.etcdrpc

DEADLINE_S = 10.0
ATTEMPT_S = 1.0
PAUSE_S = 0.05

_CHANNEL_OPTIONS = (
    # A host's proxy is for the web; gRPC would send etcd's traffic there too.
    ("grpc.enable_http_proxy", 0),
    # Else all clients of a process share a connection, and its pauses between tries.
    ("grpc.use_local_subchannel_pool", 1),
    # Pauses between tries to connect; the one in the middle is the least time that a try is given.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Finds a connection dead that was cut without a word. etcd turns those away who ask more often than every 5 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 256 << 20),
)
# Another attempt, perhaps elsewhere, may have an answer.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# etcd forgets who has logged in when it restarts, after five idle minutes, and when users are changed.
_LOG_IN_AGAIN = ("invalid auth token", "revision of auth store is old")


class CompactedError(Exception):
    """The revision that was asked for is no longer kept."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """One endpoint's methods by name, and what each call says about its sender."""

    methods: dict[str, Callable[..., Any]]
    metadata: tuple[tuple[str, str], ...]
    close: Callable[[], None]


class EtcdCalls:
    """Calls of one process to one etcd; may be shared by threads."""

    def __init__(self, settings: EtcdSettings, deadline_s: float = DEADLINE_S):
        self.deadline_s = deadline_s
        self._settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[Endpoint, _Connection] = {}
        self._turn = 0

    def call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """Makes a call that may be repeated, and returns the reply."""
        until_s = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        while True:
            reply = self.attempt(method, request, until_s)
            if reply is not None:
                return reply

    def attempt(self, method: str, request: Any, until_s: float) -> Any:
        """Tries a call once; returns the reply, or None when it is lost and there is time for another try.

        `until_s` is on the monotonic clock. Raises CoordinatorUnavailableError after it, or when etcd refuses.
        """
        self.check_process()
        endpoint = self._settings.endpoints[self._turn]
        timeout_s = min(ATTEMPT_S, max(PAUSE_S, until_s - time.monotonic()))
        try:
            connection = self._connect(endpoint)
            return connection.methods[method](request, timeout=timeout_s, metadata=connection.metadata)
        except grpc.RpcError as error:
            self._judge(error, endpoint)
            if time.monotonic() + PAUSE_S >= until_s:
                places = ", ".join(str(each) for each in self._settings.endpoints)
                raise CoordinatorUnavailableError(f"etcd at {places} does not answer: {error.details()}") from None
            time.sleep(PAUSE_S)
            return None

    def check_process(self) -> None:
        """Stops a child that was forked after the calls were made, before it can hang."""
        assert os.getpid() == self._pid, "the client of etcd was made before a fork: make one in the child"

    def close(self) -> None:
        """Closes all connections; no call may be under way."""
        for connection in self._connections.values():
            connection.close()

    def _judge(self, error: Any, endpoint: Endpoint) -> None:
        """Returns if another attempt may help, and sees to it that it is another; raises if not."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            raise LeaseLostError(f"the lease has expired: {details}") from None
        if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
            raise CompactedError
        if any(text in details for text in _LOG_IN_AGAIN):
            with self._lock:
                self._connections.pop(endpoint, None)
        elif code in _PASSING:
            self._turn = (self._settings.endpoints.index(endpoint) + 1) % len(self._settings.endpoints)
        else:
            raise CoordinatorUnavailableError(f"etcd at {endpoint} refused: {details}") from None

    def _connect(self, endpoint: Endpoint) -> _Connection:
        connection = self._connections.get(endpoint)
        if connection is None:
            with self._lock:
                connection = self._connections[endpoint] = _open(self._settings, endpoint)
        return connection


def _open(settings: EtcdSettings, endpoint: Endpoint) -> _Connection:
    """Connects, and logs in if there is a user; gRPC's own errors are passed on."""
    client = etcd3.client(
        host=f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host,
        port=endpoint.port,
        ca_cert=settings.ca_file or None,
        cert_cert=settings.cert_file or None,
        cert_key=settings.key_file or None,
        timeout=ATTEMPT_S,
        user=settings.user or None,
        password=settings.password.reveal() or None,
        grpc_options=_CHANNEL_OPTIONS,
    )
    keep_alive = client.leasestub.LeaseKeepAlive
    methods = {
        "Range": client.kvstub.Range,
        "Put": client.kvstub.Put,
        "DeleteRange": client.kvstub.DeleteRange,
        "Txn": client.kvstub.Txn,
        "LeaseGrant": client.leasestub.LeaseGrant,
        "LeaseRevoke": client.leasestub.LeaseRevoke,
        "LeaseKeepAlive": lambda request, **options: next(keep_alive(iter((request,)), **options)),
    }
    # The token goes here alone: the package sends it as call credentials too, which gRPC refuses without TLS.
    # A member that is cut off from the others shall say so instead of falling silent.
    return _Connection(methods, (*(client.metadata or ()), ("hasleader", "true")), client.close)
