"""The traps of the etcd3 package: for each, the naive use that falls in, and the store that does not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from engine.core.errors import CoordinatorUnavailableError, InvariantError, LeaseLostError
from engine.core.kv import Delete, Put, Txn, absent
from engine.runtime.agent.host_registry import new_certificate
from engine.runtime.store.election import Election
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_kv import DEADLINE_S, EndpointClient, EtcdCalls, EtcdKV, KeySpace, etcd3, rpc
from engine.runtime.store.etcd_settings import SOCKET, Endpoint, EtcdSettings, Secret
from tests.runtime.kv_backends import EtcdBackend

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse"  # noqa: S105 made up


@pytest.fixture
def real(etcd: EtcdSettings) -> Iterator[EtcdBackend]:
    """The shared etcd, with the package's own client as `bare`."""
    real = EtcdBackend(etcd)
    yield real
    real.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd that the test may stop."""
    with EmbeddedEtcd(tmp_path / "own") as server:
        yield server


def bare_client(settings: EtcdSettings, **options: Any) -> Any:
    """Returns the package's client."""
    (endpoint,) = settings.endpoints
    return EndpointClient(endpoint, **options)


def hanging(call: Callable[[], object], duration_s: float) -> threading.Thread:
    """Makes a call in a thread, and returns the thread when the call takes longer, as it should."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(duration_s)
    assert thread.is_alive()
    return thread


def stand_still(server: EmbeddedEtcd) -> None:
    """Stops a server, and waits until it stands: until one of its threads has taken the signal, the others go on."""
    signal.pidfd_send_signal(server.pidfd, signal.SIGSTOP)
    (pid,) = re.findall(r"^Pid:\s+(\d+)$", Path(f"/proc/self/fdinfo/{server.pidfd}").read_text(), re.MULTILINE)
    until_s = time.monotonic() + 10
    while not all("\nState:\tT" in status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")):
        assert time.monotonic() < until_s
        time.sleep(0.001)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def test_a_lock_that_is_taken(real: EtcdBackend) -> None:
    name = real.root + "lock"
    assert real.bare.lock(name, ttl=5).acquire()
    with pytest.raises(TypeError):
        real.bare.lock(name, ttl=5).acquire(timeout=1)

    first, second = (Election(real.client(), "coordinator", name, 5) for name in (b"1", b"2"))
    assert first.poll() and not second.poll()
    first.resign()
    assert second.poll()
    second.resign()


def test_the_refresh_of_an_expired_lease(real: EtcdBackend) -> None:
    naive = real.bare.lease(60)
    naive.revoke()
    assert naive.refresh()[0].TTL == 0  # and no exception

    kv = real.client()
    lease = kv.grant(60)
    assert kv.keep_alive(lease)
    kv.revoke(lease)
    assert not kv.keep_alive(lease)


def test_a_put_with_an_expired_lease(real: EtcdBackend) -> None:
    naive = real.bare.lease(60)
    naive.revoke()
    with pytest.raises(grpc.RpcError) as caught:
        real.bare.put(real.root + "a", "", lease=naive)
    assert not isinstance(caught.value, etcd3.Etcd3Exception)

    kv = real.client()
    lease = kv.grant(60)
    kv.revoke(lease)
    with pytest.raises(LeaseLostError, match="lease"):
        kv.put("a", b"", lease)


def test_a_server_that_does_not_answer(server: EmbeddedEtcd) -> None:
    settings = server.settings()
    naive, kv = bare_client(settings), EtcdKV(settings, "/bamboo/x/", deadline_s=0.5)
    naive.put("/bamboo/x/a", "1")
    kv.put("a", b"1")
    stand_still(server)
    try:
        thread = hanging(lambda: naive.get("/bamboo/x/a"), 1.2)
        started_s = time.monotonic()
        with pytest.raises(CoordinatorUnavailableError, match="does not answer"):
            kv.get("a")
        assert time.monotonic() - started_s < DEADLINE_S  # its own deadline, not the usual one
    finally:
        signal.pidfd_send_signal(server.pidfd, signal.SIGCONT)
    assert kv.get("a") is not None
    kv.close()
    thread.join()
    naive.close()


def test_one_endpoint_of_several_is_there(etcd: EtcdSettings) -> None:
    dead = Endpoint("127.0.0.1", free_ports(1)[0])
    naive = bare_client(EtcdSettings((dead,)), timeout=1)
    with pytest.raises(etcd3.Etcd3Exception):
        naive.get("/bamboo/x/a")

    kv = EtcdKV(EtcdSettings((dead, *etcd.endpoints)), "/bamboo/two/")
    assert kv.put("a", b"") > 0
    kv.close()


def test_a_member_of_a_cluster_dies(tmp_path: Path) -> None:
    peers, clients = free_ports(3), free_ports(3)
    cluster = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    members = []
    for number, (peer, client) in enumerate(zip(peers, clients, strict=True)):
        addresses = {"peer": f"http://127.0.0.1:{peer}", "client": f"http://127.0.0.1:{client}"}
        flags = [f"--name=m{number}", f"--initial-cluster={cluster}", "--initial-cluster-token=cluster"]
        flags += [f"--listen-{kind}-urls={address}" for kind, address in addresses.items()]
        flags += [f"--initial-advertise-peer-urls={addresses['peer']}", "--heartbeat-interval=50"]
        members.append(EmbeddedEtcd(tmp_path / str(number), (*flags, "--election-timeout=500")))
        members[-1].start()
    settings = EtcdSettings(tuple(Endpoint("127.0.0.1", port) for port in clients))
    kv = EtcdKV(settings, "/bamboo/cluster/")
    kv.put("a", b"0")
    signal.pidfd_send_signal(members[0].pidfd, signal.SIGKILL)
    assert all(kv.transact(Txn((), (Put("a", str(number).encode()),))).succeeded for number in range(3))
    found = kv.get("a")
    assert found is not None and (found.value, found.version) == (b"2", 4)
    kv.close()
    for member in members:
        member.stop()


FORK = """
import os, signal, sys, time
from engine.core.errors import InvariantError
from engine.runtime.store.etcd_kv import EtcdKV
from engine.runtime.store.etcd_kv import EndpointClient
from engine.runtime.store.etcd_settings import EtcdSettings, SocketEndpoint
from pathlib import Path
kind, endpoint = sys.argv[1], SocketEndpoint(Path(sys.argv[2]))
if kind == "naive":
    client = EndpointClient(endpoint)
    client.add_watch_callback("/bamboo/fork/a", print)
    calls = [lambda: client.add_watch_callback("/bamboo/fork/b", print)]
