"""The hosts of a run in the store: each registers, one of them is elected, and the outcome stays for an hour.

    hosts/NAME     a host, on its lease
    elected        the host that coordinates, its address, the hosts of the run and the certificate, on its lease; when
                   that has ended, another host of the run takes its place
    begun          that host and the hosts of the run, without a lease: it stays until the run is over
    refused        why these hosts do not begin, for those of them that have not seen it; on a lease of seconds
    outcome        the exit code of the run, and words; on a lease of an hour

Rules: the run has the hosts that came first. A host that comes later is told who has the run. A name that another
incarnation holds is refused. Who may read these keys may be a host of the run: the store is the root of trust.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from ipaddress import ip_address
from typing import NamedTuple, NoReturn, TypeVar

from engine.codec.values import read, text_of
from engine.core.deadlines import LEASE_MORE, RENEWAL, RoundTrips
from engine.core.errors import (
    CoordinatorUnavailableError,
    EnvironmentLacksError,
    ExitCode,
    LeaseLostError,
    Problem,
    UserError,
)
from engine.core.hosts.ends import LeaseTime
from engine.core.hosts.host_options import CLEAR, RegisteredHost, differences
from engine.core.kv import KV, Lease, Put, Txn, absent
from engine.runtime.process.interrupts import rest

# The lease of a host, kept by a thread of its own: no other call to the store, and no work of the host, holds it up.
#
# Rule: a host that cannot renew its lease is gone before the lease can expire: it ends its workers and itself, whatever
# else it does (`engine/core/hosts/ends.py`). Time counts from the sending of a renewal, and suspension counts too.


_LOOK_S = 0.05


def boottime_ns() -> int:
    """Returns the time of a clock that goes on while the host is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def lease_s(kv: KV, asked_s: int) -> int:
    """Returns the seconds of a lease: more than those asked for, if the store is slow to answer."""
    took_ns = []
    for _ in range(3):  # the first call has to connect
        began_ns = boottime_ns()
        kv.get(_OUTCOME)
        took_ns.append(boottime_ns() - began_ns)
    return asked_s + round(LEASE_MORE.after(min(took_ns)) / 1e9)


