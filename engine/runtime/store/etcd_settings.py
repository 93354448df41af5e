"""Settings of the coordinator's store: endpoints, TLS, user and password, checked together; the private one's socket.

Rules: a password is a `Secret`, which `print` and `repr` do not show. No data leave this host in clear text unless the
user allows it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISSOCK

from engine.core.errors import CoordinatorUnavailableError, Problem, UserError

ENDPOINTS = "BAMBOO_ETCD"
CA_FILE = "BAMBOO_ETCD_CA"
CERT_FILE = "BAMBOO_ETCD_CERT"
KEY_FILE = "BAMBOO_ETCD_KEY"
USER = "BAMBOO_ETCD_USER"
PASSWORD = "BAMBOO_ETCD_PASSWORD"  # noqa: S105 the name of the variable, not a password
PASSWORD_FILE = "BAMBOO_ETCD_PASSWORD_FILE"  # noqa: S105
SOCKET = "client:0"  # the name of a private etcd's socket; etcd wants a name and a number
VARIABLES = (ENDPOINTS, CA_FILE, CERT_FILE, KEY_FILE, USER, PASSWORD, PASSWORD_FILE)

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_FORM = "host:port[,host:port]"


class Secret:
    """A text that only `reveal` returns."""

    __slots__ = ("_text",)

    def __init__(self, text: str):
        self._text = text

    def reveal(self) -> str:
        """Returns the text."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "Secret(***)" if self._text else "Secret()"


_NO_SECRET = Secret("")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host, by name or address, and a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether this is definitely the local host."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SocketEndpoint:
    """The socket of a private etcd in its data folder, which only its user can enter."""

    folder: Path

    def open_folder(self) -> int:
        """Returns a descriptor of the folder of its socket; raises CoordinatorUnavailableError if others can enter."""
        fd = -1
        try:
            fd = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            folder, place = os.fstat(fd), os.stat(SOCKET, dir_fd=fd, follow_symlinks=False)
            is_own = folder.st_uid == place.st_uid == os.geteuid()
            if not is_own or folder.st_mode & 0o077 or not S_ISSOCK(place.st_mode):
                raise PermissionError(0, "it is not private to this user")
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            reason = str(error.strerror).lower()
            raise CoordinatorUnavailableError(f"etcd was not contacted at {self}: {reason}") from error
        return fd

    def __str__(self) -> str:
        return f"unix:{self.folder / SOCKET}"


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Settings of a client of etcd. A `ca_file` means TLS; `cert_file` and `key_file` are the client's own."""

    endpoints: tuple[Endpoint | SocketEndpoint, ...]
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password: Secret = _NO_SECRET

    def nearest(self, address: str) -> EtcdSettings:
        """Returns the settings for the host of an address: its own member comes first, and ends with it only."""
        ordered = sorted(self.endpoints, key=lambda endpoint: not is_at(endpoint, address))
        return replace(self, endpoints=tuple(ordered))


def is_at(endpoint: Endpoint | SocketEndpoint, address: str) -> bool:
    """Returns whether an endpoint is on the host with an address."""
    return isinstance(endpoint, Endpoint) and (endpoint.is_loopback or endpoint.host == address)


def private_settings(logs: Path) -> EtcdSettings:
    """Returns the settings for the private etcd of the run with these logs, without user and password."""
    return EtcdSettings((SocketEndpoint(logs.absolute() / "etcd"),))


def read_settings(
    endpoints: str, environment: Mapping[str, str], *, allow_plain_http: bool = False, source: str = "--etcd"
) -> EtcdSettings:
    """Returns the settings for `endpoints` of `source` and the `environment`; raises UserError."""
    problems: list[Problem] = []
    values = {name: environment.get(name, "") for name in VARIABLES}
    parsed = _parse_endpoints(endpoints, source, problems)
    for name in (CA_FILE, CERT_FILE, KEY_FILE):
        if values[name]:
            _read(name, values[name], problems)
    password = _find_password(values, problems)
    problems += _unpaired(values)
    remote = [str(endpoint) for endpoint in parsed if not endpoint.is_loopback]
    if remote and not values[CA_FILE] and not allow_plain_http:
        hint = f"set {CA_FILE} for TLS, or pass --etcd-plain-http to send everything in clear text"
        problems.append(Problem(source, "TLS, as the endpoint is not on this host", ", ".join(remote), hint))
    if problems:
        raise UserError(problems)
    files = (values[CA_FILE], values[CERT_FILE], values[KEY_FILE])
    return EtcdSettings(tuple(parsed), *files, values[USER], password)


def _parse_endpoints(text: str, source: str, problems: list[Problem]) -> list[Endpoint]:
    endpoints: list[Endpoint] = []
    for part in text.split(","):
        endpoint = _parse_endpoint(part)
        if endpoint is None:
            hint = "user and password go into the environment" if "@" in part else "without http://" * ("/" in part)
            # The text before an @ may be a password.
            problems.append(Problem(source, _FORM, repr(part.rpartition("@")[2]), hint))
        elif endpoint in endpoints:
            problems.append(Problem(source, "each endpoint once", repr(part)))
        else:
            endpoints.append(endpoint)
    return endpoints


def _parse_endpoint(text: str) -> Endpoint | None:
    host, _, port = text.rpartition(":")
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        return None
    try:
        if host.startswith("[") and host.endswith("]"):
            return Endpoint(str(ipaddress.IPv6Address(host[1:-1])), int(port))
        if re.fullmatch(r"[0-9.]+", host):
            return Endpoint(str(ipaddress.IPv4Address(host)), int(port))
    except ValueError:
        return None
    return Endpoint(host.lower(), int(port)) if _HOST_NAME.fullmatch(host) else None


def _read(name: str, path: str, problems: list[Problem]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error.strerror).lower() if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(Problem(name, "a file that can be read", repr(path), reason))
        return ""


def _find_password(values: Mapping[str, str], problems: list[Problem]) -> Secret:
    path = values[PASSWORD_FILE]
    if not path:
        return Secret(values[PASSWORD])
    if values[PASSWORD]:
        problems.append(Problem(PASSWORD_FILE, f"only one of it and {PASSWORD}", "both"))
    num_before = len(problems)
    password = Secret(_read(PASSWORD_FILE, path, problems).rstrip("\r\n"))
    if not password and len(problems) == num_before:
        problems.append(Problem(PASSWORD_FILE, "a file that holds the password", repr(path), "it is empty"))
    return password


def _unpaired(values: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each variable that needs another one which is not set."""
    password = PASSWORD_FILE if values[PASSWORD_FILE] else PASSWORD
    needs = (
        (USER, password, f"{PASSWORD} or {PASSWORD_FILE}"),
        (password, USER, USER),
        (CERT_FILE, KEY_FILE, KEY_FILE),
        (KEY_FILE, CERT_FILE, CERT_FILE),
        (CERT_FILE, CA_FILE, CA_FILE),
    )
    return [
        Problem(variable, f"{name} with it", "nothing")
        for variable, other, name in needs
        if values[variable] and not values[other]
    ]