else:
    client = EtcdKV(EtcdSettings((endpoint,)), "/bamboo/fork/")
    client.put("a", b"")
    calls = [lambda: client.get("a"), lambda: client.put("a", b"")]
child = os.fork()
if child == 0:
    signal.alarm(1)
    refused = 0
    for call in calls:
        try:
            call()
        except InvariantError as error:
            refused += "before a fork" in str(error)
    os._exit(refused)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
"""


def fork_with_a_client_open(kind: str, etcd: EtcdSettings) -> int:
    """Returns how the forked child ended that used its parent's client."""
    command = [sys.executable, "-c", FORK, kind, str(etcd.endpoints[0]).removeprefix("unix:").removesuffix("/client:0")]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=20, check=False)
    return child.returncode


def test_a_fork_with_a_client_open(etcd: EtcdSettings) -> None:
    assert fork_with_a_client_open("naive", etcd) == 256 - signal.SIGALRM  # it hung until the alarm
    assert fork_with_a_client_open("ours", etcd) == 2  # calls, all refused


def test_a_limit(real: EtcdBackend) -> None:
    kv = real.client()
    for number in range(10):
        kv.put(f"m/{number}", b"")
    assert len(list(real.bare.get_prefix(real.root, limit=4))) == 10


def test_a_proxy_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint("127.0.0.1", free_ports(1)[0])
    with EmbeddedEtcd(tmp_path, (f"--listen-client-urls=unix://{SOCKET},http://{endpoint}",)) as server:
        server.settings()
        _check_proxies_are_ignored(EtcdSettings((endpoint,)), monkeypatch)