class KeptLease:
    """A lease of the store; a thread ends the workers when it cannot be kept, and then this process."""

    def __init__(self, kv: KV, ttl_s: int, allow: Callable[[float], object] = lambda seconds: None):
        """`allow` sets how many seconds a renewal may take, which follows those before it; the grant takes its time."""
        self._allow, self._answers = allow, RoundTrips()
        self._end_workers: Callable[[str], None] = lambda why: None
        self._kv = kv
        sent_ns = boottime_ns()
        self.lease: Lease = kv.grant(ttl_s)
        self._time = LeaseTime(ttl_s * 1_000_000_000, sent_ns)
        self._allow_next(RENEWAL.usual_ns)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="lease", daemon=True) for work in (self._renew, self._watch)
        ]
        for each in self._threads:
            each.start()

    def cover(self, end_workers: Callable[[str], None]) -> None:
        """Ends workers by this call from now on, with the reason in words."""
        self._end_workers = end_workers

    def _renew(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            sent_ns = boottime_ns()
            self._end_if_late(sent_ns)  # before it asks: its workers have computed for too long already
            if sent_ns < self._time.renew_ns:
                continue
            try:
                if not self._kv.keep_alive(self.lease) and not self._is_over.is_set():
                    self._end("the lease of this host has expired, or was revoked: the run continues without it")
                self._time = self._time.renewed(sent_ns)
                self._answers = self._answers.with_one(boottime_ns() - sent_ns)
                allowed_ns = RENEWAL.after(self._answers.worst_ns)
            except (CoordinatorUnavailableError, LeaseLostError):
                allowed_ns = RENEWAL.most_ns  # tried again, until the time is over
            self._allow_next(allowed_ns)

    def _allow_next(self, allowed_ns: int) -> None:
        self._allow(min(allowed_ns, self._time.longest_call_ns) / 1e9)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._end_if_late(boottime_ns())

    def _end_if_late(self, now_ns: int) -> None:
        if now_ns >= self._time.end_ns:
            self._end("the lease of this host could not be renewed in time")

    def _end(self, why: str) -> NoReturn:
        self._end_workers(why)
        os._exit(ExitCode.FENCED)

    @property
    def unrenewed_s(self) -> float:
        """The seconds since the sending of the last renewal that was answered."""
        return (boottime_ns() - self._time.sent_ns) / 1e9

    def close(self) -> None:
        """Gives the lease back, and with it all its keys; raises CoordinatorUnavailableError."""
        self._is_over.set()
        for each in self._threads:
            each.join()
        self._kv.revoke(self.lease)


# The certificate of a run: one key pair, which each host of the run has and no other one.
#
# Rules: both are made in memory, and nothing of them stays on a disk. Both ends of a stream, and of a link between
# workers of two hosts, show the certificate, and take no other one. It has no end and no begin that matters, as the
# clocks of hosts differ: it is forgotten with the run.

NAME = "bamboo"  # in the certificate
_FROM, _TO = datetime(2000, 1, 1), datetime(2099, 12, 31, 23, 59, 59)


class RunCertificate(NamedTuple):
    """The certificate and its key, each as PEM."""

    certificate: str
    key: str


def new_certificate(name: str = NAME, addresses: Sequence[str] = ()) -> RunCertificate:
    """Makes a certificate that is signed by its own key, for a name and for IP addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.DNSName(name), *(x509.IPAddress(ip_address(address)) for address in addresses)]
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_FROM).not_valid_after(_TO)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return RunCertificate(
        builder.sign(key, hashes.SHA256()).public_bytes(pem).decode(),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain).decode(),
    )


def network_of(certificate: RunCertificate, transfers: str) -> dict[str, str]:
    """Returns what the links between hosts are secured with: nothing in a network that the user trusts."""
    return {} if transfers == CLEAR else certificate._asdict()


_HOSTS, _ELECTED, _BEGUN, _REFUSED, _OUTCOME = "hosts/", "elected", "begun", "refused", "outcome"
_REFUSED_S = 30
_OUTCOME_S = 3600
_ELECTION_S = 10.0
_POLL_S = 0.1
_Awaited = TypeVar("_Awaited")


@dataclass(frozen=True, slots=True)
class ElectedHost:
    """The coordinating host: its address, the run's hosts and certificate, and the decisions it knew when elected."""

    name: str
    incarnation: str
    place: str
    hosts: tuple[str, ...]
    incarnations: tuple[str, ...]  # of these hosts
    certificate: tuple[str, str]
    lease_id: int
    heard: int = 0

    @property
    def made(self) -> RunCertificate:
        """The certificate."""
        return RunCertificate(*self.certificate)


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """The end of a run, as every host tells it."""

    code: int
    words: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for which these hosts, by their incarnations, begin no run."""

    hosts: tuple[str, ...]
    why: str


class HostKeys:
    """The keys of the hosts of one run, for who reads them."""

    def __init__(self, kv: KV):
        self._kv = kv

    def hosts(self) -> list[RegisteredHost]:
        """Returns the hosts that have registered, in the order in which they came."""
        entries = sorted(self._kv.read_prefix(_HOSTS).items, key=lambda entry: entry.create_revision)
        return [read(entry.value, RegisteredHost, "host of a run") for entry in entries]

    def elected(self) -> ElectedHost | None:
        """Returns the host that coordinates the run, None if there is none."""
        entry = self._kv.get(_ELECTED)
        return None if entry is None else read(entry.value, ElectedHost, "elected host")

    def outcome(self) -> HostOutcome | None:
        """Returns the outcome of the run, None if it has none yet."""
        entry = self._kv.get(_OUTCOME)
        return None if entry is None else read(entry.value, HostOutcome, "outcome of a run")

    def end(self) -> HostOutcome | None:
        """Waits for the end of the run, also of one that is refused; returns its outcome, None for no such run.

        Raises CoordinatorUnavailableError if all its hosts are gone, or the store does not answer any more.
        """
        is_known, seen_s, why = False, time.monotonic(), ""
        while True:
            try:
                if (outcome := self.outcome() or self._refusal()) is not None:
                    return outcome
                if self.elected() is not None or self.hosts():
                    is_known, seen_s = True, time.monotonic()
                elif not is_known:
                    return None
                else:
                    why = "no host of the run is left, and none has reported its outcome"
            except CoordinatorUnavailableError as error:
                if not is_known:
                    raise
                why = str(error)
            if time.monotonic() - seen_s > _ELECTION_S:
                raise CoordinatorUnavailableError(why)
            rest(_POLL_S)

    def _refusal(self) -> HostOutcome | None:
        entry = self._kv.get(_REFUSED) if self.elected() is None else None
        if entry is None:
            return None
        return HostOutcome(ExitCode.ENVIRONMENT, f"refused: {read(entry.value, Refusal, 'refusal').why}")


class HostRegistry(HostKeys):
    """The keys of the hosts of one run, as one of these hosts writes them."""

    def __init__(self, kv: KV, own: RegisteredHost, lease: Lease):
        super().__init__(kv)
        self.own = own
        self._lease = lease

    def register(self) -> None:
        """Writes the key of this host; raises UserError for a name that is taken."""
        key = _HOSTS + self.own.name
        outcome = self._kv.transact(Txn((absent(key),), (Put(key, text_of(self.own).encode(), self._lease),)))
        if not outcome.succeeded and outcome.found[0] is not None:
            other = read(outcome.found[0].value, RegisteredHost, "host of a run")
            if other.incarnation != self.own.incarnation:
                hint = f"it is at {other.address}; give each host its own name with --node"
                raise UserError([Problem("--node", "a name that no other host of the run has", self.own.name, hint)])

    def gathered(self, names: Sequence[str], number: int, patience_s: float) -> list[RegisteredHost]:
        """Waits for the hosts of a run, by name if `names`, or until one was elected; returns those that came first.

        Raises EnvironmentLacksError for hosts that are missing or disagree, CoordinatorUnavailableError if a run has
        begun without this host.
        """
        until_s = time.monotonic() + patience_s
        while True:
            hosts = [each for each in self.hosts() if not names or each.name in names][:number]
            begun = self.elected()
            if begun is not None and self.own.name not in begun.hosts:
                who = f"host {begun.name} at {begun.place} coordinates hosts {', '.join(begun.hosts)}"
                raise CoordinatorUnavailableError(f"the run has begun without this host: {who}; choose another --run")
            if len(hosts) == number:
                if unequal := differences(hosts):
                    self._refuse(hosts, "\n".join([*unequal, "all hosts of a run need the same values"]))
                return hosts
            entry = self._kv.get(_REFUSED)
            if entry is not None and self.own.incarnation in (refusal := read(entry.value, Refusal, "refusal")).hosts:
                raise EnvironmentLacksError(refusal.why)
            if time.monotonic() >= until_s:
                raise EnvironmentLacksError(_missing(hosts, names, number, patience_s))
            rest(_POLL_S)

    def _refuse(self, hosts: Sequence[RegisteredHost], why: str) -> NoReturn:
        """Ends the beginning of a run, also for those hosts that look when others of them have left."""
        refusal = Refusal(tuple(each.incarnation for each in hosts), why)
        self._kv.put(_REFUSED, text_of(refusal).encode(), self._kv.grant(_REFUSED_S))
        raise EnvironmentLacksError(why)

    def elect(self, hosts: Sequence[RegisteredHost], place: str, certificate: RunCertificate) -> bool:
        """Tries to make this host the one that coordinates; returns whether it is."""
        names = tuple(each.name for each in hosts)
        lives = tuple(each.incarnation for each in hosts)
        pair, lease_id = (certificate.certificate, certificate.key), self._lease.lease_id
        return self._stands(ElectedHost(self.own.name, self.own.incarnation, place, names, lives, pair, lease_id))

    def succeed(self, before: ElectedHost, place: str, num_decisions: int) -> ElectedHost | None:
        """Tries to elect this host, which knows so many decisions; None if another is elected or the run is over."""
        own, lease_id = self.own, self._lease.lease_id
        value = replace(before, name=own.name, incarnation=own.incarnation, place=place, lease_id=lease_id)
        value = replace(value, heard=num_decisions)
        return value if self._stands(value) else None

    def _stands(self, value: ElectedHost) -> bool:
        text = text_of(value).encode()
        begun = f"host {value.name} at {value.place} coordinated hosts {', '.join(value.hosts)}"
        is_free = (absent(_ELECTED), absent(_OUTCOME))
        written = (Put(_ELECTED, text, self._lease), Put(_BEGUN, begun.encode()))
        return self._kv.transact(Txn(is_free, written)).succeeded

    def holder(self) -> str:
        """Returns in words which host began the run last, and with which others; empty if nobody did."""
        entry = self._kv.get(_BEGUN)
        return "" if entry is None else entry.value.decode(errors="replace")

    def revoke(self, elected: ElectedHost) -> None:
        """Ends the lease of a host whose process is known to have ended."""
        self._kv.revoke(Lease(elected.lease_id, 1))

    def of_run(self, elected: ElectedHost) -> list[RegisteredHost]:
        """Returns the hosts of a run; one that is lost has neither address nor lease."""
        by_incarnation = {each.incarnation: each for each in self.hosts()}
        pairs = zip(elected.hosts, elected.incarnations, strict=True)
        return [by_incarnation.get(life) or RegisteredHost(name, life, "", 0, {}) for name, life in pairs]

    def outlived(self) -> ElectedHost | None:
        """Returns the run that continues without this host, which was lost and has come back; None if there is none."""
        run = self.elected()
        is_back = run is not None and self.own.name in run.hosts and self.own.incarnation not in run.incarnations
        return run if is_back else None

    def awaited(self, run: ElectedHost) -> HostOutcome:
        """Waits for the outcome of a run; raises CoordinatorUnavailableError if no host coordinates it any more."""
        seen_s = time.monotonic()
        while (outcome := self.outcome()) is None:
            if self.elected() is not None:
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s > _ELECTION_S:
                raise CoordinatorUnavailableError(f"host {run.name}, which coordinated the run, is lost")
            rest(_POLL_S)
        return outcome

    def tell(self, outcome: HostOutcome) -> None:
        """Writes the outcome, which stays for an hour."""
        self._kv.put(_OUTCOME, text_of(outcome).encode(), self._kv.grant(_OUTCOME_S))

    def forget(self, prefixes: Sequence[str]) -> None:
        """Deletes the keys that another host would have gone on with: the run is over."""
        for prefix in (*prefixes, _BEGUN):
            self._kv.delete_prefix(prefix)

    def waited_for_elected(self) -> ElectedHost | None:
        """Returns the elected host, None if there is none after a time."""
        return self.waited(self.elected, _ELECTION_S)

    def waited(self, look: Callable[[], _Awaited | None], patience_s: float) -> _Awaited | None:
        """Returns what `look` returns, as soon as there is something; None after a time."""
        until_s = time.monotonic() + patience_s
        while (value := look()) is None and time.monotonic() < until_s:
            rest(_POLL_S)
        return value


def _missing(hosts: Sequence[RegisteredHost], wanted: Sequence[str], number: int, patience_s: float) -> str:
    names = [each.name for each in hosts]
    came = f"{len(names)} of {number} hosts registered within {patience_s:g} s: {', '.join(names) or 'none'}"
    absent_names = [each for each in wanted if each not in names]
    return f"{came}; missing: {', '.join(absent_names)}" if absent_names else came
