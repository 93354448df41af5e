"""A kept etcd with users: a run whose keys its user may not write is refused, and the user and the keys are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.errors import CoordinatorUnavailableError
from engine.core.hosts.host_options import RegisteredHost
from engine.core.kv import Lease
from engine.runtime.agent.host_registry import HostRegistry
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import EndpointClient, EtcdKV, rpc
from engine.runtime.store.etcd_settings import EtcdSettings, Secret

ROOT, GUEST = "correct horse", "battery staple"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(name="guarded", scope="module")
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdSettings]:
    """Returns how to reach an etcd whose user `guest` may read all runs, and write one that is called `mine`."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        settings = server.settings()
        client = EndpointClient(settings.endpoints[0], timeout=5)
        auth = rpc.AuthStub(client.channel)
        for user, password in (("root", ROOT), ("guest", GUEST)):
            account = rpc.AuthUserAddRequest(name=user, password=password)
            auth.UserAdd(account, wait_for_ready=True)  # its socket is there a moment before it listens
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=user))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=user))
        for kind, begin, end in ((0, b"/bamboo/", b"/bamboo0"), (2, b"/bamboo/mine/", b"/bamboo/mine0")):
            may = {"permType": kind, "key": begin, "range_end": end}
            auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="guest", perm=may))
        auth.AuthEnable(rpc.AuthEnableRequest())
        yield settings
        client.close()


def come(settings: EtcdSettings, run: str) -> None:
    """Registers a host in a run."""
    kv = EtcdKV(settings, f"/bamboo/{run}/", 2.0)
    try:
        lease = kv.grant(5)
        HostRegistry(kv, RegisteredHost("a", "a1", "10.0.0.1", lease.lease_id, {}), Lease(lease.lease_id, 5)).register()
    finally:
        kv.close()


def test_a_prefix_that_may_not_be_written_is_named_with_its_user(guarded: EtcdSettings) -> None:
    guest = replace(guarded, user="guest", password=Secret(GUEST))
    come(guest, "mine")
    told = r"permission denied; user 'guest' needs a role that may read and write the keys under /bamboo/theirs/$"
    with pytest.raises(CoordinatorUnavailableError, match=told):
        come(guest, "theirs")


def test_who_has_no_user_is_told_how_to_name_one(guarded: EtcdSettings) -> None:
    with pytest.raises(
        CoordinatorUnavailableError, match=r"requires a user: set BAMBOO_ETCD_USER, and BAMBOO_ETCD_PASS"
    ):
        come(guarded, "mine")


def test_a_wrong_password_is_refused_and_not_shown(guarded: EtcdSettings) -> None:
    with pytest.raises(CoordinatorUnavailableError, match="authentication failed") as caught:
        come(replace(guarded, user="guest", password=Secret(ROOT)), "mine")
    assert ROOT not in str(caught.value)
