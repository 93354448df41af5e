"""The coordinator's store on etcd, through the `etcd3` package: an implementation of engine/core/kv.py.

Rules: all keys are under the root, ``/bamboo/<run-id>/``; no other key is read or changed. Only the connection, the
messages and the stubs of the package are used; its locks, refresh and `limit` have bugs, which the tests show.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.deadlines import ATTEMPT, RoundTrips
from engine.core.errors import CoordinatorUnavailableError, LeaseLostError, ensure
from engine.core.kv import Condition, KeyValue, Lease, Put, StoreSnapshot, Txn, TxnOutcome, settled
from engine.runtime.process.grpc_import import grpc
from engine.runtime.process.interrupts import breakable
from engine.runtime.store.etcd3_import import import_etcd3
from engine.runtime.store.etcd_settings import PASSWORD_FILE, SOCKET, USER, Endpoint, EtcdSettings, SocketEndpoint


class KeySpace:
    """The keys under one root: a near key is bamboo's, relative text; a far key is etcd's, absolute bytes.

    Every key that is sent to etcd comes from here, so nothing outside of the root is read or changed. A foreign key
    that is not UTF-8 is converted without loss.
    """

    def __init__(self, root: str):
        self._root = root.encode()
        self._end = _after(self._root)

    def far(self, key: str) -> bytes:
        """Returns an absolute key."""
        ensure(bool(key), "a key is not empty")
        return self._root + key.encode("utf-8", "surrogateescape")

    def near(self, key: bytes) -> str:
        """Returns a relative key."""
        ensure(key.startswith(self._root), f"{key!r} is not under {self._root!r}")
        return key[len(self._root) :].decode("utf-8", "surrogateescape")

    def far_range(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns the range of absolute keys with `prefix`: the first, and the end (exclusive)."""
        start = self._root + prefix.encode("utf-8", "surrogateescape")
        end = _after(start)
        ensure(self._root <= start < end <= self._end, f"{prefix!r} leaves {self._root!r}")
        return start, end


