"""Calls to etcd with retries at all endpoints until a deadline.

Rules: every attempt has a timeout, every call a deadline. An endpoint that did not answer in time is asked again when
no other one is left, or after some seconds, by all clients of a process: a host that is gone costs one timeout. One
that has refused for a second is no better: while etcd elects a leader the living members may be too slow. Errors of
gRPC and etcd are raised as CoordinatorUnavailableError, without passwords in the message. An `EtcdCalls` works only
in the process that made it: its threads and locks do not survive a fork, and a forked child would hang.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.errors import CoordinatorUnavailableError, LeaseLostError, ensure
from engine.runtime.process.grpc_import import grpc
from engine.runtime.process.interrupts import breakable
from engine.runtime.store.etcd3_import import import_etcd3
from engine.runtime.store.etcd_settings import PASSWORD_FILE, SOCKET, USER, Endpoint, EtcdSettings, SocketEndpoint

etcd3 = import_etcd3()
rpc = etcd3.etcdrpc

DEADLINE_S = 10.0
ATTEMPT_S = 1.0
PAUSE_S = 0.05
_AVOIDED_S = 10.0  # an endpoint that did not answer
_REFUSES_S = 1.0  # an endpoint, until it counts as one that did not answer
_avoided_until_s: dict[Endpoint | SocketEndpoint, float] = {}
_refuses_since_s: dict[Endpoint | SocketEndpoint, float] = {}

_CHANNEL_OPTIONS = (
    # A web proxy of the host is not for etcd.
    ("grpc.enable_http_proxy", 0),
    # Without it, all clients of a process share a connection and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # Back-off between attempts to connect; the second option is the least timeout of an attempt.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Detects a silently cut connection. etcd refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 256 << 20),
)
# Errors after which another attempt, at another endpoint, may succeed.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# etcd drops a log-in when it restarts, after five idle minutes, and when users are changed.
_LOG_IN_AGAIN = ("invalid auth token", "revision of auth store is old")


@dataclass(frozen=True, slots=True)
class _Connection:
    """The methods of one endpoint by name, and the metadata of each call."""

    methods: dict[str, Callable[..., Any]]
    metadata: tuple[tuple[str, str], ...]
    close: Callable[[], None]


class EtcdCalls:
    """Calls of one process to one etcd; thread-safe."""

    def __init__(self, settings: EtcdSettings, deadline_s: float = DEADLINE_S, root: str = ""):
        """`root` is the prefix of the keys that the calls are about, for the words of errors."""
        self.deadline_s, self._root = deadline_s, root
        self._settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[Endpoint | SocketEndpoint, _Connection] = {}
        self._turn = 0

    def call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """Makes an idempotent call with retries, and returns the reply; raises CoordinatorUnavailableError."""
        until_s = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        while True:
            reply = self.attempt(method, request, until_s)
            if reply is not None:
                return reply

    def attempt(self, method: str, request: Any, until_s: float) -> Any:
        """Makes one attempt at a call; returns the reply, or None if it was lost and another attempt is in time.

        `until_s` is on the monotonic clock. Raises CoordinatorUnavailableError after it or if etcd refuses,
        LeaseLostError if the lease has expired, and CompactedError.
        """
        self.check_process()
        endpoint = self._next()
        timeout_s = min(ATTEMPT_S, max(PAUSE_S, until_s - time.monotonic()))
        try:
            connection = self._connect(endpoint)
            with breakable():
                reply = connection.methods[method](request, timeout=timeout_s, metadata=connection.metadata)
            _avoided_until_s.pop(endpoint, None)
            _refuses_since_s.pop(endpoint, None)
            return reply
        except grpc.RpcError as error:
            self._judge(error, endpoint)
            if time.monotonic() + PAUSE_S >= until_s:
                places = ", ".join(str(each) for each in self._settings.endpoints)
                raise CoordinatorUnavailableError(f"etcd at {places} does not answer: {error.details()}") from None
            time.sleep(PAUSE_S)
            return None

    def _next(self) -> Endpoint | SocketEndpoint:
        """Returns the endpoint whose turn it is, or the one after it that is not avoided."""
        every, now_s = self._settings.endpoints, time.monotonic()
        in_turn = (*every[self._turn :], *every[: self._turn])
        return next((each for each in in_turn if _avoided_until_s.get(each, 0.0) <= now_s), in_turn[0])

    def check_process(self) -> None:
        """Raises InvariantError unless this is the process that made the object: a forked child would hang."""
        ensure(os.getpid() == self._pid, "the client of etcd was made before a fork: make one in the child")

    def close(self) -> None:
        """Closes all connections; no call may be in progress."""
        for connection in self._connections.values():
            connection.close()

    def _judge(self, error: Any, endpoint: Endpoint | SocketEndpoint) -> None:
        """Prepares another attempt, at the next endpoint or with a new log-in; raises if none can help."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            raise LeaseLostError(f"the lease has expired: {details}") from None
        if any(text in details for text in _LOG_IN_AGAIN):
            with self._lock:
                self._connections.pop(endpoint, None)
        elif code in _PASSING:
            self._turn = (self._settings.endpoints.index(endpoint) + 1) % len(self._settings.endpoints)
            now_s = time.monotonic()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                _avoided_until_s[endpoint] = now_s + _AVOIDED_S
            elif now_s >= _refuses_since_s.setdefault(endpoint, now_s) + _REFUSES_S:
                _avoided_until_s[endpoint] = now_s + _REFUSES_S
        else:
            way_out = f"; {self._way_out(details)}" if self._way_out(details) else ""
            raise CoordinatorUnavailableError(f"etcd at {endpoint} refused: {details}{way_out}") from None

    def _way_out(self, details: str) -> str:
        user = self._settings.user
        if "permission denied" in details:
            return f"user {user!r} needs a role that may read and write the keys under {self._root or '/bamboo/'}"
        if "user name is empty" in details:
            return f"this etcd wants a user: set {USER}, and {PASSWORD_FILE}"
        return ""

    def _connect(self, endpoint: Endpoint | SocketEndpoint) -> _Connection:
        connection = self._connections.get(endpoint)
        if connection is None:
            with self._lock:
                connection = self._connections[endpoint] = _open(self._settings, endpoint)
        return connection


class EndpointClient(etcd3.Etcd3Client):  # type: ignore[name-defined]
    """The package's client of one endpoint; raises CoordinatorUnavailableError for a socket that is not private."""

    def __init__(self, endpoint: Endpoint | SocketEndpoint, **options: Any):
        self._folder_fd = -1
        if isinstance(endpoint, SocketEndpoint):
            self._folder_fd = endpoint.open_folder()
            host, port = "unix", f"/proc/self/fd/{self._folder_fd}/{SOCKET}"
        else:
            host, port = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host, str(endpoint.port)
        super().__init__(host, port, **options)

    def close(self) -> None:
        """Disconnects."""
        super().close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def _open(settings: EtcdSettings, endpoint: Endpoint | SocketEndpoint) -> _Connection:
    """Connects, and logs in if the settings have a user; raises the errors of gRPC."""
    client = EndpointClient(
        endpoint,
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
    # The token goes into the metadata: gRPC refuses the package's call credentials without TLS.
    # With hasleader, a member without a majority returns an error instead of blocking.
    return _Connection(methods, (*(client.metadata or ()), ("hasleader", "true")), client.close)
