"""The back ends of the coordinator's store as a test drives them: the double, and a real etcd."""

from __future__ import annotations

import select
import shutil
import signal
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.core.kv import KV, Lease
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import DEADLINE_S, EndpointClient, EtcdKV
from engine.runtime.store.etcd_settings import EtcdSettings
from tests.doubles.kv_double import Fault, StoreDouble
from tests.doubles.kv_double_client import ClientDouble

WAIT_S = 10.0


class Backend(ABC):
    """A store with clients under one root of its own."""

    def __init__(self) -> None:
        self.root = f"/bamboo/test-{uuid.uuid4().hex}/"
        self.deadline_s = DEADLINE_S  # of clients while the store is down; the double counts calls instead
        self.clients: list[KV] = []

    def client(self, root: str = "") -> KV:
        """Returns one more client, under the back end's root or another."""
        self.clients.append(self.new_client(root or self.root))
        return self.clients[-1]

    def close(self) -> None:
        """Closes all clients."""
        for client in self.clients:
            client.close()

    @abstractmethod
    def new_client(self, root: str) -> KV:
        """Makes a client."""

    @abstractmethod
    def all_keys(self) -> set[str]:
        """Returns every key of the store, absolute."""

    @abstractmethod
    def write_foreign(self, key: bytes, value: bytes) -> None:
        """Writes an absolute key as somebody else would."""

    @abstractmethod
    def lose(self, client: KV, *faults: Fault) -> None:
        """Has the next calls of a client suffer faults, one each, and none after them."""

    @abstractmethod
    def outlast(self, lease: Lease) -> None:
        """Lets enough time pass for a lease to expire."""

    @abstractmethod
    def go_down(self) -> None:
        """Stops answering."""

    @abstractmethod
    def come_back(self, *, empty: bool = False) -> None:
        """Answers again."""


class DoubleBackend(Backend):
    """The double."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StoreDouble()

    def new_client(self, root: str) -> KV:
        return ClientDouble(self.store, root)

    def all_keys(self) -> set[str]:
        return set(self.store.items)

    def write_foreign(self, key: bytes, value: bytes) -> None:
        ClientDouble(self.store, "").put(key.decode("utf-8", "surrogateescape"), value)

    def lose(self, client: KV, *faults: Fault) -> None:
        self.store.inject(*faults)

    def outlast(self, lease: Lease) -> None:
        self.store.advance(lease.ttl_s)

    def go_down(self) -> None:
        self.store.go_down()

    def come_back(self, *, empty: bool = False) -> None:
        self.store.come_back(empty=empty)


class LostCall(grpc.RpcError):  # type: ignore[misc]
    """What gRPC raises when a connection breaks before the reply is there."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the connection broke"


@dataclass
class Due:
    """The faults of the calls to come: of the method that is called first, not of the reads between its attempts."""

    faults: deque[Fault] = field(default_factory=deque)
    method: str = ""

    def next(self, method: str) -> Fault | None:
        """Returns the fault that a call suffers."""
        self.method = self.method or method
        return self.faults.popleft() if self.faults and method == self.method else None


def suffering(name: str, method: Callable[..., Any], due: Due) -> Callable[..., Any]:
    """Returns a method of a stub that suffers what is due."""

    def call(*arguments: Any, **options: Any) -> Any:
        fault = due.next(name)
        if fault is Fault.LOSE_REQUEST:
            raise LostCall
        reply = method(*arguments, **options)
        if fault is Fault.LOSE_REPLY:
            raise LostCall
        return reply

    return call


class EtcdBackend(Backend):
    """A real etcd; `server` is given where a test may stop it."""

    def __init__(self, settings: EtcdSettings, server: EmbeddedEtcd | None = None):
        super().__init__()
        self.settings = settings
        self._server = server
        self._due: dict[EtcdKV, Due] = {}
        self.bare = EndpointClient(settings.endpoints[0], timeout=5)

    def close(self) -> None:
        super().close()
        self.bare.close()

    def new_client(self, root: str) -> KV:
        return EtcdKV(self.settings, root)

    def all_keys(self) -> set[str]:
        return {meta.key.decode("utf-8", "surrogateescape") for _, meta in self.bare.get_all()}

    def write_foreign(self, key: bytes, value: bytes) -> None:
        self.bare.put(key, value)

    def lose(self, client: KV, *faults: Fault) -> None:
        assert isinstance(client, EtcdKV)
        if client not in self._due:
            self._due[client] = Due()
            methods = client._calls._connect(self.settings.endpoints[0]).methods
            for name in list(methods):
                methods[name] = suffering(name, methods[name], self._due[client])
        self._due[client].faults, self._due[client].method = deque(faults), ""

    def outlast(self, lease: Lease) -> None:
        until_s = time.monotonic() + lease.ttl_s + WAIT_S
        while self.bare.get_lease_info(lease.lease_id).TTL != -1:
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def go_down(self) -> None:
        assert self._server is not None
        self._be_patient(self.deadline_s)
        signal.pidfd_send_signal(self._server.pidfd, signal.SIGKILL)
        select.select([self._server.pidfd], [], [])

    def come_back(self, *, empty: bool = False) -> None:
        assert self._server is not None
        if empty:
            shutil.rmtree(self._server._data / "member")
        self._server.start()
        assert self._server.settings() == self.settings
        self._be_patient(DEADLINE_S)

    def _be_patient(self, deadline_s: float) -> None:
        for client in self.clients:
            assert isinstance(client, EtcdKV)
            client._calls.deadline_s = deadline_s
