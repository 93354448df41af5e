"""Where etcd is and how to be let in: what is accepted, every mistake that is not, and that no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings, Secret, read_settings
from tests.looped import looped

PASSWORD = "s3cret-word"  # noqa: S105 made up


def problems_of(endpoints: str, environment: dict[str, str] | None = None, *, plain: bool = True) -> list[str]:
    """Returns what is wrong with settings."""
    with pytest.raises(UserError) as caught:
        read_settings(endpoints, environment or {}, allow_plain_http=plain)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("localhost:2379", "localhost:2379"),
        ("127.0.0.1:1,127.0.0.2:65535", "127.0.0.1:1 127.0.0.2:65535"),
        ("[::1]:2379", "[::1]:2379"),
        ("[0:0::1]:2379", "[::1]:2379"),
        ("Etcd-0.Example.ORG:2379", "etcd-0.example.org:2379"),
    ],
)
def test_endpoints_that_are_accepted(text: str, shown: str) -> None:
    settings = read_settings(text, {}, allow_plain_http=True)
    assert " ".join(str(endpoint) for endpoint in settings.endpoints) == shown


@looped(
    "text",
    [
        *("", "host", "host:", ":2379", "host:0", "host:65536", "host:123456", "host:-1", "host:+1", "host: 1"),
        *("host:2379,", " host:2379", "ho st:2379", "-host:2379", "host.:2379", "host/:2379", "ho_st:2379"),
        *("1.2.3:2379", "256.1.1.1:2379", "::1:2379", "[::g]:2379", "[1.2.3.4]:2379", "host:2379:1", "host:\u0662"),
    ],
)
def test_endpoints_that_are_not(text: str) -> None:
    assert all("--etcd: expected host:port[,host:port], found" in problem for problem in problems_of(text))


def test_every_bad_endpoint_is_named() -> None:
    assert problems_of("a:1,b,c:0,a:1,http://d:1") == [
        "--etcd: expected host:port[,host:port], found 'b'",
        "--etcd: expected host:port[,host:port], found 'c:0'",
        "--etcd: expected each endpoint once, found 'a:1'",
        "--etcd: expected host:port[,host:port], found 'http://d:1' (without http://)",
    ]


def test_plain_http_to_another_host_needs_to_be_asked_for() -> None:
    (problem,) = problems_of("localhost:1,10.0.0.1:2379,etcd:2379", plain=False)
    assert "not on this host, found 10.0.0.1:2379, etcd:2379" in problem
    assert "--etcd-plain-http" in problem
    assert read_settings("10.0.0.1:2379", {}, allow_plain_http=True)
    assert read_settings("127.8.9.1:2379,[::1]:1,localhost:1", {})


def test_tls_files(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("CA", "CERT", "KEY")}
    environment = {f"BAMBOO_ETCD_{name}": path for name, path in files.items()}
    assert [problem.partition(":")[0] for problem in problems_of("a:1", environment)] == list(environment)
    for path in files.values():
        Path(path).write_text("")
    settings = read_settings("etcd:2379", environment)
    assert (settings.ca_file, settings.cert_file, settings.key_file) == tuple(files.values())
    del environment["BAMBOO_ETCD_KEY"]
    assert problems_of("a:1", environment) == ["BAMBOO_ETCD_CERT: expected BAMBOO_ETCD_KEY with it, found nothing"]
    del environment["BAMBOO_ETCD_CA"]
    assert len(problems_of("a:1", environment)) == 2


def test_a_password_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    user = {"BAMBOO_ETCD_USER": "ann"}
    for given in ({"BAMBOO_ETCD_PASSWORD": PASSWORD}, {"BAMBOO_ETCD_PASSWORD_FILE": str(path)}):
        settings = read_settings("localhost:1", user | given)
        assert (settings.user, settings.password.reveal()) == ("ann", PASSWORD)
        assert PASSWORD not in repr(settings) + str(settings)
        assert problems_of("a:1", given) == [f"{next(iter(given))}: expected BAMBOO_ETCD_USER with it, found nothing"]
    (problem,) = problems_of("a:1", user)
    assert "BAMBOO_ETCD_USER: expected BAMBOO_ETCD_PASSWORD or BAMBOO_ETCD_PASSWORD_FILE with it" in problem


def test_mistakes_with_a_password_do_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    user = {"BAMBOO_ETCD_USER": "ann"}
    both = user | {"BAMBOO_ETCD_PASSWORD": PASSWORD, "BAMBOO_ETCD_PASSWORD_FILE": str(tmp_path / "never")}
    told = [
        *problems_of(f"ann:{PASSWORD}@host:2379"),
        *problems_of(f"http://ann:{PASSWORD}@host:2379", both),
        *problems_of("a:1", user | {"BAMBOO_ETCD_PASSWORD_FILE": str(tmp_path / "empty")}),
        *problems_of("a:1", user | {"BAMBOO_ETCD_PASSWORD_FILE": str(tmp_path / "binary")}),
    ]
    assert [problem.rpartition("(")[2] for problem in told] == [
        "user and password go into the environment)",
        "user and password go into the environment)",
        "BAMBOO_ETCD_PASSWORD_FILE: expected only one of it and BAMBOO_ETCD_PASSWORD, found both",
        "no such file or directory)",
        "it is empty)",
        "it is not UTF-8 text)",
    ]
    assert PASSWORD not in "".join(told)


def test_a_secret_is_shown_to_nobody_who_prints() -> None:
    secret = Secret(PASSWORD)
    settings = EtcdSettings((Endpoint("a", 1),), user="ann", password=secret)
    assert PASSWORD not in f"{secret} {secret!r} {settings} {settings!r} %s" % secret
    assert secret.reveal() == PASSWORD


def test_the_member_on_this_host_comes_first_and_the_others_keep_their_order() -> None:
    settings = read_settings("10.0.0.1:1,10.0.0.2:1,10.0.0.3:1", {}, allow_plain_http=True)
    assert [each.host for each in settings.nearest("10.0.0.2").endpoints if isinstance(each, Endpoint)] == [
        "10.0.0.2",
        "10.0.0.1",
        "10.0.0.3",
    ]
    assert settings.nearest("10.0.0.9") == settings