def _after(prefix: bytes) -> bytes:
    """Returns the smallest key greater than all keys with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])


# Calls to etcd, retried at all endpoints until a deadline.
#
# Rules: every attempt has a timeout, which follows the answers before it and leaves time for another attempt; every
# call has a deadline. A client asks one endpoint, and after a lost attempt all at once, until one answers: a member
# that lives loses what it has passed on to a leader that is dead, and the next endpoint may be on the dead host, too.
# A write goes to one endpoint at a time, the one that answers a read: of two that are under way, the later one could
# come after the next write, and undo it.
# All clients of a process avoid an endpoint that did not answer in time for some seconds, unless no other is left: a
# dead host costs one timeout. The same holds for one that has refused for a second, but not earlier, because the living
# members may be slow while etcd elects a leader. Errors of gRPC and etcd are raised as CoordinatorUnavailableError,
# without passwords in the message. An `EtcdCalls` works only in the process that created it: its threads and locks do
# not survive a fork, and a forked child would hang.

etcd3 = import_etcd3()
rpc = etcd3.etcdrpc

_ANY_ORDER = frozenset({"Range", "LeaseKeepAlive", "LeaseRevoke"})  # the others are writes, or are repeated in vain
DEADLINE_S = 10.0
PAUSE_S = 0.05
_AVOIDED_S = 10.0  # an endpoint that did not answer
_REFUSES_S = 1.0  # an endpoint, until it counts as one that did not answer
_avoided_until_s: dict[Endpoint | SocketEndpoint, float] = {}
_refuses_since_s: dict[Endpoint | SocketEndpoint, float] = {}
_answers = RoundTrips()  # of all clients of this process

_CHANNEL_OPTIONS = (
    # A host's web proxy is not for etcd.
    ("grpc.enable_http_proxy", 0),
    # Without this, all clients of a process share a connection and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # Back-off between attempts to connect; the second option is the minimum timeout of an attempt.
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
# etcd drops log-ins when it restarts, after five idle minutes, and when users change.
_LOG_IN_AGAIN = ("invalid auth token", "revision of auth store is old")


@dataclass(frozen=True, slots=True)
class _Connection:
    """The methods of one endpoint by name, and the metadata of each call."""

    methods: dict[str, Callable[..., Any]]
    metadata: tuple[tuple[str, str], ...]
    close: Callable[[], None]


class _Answer(NamedTuple):
    """A reply of an endpoint, or its error."""

    endpoint: Endpoint | SocketEndpoint
    reply: Any = None
    error: Any = None


def _measure(took_s: float) -> None:
    global _answers  # noqa: PLW0603 - as the endpoints to avoid, it is of the process
    _answers = _answers.with_one(round(took_s * 1e9))


class EtcdCalls:
    """Calls of one process to one etcd; thread-safe."""

    def __init__(self, settings: EtcdSettings, deadline_s: float = DEADLINE_S, root: str = ""):
        """`root` is the prefix of the keys, for error messages."""
        self.deadline_s, self._root = deadline_s, root
        self._settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[Endpoint | SocketEndpoint, _Connection] = {}
        self._turn = 0
        self._has_lost = False  # an attempt, and no endpoint has answered since

    def call(self, method: str, request: Any, deadline_s: float | None = None) -> Any:
        """Makes an idempotent call with retries, and returns the reply; raises CoordinatorUnavailableError."""
        return self.ask(method, request, deadline_s)[0]

    def ask(self, method: str, request: Any, deadline_s: float | None = None) -> tuple[Any, bool]:
        """Makes an idempotent call; returns the reply, and whether the request was sent several times.

        Raises CoordinatorUnavailableError after the deadline or if etcd refuses, and LeaseLostError if the lease has
        expired.
        """
        self.check_process()
        until_s = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        came: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        busy, num_sent = set[Endpoint | SocketEndpoint](), 0  # those that have not answered yet
        while True:
            if self._has_lost and method not in _ANY_ORDER:
                read = rpc.RangeRequest(key=(self._root or "/bamboo/").encode(), keys_only=True)
                self.ask("Range", read, until_s - time.monotonic())
            timeout_s = self._timeout_s(until_s - time.monotonic())
            due = [each for each in self._settings.endpoints if each not in busy] if self._has_lost else [self._next()]
            num_sent += len(due)
            busy.update(due)
            with breakable():
                if len(busy) == 1:
                    self._attempt(due[0], method, request, timeout_s, came)
                else:
                    for endpoint in due:
                        call = (endpoint, method, request, timeout_s, came)
                        threading.Thread(target=self._attempt, args=call, name="etcd", daemon=True).start()
                try:
                    answer = came.get(timeout=max(0.0, until_s - time.monotonic()) + PAUSE_S)
                except queue.Empty:  # one that logs in
                    raise self._unavailable("it is too slow") from None
            busy.discard(answer.endpoint)
            if answer.error is None:
                self._turn, self._has_lost = self._settings.endpoints.index(answer.endpoint), False
                return answer.reply, num_sent > 1
            if not isinstance(answer.error, grpc.RpcError):
                raise answer.error
            self._judge(answer.error, answer.endpoint)
            self._has_lost = True
            if time.monotonic() + PAUSE_S >= until_s:
                raise self._unavailable(answer.error.details())
            time.sleep(PAUSE_S)

    def _unavailable(self, why: str) -> CoordinatorUnavailableError:
        places = ", ".join(map(str, self._settings.endpoints))
        return CoordinatorUnavailableError(f"etcd at {places} does not answer: {why}")

    def _attempt(
        self,
        endpoint: Endpoint | SocketEndpoint,
        method: str,
        request: Any,
        timeout_s: float,
        came: queue.SimpleQueue[_Answer],
    ) -> None:
        """Asks one endpoint."""
        began_s = time.monotonic()
        try:
            connection = self._connect(endpoint)
            reply = connection.methods[method](request, timeout=timeout_s, metadata=connection.metadata)
        except Exception as error:  # the caller raises what is no error of gRPC; without an answer it would wait
            came.put(_Answer(endpoint, error=error))
            return
        _measure(time.monotonic() - began_s)
        _avoided_until_s.pop(endpoint, None)
        _refuses_since_s.pop(endpoint, None)
        came.put(_Answer(endpoint, reply))

    def _timeout_s(self, left_s: float) -> float:
        """Returns the time of an attempt, of a call that has so many seconds left."""
        others_s = left_s / 2 if len(self._settings.endpoints) > 1 and not self._has_lost else 0.0
        patient_s = max(ATTEMPT.base_ns / 1e9, min(ATTEMPT.after(_answers.worst_ns) / 1e9, left_s - others_s))
        return min(patient_s, max(PAUSE_S, left_s))

    def _next(self) -> Endpoint | SocketEndpoint:
        """Returns the endpoint whose turn it is, or the next one that is not avoided."""
        endpoints, now_s = self._settings.endpoints, time.monotonic()
        in_turn = (*endpoints[self._turn :], *endpoints[: self._turn])
        return next((place for place in in_turn if _avoided_until_s.get(place, 0.0) <= now_s), in_turn[0])

    def check_process(self) -> None:
        """Raises InvariantError unless this is the process that created the object: a forked child would hang."""
        ensure(os.getpid() == self._pid, "the client of etcd was made before a fork: make one in the child")

    def close(self) -> None:
        """Closes all connections; no call may be in progress."""
        for connection in self._connections.values():
            connection.close()

    def _judge(self, error: Any, endpoint: Endpoint | SocketEndpoint) -> None:
        """Prepares another attempt, at the next endpoint or with a new log-in; raises if that cannot help."""
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
            if "permission denied" in details:
                role = f"a role that may read and write the keys under {self._root or '/bamboo/'}"
                details += f"; user {self._settings.user!r} needs {role}"
            if "user name is empty" in details:
                details += f"; this etcd requires a user: set {USER}, and {PASSWORD_FILE}"
            raise CoordinatorUnavailableError(f"etcd at {endpoint} refused: {details}") from None

    def _connect(self, endpoint: Endpoint | SocketEndpoint) -> _Connection:
        connection = self._connections.get(endpoint)
        if connection is None:
            opened = _open(self._settings, endpoint)  # which may log in: another endpoint does not wait for that
            with self._lock:
                connection = self._connections.setdefault(endpoint, opened)
            if connection is not opened:
                opened.close()
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
        timeout=ATTEMPT.usual_ns / 1e9,
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


class EtcdKV:
    """One client of the store; thread-safe, but not usable in a forked child."""

    def __init__(self, settings: EtcdSettings, root: str, deadline_s: float = DEADLINE_S):
        ensure(re.fullmatch(r"/bamboo/[^/]+/", root) is not None, f"keys stand under /bamboo/<run-id>/, not {root!r}")
        self._calls = EtcdCalls(settings, deadline_s, root)
        self._keys = KeySpace(root)

    def allow(self, deadline_s: float) -> None:
        """Lets later calls take so long."""
        self._calls.deadline_s = deadline_s

    def get(self, key: str) -> KeyValue | None:
        """Returns the content of `key`, or None if it does not exist."""
        return self._item(self._calls.call("Range", rpc.RangeRequest(key=self._keys.far(key))).kvs)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Writes a key that has no other writer; returns the revision."""
        revision: int = self._calls.call("Put", self._put_request(Put(key, value, lease))).header.revision
        return revision

    def transact(self, txn: Txn) -> TxnOutcome:
        """Runs a transaction; see `KV.transact`."""
        request = rpc.TxnRequest(
            compare=[self._compare(condition) for condition in txn.conditions],
            success=[
                rpc.RequestOp(request_put=self._put_request(change))
                if isinstance(change, Put)
                else rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._keys.far(change.key)))
                for change in txn.changes
            ],
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=self._keys.far(condition.key)))
                for condition in txn.conditions
            ],
        )
        reply, is_repeated = self._calls.ask("Txn", request)
        items = () if reply.succeeded else tuple(self._item(each.response_range.kvs) for each in reply.responses)
        outcome = TxnOutcome(reply.succeeded, reply.header.revision, items)
        return settled(txn, outcome) if is_repeated else outcome

    def read_prefix(self, prefix: str) -> StoreSnapshot:
        """Returns all keys under `prefix`, read at one revision."""
        start, end = self._keys.far_range(prefix)
        reply = self._calls.call("Range", rpc.RangeRequest(key=start, range_end=end))
        return StoreSnapshot(tuple(map(self._near, reply.kvs)), reply.header.revision)

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all keys under `prefix`, atomically."""
        start, end = self._keys.far_range(prefix)
        self._calls.call("DeleteRange", rpc.DeleteRangeRequest(key=start, range_end=end))

    def grant(self, ttl_s: int) -> Lease:
        """Creates a lease of at least `ttl_s` seconds. If the reply is lost, it expires unused."""
        reply = self._calls.call("LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s))
        return Lease(reply.ID, reply.TTL)

    def keep_alive(self, lease: Lease) -> bool:
        """Renews a lease; returns False if it has expired. Raises if there is no answer within its time to live."""
        deadline_s = min(self._calls.deadline_s, lease.ttl_s)
        reply = self._calls.call("LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=lease.lease_id), deadline_s)
        alive: bool = reply.TTL > 0  # for an expired lease, etcd replies with a time to live of 0
        return alive

    def revoke(self, lease: Lease) -> None:
        """Ends a lease and deletes its keys."""
        with contextlib.suppress(LeaseLostError):
            self._calls.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease.lease_id))

    def close(self) -> None:
        """Disconnects."""
        self._calls.close()

    def _item(self, kvs: Any) -> KeyValue | None:
        return self._near(kvs[0]) if kvs else None

    def _near(self, item: Any) -> KeyValue:
        key = self._keys.near(item.key)
        return KeyValue(key, item.value, item.create_revision, item.mod_revision, item.version, item.lease)

    def _put_request(self, put: Put) -> Any:
        lease_id = put.lease.lease_id if put.lease else 0
        return rpc.PutRequest(key=self._keys.far(put.key), value=put.value, lease=lease_id)

    def _compare(self, condition: Condition) -> Any:
        key = self._keys.far(condition.key)
        if condition.value is None:
            return rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.EQUAL, version=0)
        return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=condition.value)
