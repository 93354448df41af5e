"""The proof that a connection between two workers has no other process at one of its ends or in between.

Rules: in each attempt to form a group, every member makes a claim: a random nonce, and both addresses of each of its
connections. A connection is direct if another member claims it from its other end. The proof from one member to another
is an HMAC with the key of the run over the claims of all members. It travels over the connection that it is about. A
member that lacks a direct connection to any other member gives no proof: else a stranger between two members, which
knows no key, could pass a good proof on and then change what follows.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

NUM_BYTES = hashlib.sha256().digest_size  # of a proof

Connection = tuple[str, str]  # the address of the own end and of the other one, such as 127.0.0.1:4711


def claim_of(nonce: bytes, connections: Collection[Connection]) -> bytes:
    """Returns the claim of a member."""
    return "\n".join([nonce.hex(), *(f"{own} {other}" for own, other in sorted(connections))]).encode()


def indirect(claims: Sequence[bytes], rank: int) -> list[int]:
    """Returns the ranks to which the member of this `rank` has no direct connection, or more than one."""
    own = _connections(claims[rank])
    return [other for other in range(len(claims)) if other != rank and len(own & _seen_from(claims[other])) != 1]


def unclaimed(claims: Sequence[bytes]) -> set[Connection]:
    """Returns the connections of members whose other end no member claims: it belongs to another process."""
    every = frozenset[Connection]().union(*map(_connections, claims))
    return {(own, other) for own, other in every if (other, own) not in every}


def proof(key: bytes, group: str, sender: int, receiver: int, claims: Sequence[bytes]) -> bytes:
    """Returns the proof from one rank to another in the attempt whose name is `group`."""
    parts = [group.encode(), f"{sender} {receiver}".encode(), *claims]
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(hashlib.sha256(part).digest())  # of one length, so that no two lists of parts read the same
    return made.digest()


def _connections(claim: bytes) -> frozenset[Connection]:
    lines = claim.decode(errors="replace").split("\n")[1:]
    return frozenset((own, other) for own, _, other in (line.partition(" ") for line in lines))


def _seen_from(claim: bytes) -> frozenset[Connection]:
    return frozenset((other, own) for own, other in _connections(claim))