def _check_proxies_are_ignored(etcd: EtcdSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    naive = bare_client(etcd, timeout=1)
    with pytest.raises(etcd3.Etcd3Exception):
        naive.get("/bamboo/x/a")
    naive.close()

    kv = EtcdKV(etcd, "/bamboo/proxy/", deadline_s=2)
    kv.get("a")
    kv.close()


def enable_users(settings: EtcdSettings) -> None:
    """Has an etcd ask for a password."""
    client = bare_client(settings, timeout=5)
    auth = rpc.AuthStub(client.channel)
    # The socket is there a moment before etcd listens on it.
    auth.UserAdd(rpc.AuthUserAddRequest(name="root", password=PASSWORD), wait_for_ready=True, timeout=10)
    auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
    auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
    auth.AuthEnable(rpc.AuthEnableRequest())
    client.close()


def log_everyone_out(settings: EtcdSettings) -> None:
    """Has an etcd forget who has logged in, by giving the user the password that it has."""
    calls = EtcdCalls(settings)
    (connection,) = (calls._connect(endpoint) for endpoint in settings.endpoints)
    channel = connection.close.__self__.channel  # type: ignore[attr-defined]
    request = rpc.AuthUserChangePasswordRequest(name=settings.user, password=PASSWORD)
    rpc.AuthStub(channel).UserChangePassword(request, timeout=5, metadata=connection.metadata)
    calls.close()


def test_a_user_with_a_password_and_a_server_that_forgets_who_has_logged_in(server: EmbeddedEtcd) -> None:
    plain = server.settings()
    enable_users(plain)
    naive = bare_client(plain, timeout=1, user="root", password=PASSWORD)
    with pytest.raises(grpc.RpcError):
        naive.get("/bamboo/x/a")
    naive.close()

    settings = EtcdSettings(plain.endpoints, user="root", password=Secret(PASSWORD))
    kv = EtcdKV(settings, "/bamboo/x/")
    lease = kv.grant(60)
    kv.put("a", b"1", lease)
    signal.pidfd_send_signal(server.pidfd, signal.SIGKILL)
    server.start()
    server.settings()
    kv.put("a", b"2")
    assert kv.keep_alive(lease)
    log_everyone_out(settings)
    assert kv.keep_alive(lease)
    log_everyone_out(settings)
    assert kv.transact(Txn((), (Delete("a"),))).succeeded
    kv.close()


@pytest.mark.parametrize(("user", "password"), [("root", "wrong horse"), ("nobody", PASSWORD), ("", "")])
def test_nobody_gets_in_or_reads_a_password(
    server: EmbeddedEtcd, caplog: pytest.LogCaptureFixture, user: str, password: str
) -> None:
    plain = server.settings()
    enable_users(plain)
    settings = EtcdSettings(plain.endpoints, user=user, password=Secret(password))
    kv = EtcdKV(settings, "/bamboo/x/", deadline_s=1)
    with pytest.raises(CoordinatorUnavailableError, match=r"refused: etcdserver: ") as caught:
        kv.transact(Txn((), (Put("a", b""),)))
    told = "".join(map(repr, (settings, kv, caught.value, vars(kv), vars(kv._calls)))) + caplog.text
    assert not password or password not in told
    kv.close()


def certificate(folder: Path, name: str, *signed_by: str) -> None:
    """Makes a key and a certificate for 127.0.0.1; signed by itself, or by a name made before."""
    made = new_certificate(name)
    for authority in signed_by:
        issuer = x509.load_pem_x509_certificate((folder / f"{authority}.crt").read_bytes())
        issuer_key = load_pem_private_key((folder / f"{authority}.key").read_bytes(), None)
        own = x509.load_pem_x509_certificate(made.certificate.encode())
        address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(own.subject).issuer_name(issuer.subject)
        builder = builder.public_key(own.public_key()).serial_number(own.serial_number)
        builder = builder.not_valid_before(own.not_valid_before_utc).not_valid_after(own.not_valid_after_utc)
        builder = builder.add_extension(address, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        signed = builder.sign(issuer_key, SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]
        made = made._replace(certificate=signed.decode())
    (folder / f"{name}.crt").write_text(made.certificate)
    (folder / f"{name}.key").write_text(made.key)


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    certificate(tmp_path, "authority")
    certificate(tmp_path, "server", "authority")
    certificate(tmp_path, "client", "authority")
    certificate(tmp_path, "stranger")
    paths = {path.name: str(path) for path in tmp_path.iterdir()}
    endpoint = Endpoint("127.0.0.1", free_ports(1)[0])
    url = f"https://{endpoint}"
    flags = (
        *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}", "--client-cert-auth"),
        *(f"--cert-file={paths['server.crt']}", f"--key-file={paths['server.key']}"),
        f"--trusted-ca-file={paths['authority.crt']}",
    )
    with EmbeddedEtcd(tmp_path / "own", flags):
        own = (paths["client.crt"], paths["client.key"])
        kv = EtcdKV(EtcdSettings((endpoint,), paths["authority.crt"], *own), "/bamboo/tls/")
        assert kv.put("a", b"") > 0
        kv.close()
        for strange in (
            EtcdSettings((endpoint,)),
            EtcdSettings((endpoint,), paths["stranger.crt"], *own),
            EtcdSettings((endpoint,), paths["authority.crt"], paths["stranger.crt"], paths["stranger.key"]),
        ):
            kv = EtcdKV(strange, "/bamboo/tls/", deadline_s=0.5)
            with pytest.raises(CoordinatorUnavailableError):
                kv.get("a")
            kv.close()


def test_threads_and_descriptors_go_when_a_client_is_closed(etcd: EtcdSettings, capfd: pytest.CaptureFixture) -> None:
    def open_and_close() -> None:
        kv = EtcdKV(etcd, "/bamboo/x/")
        kv.transact(Txn((absent("never"),), ()))
        kv.close()

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        open_and_close()
    before = held()
    for _ in range(10):
        open_and_close()
    until_s = time.monotonic() + 5
    while held() > before and time.monotonic() < until_s:
        time.sleep(0.01)  # gRPC closes its sockets a moment later
    assert held() <= before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("root", ["/", "/bamboo/", "/bamboo/x", "/bamboo//", "/other/x/", "/bamboo/x/y/"])
def test_a_root_that_is_not_of_one_run_is_refused(etcd: EtcdSettings, root: str) -> None:
    with pytest.raises(InvariantError, match="keys stand under"):
        EtcdKV(etcd, root)


def test_no_range_leaves_the_root() -> None:
    keys = KeySpace("/bamboo/x/")
    assert keys.far_range("") == (b"/bamboo/x/", b"/bamboo/x0")
    assert keys.far_range("m/") == (b"/bamboo/x/m/", b"/bamboo/x/m0")
    assert keys.far_range("m\udcff") == (b"/bamboo/x/m\xff", b"/bamboo/x/n")
    with pytest.raises(InvariantError):
        keys.far("")
    with pytest.raises(InvariantError):
        keys.near(b"/bamboo/y/a")
