"""Groups of gloo that no stranger is in: other users of the host can reach gloo's ports, and gloo asks for no proof.

Either the sockets lie in a network namespace of the run, where no other process is. Or each pair of members proves
before its first tensor that both know the key of the run and that nothing stands between them
(`engine/core/pair_proof.py`). If a proof fails at any member, all members leave the group and form it again.

Rules: a stranger cannot make a member wait. A member waits for others at the rendezvous store, which no stranger
reaches, and at the connections of a group for seconds only. Each round at the store costs a recovery milliseconds, on
several hosts many: there are two, for the addresses and for the claims. That all proofs were good the members tell each
other over the connections that were proven; only after a doubt they agree at the store.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from engine.core.errors import TransferFailedError
from engine.core.pair_proof import NUM_BYTES, claim_of, indirect, proof, unclaimed
from engine.runtime.process.network_namespace import inside
from engine.runtime.process.sockets import LOOPBACK, close_ports, connections_of, descriptors_by_inode, shut_down

_PATIENCE_S = 30.0  # from the first attempt to the last one
_CONNECT_S = 5.0  # for the connections of a group, once all members are there
_PROOF_S = 5.0  # for the proofs, once all claims are there
_PROOF_BESIDE_STRANGER_S = 0.25  # an unknown connection is there: a proof that is missing will not come
_TAG = (1 << 31) - 1  # of the transfer of a proof
_WORD_TAG = _TAG - 1  # of the word whether all proofs were good
_WORD_S = 2 * _PROOF_S  # for that word: another member may still wait for a proof
_VERDICT_S = 2 * _WORD_S  # for the verdicts on an attempt: who has had only good words does not tell one
_AGAIN, _ENOUGH = b"again", b"enough"  # the verdict of a member on an attempt that has failed

Doubt = tuple[int | None, str]  # the other rank, None if gloo does not tell it, and words that follow its name


@dataclass(frozen=True, slots=True)
class Group:
    """A group of gloo, and the inodes of its sockets."""

    gloo: Any  # torch's stubs lack its methods
    sockets: Collection[int]


@dataclass(frozen=True, slots=True)
class PairGuard:
    """The protection of a worker's groups: a namespace, or a key; without either (in benchmarks) there is none.

    `tell` is called for each pair whose proof has failed here, with the other worker if it is known, and with words.
    """

    network: int | None = None
    key: bytes = b""
    tell: Callable[[int | None, str], None] = lambda peer, words: None
    address: str = LOOPBACK  # where the group listens

    def form(self, store: Store, name: str, worker: int, workers: Sequence[int], timeout_s: float) -> Group:
        """Returns the group of `workers` whose `name` no other group of the run has, when all have joined.

        Raises RuntimeError, or TransferFailedError if the proof has failed too often.
        """
        rank, size = list(workers).index(worker), len(workers)
        if not self.key:
            with contextlib.nullcontext() if self.network is None else inside(self.network):
                return _connected(store, rank, size, timeout_s, self.address)
        meeting, began_s = _Meeting(store, rank, size, timeout_s), math.inf
        for attempt in itertools.count():
            group, doubts = self._attempt(meeting, f"{name}/{attempt}", PrefixStore(str(attempt), store), timeout_s)
            if group is not None and doubts is None:
                return group
            began_s = min(began_s, time.monotonic())
            is_late = time.monotonic() - began_s > _PATIENCE_S
            soon = _Meeting(store, rank, size, _VERDICT_S)
            verdicts = soon.exchange(f"verdict {attempt}", _ENOUGH if is_late else _AGAIN)
            for other, words in doubts or ():
                self.tell(None if other is None else workers[other], words)
            if group is not None:
                shut_down(group.sockets)
            if _ENOUGH in verdicts:
                break
        raise TransferFailedError(
            f"no group without a doubt was formed in {attempt + 1} attempts: an unknown process may disturb them"
        )

    def _attempt(
        self, meeting: _Meeting, name: str, store: Store, timeout_s: float
    ) -> tuple[Group | None, list[Doubt] | None]:
        """Returns the group of one attempt, and None if no member has a doubt; else this member's own doubts."""
        rank, every = meeting.rank, range(meeting.size)
        try:
            group = _connected_soon(store, rank, meeting.size, timeout_s, self.address)
        except RuntimeError as error:
            meeting.exchange(f"claim {name}", b"")
            return None, [(None, f"could not be connected: {error}")]
        own = claim_of(secrets.token_bytes(16), connections_of(group.sockets))
        claims = meeting.exchange(f"claim {name}", own)
        close_ports(group.sockets)  # not before: another member may still connect
        if any(indirect(claims, each) for each in every):
            return group, [(other, "is not at the other end of a connection") for other in indirect(claims, rank)]
        given = {each: proof(self.key, name, rank, each, claims) for each in every if each != rank}
        wanted = {each: proof(self.key, name, each, rank, claims) for each in given}
        doubts = _prove(group, given, wanted, _PROOF_BESIDE_STRANGER_S if unclaimed(claims) else _PROOF_S)
        return group, None if _all_good(group, [*given], not doubts) else doubts


UNGUARDED = PairGuard()


def gather(store: Store, worker: int, workers: Sequence[int], timeout_s: float) -> None:
    """Waits until all `workers` have come to the rendezvous; raises RuntimeError if one does not in time."""
    _Meeting(store, list(workers).index(worker), len(workers), timeout_s).exchange("comes", b"")


def _prove(group: Group, given: Mapping[int, bytes], wanted: Mapping[int, bytes], patience_s: float) -> list[Doubt]:
    """Gives each other rank its proof, and takes the proofs wanted; returns the doubts."""
    patience = timedelta(seconds=patience_s)
    sent = {other: torch.tensor(list(text), dtype=torch.uint8, device="cpu") for other, text in given.items()}
    taken = {other: torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cpu") for other in wanted}
    other = None
    try:
        receives = {other: group.gloo.recv([text], other, _TAG) for other, text in taken.items()}
        sends = {other: group.gloo.send([text], other, _TAG) for other, text in sent.items()}
        for other, work in (*receives.items(), *sends.items()):  # noqa: B007 the error is about it
            work.wait(patience)
    except RuntimeError:
        return [(other, "gave no proof of the run's key")]
    return [
        (other, "gave a wrong proof of the run's key")
        for other, text in taken.items()
        if not hmac.compare_digest(bytes(text.tolist()), wanted[other])
    ]


def _all_good(group: Group, others: Sequence[int], is_good: bool) -> bool:
    """Tells the other ranks whether this member's proofs were good; returns whether those of all members were.

    Without a word from another member they count as bad.
    """
    words = {other: torch.zeros(1, dtype=torch.uint8, device="cpu") for other in others}
    own = torch.tensor([is_good], dtype=torch.uint8, device="cpu")
    try:
        receives = [group.gloo.recv([word], other, _WORD_TAG) for other, word in words.items()]
        sends = [group.gloo.send([own], other, _WORD_TAG) for other in others]
        for work in (*receives, *sends) if is_good else ():
            work.wait(timedelta(seconds=_WORD_S))
    except RuntimeError:
        return False
    return is_good and all(word.item() for word in words.values())


def _connected_soon(store: Store, rank: int, size: int, timeout_s: float, address: str) -> Group:
    """Returns a group as `_connected` does; raises RuntimeError after some seconds, in which gloo would wait on."""
    before = descriptors_by_inode().keys()
    made: queue.SimpleQueue[Group | Exception | None] = queue.SimpleQueue()
    gathering = _GatheringStore(store, size, lambda: made.put(None))

    def connect() -> None:
        try:
            made.put(_connected(gathering, rank, size, timeout_s, address))
        except Exception as error:
            made.put(error)  # whatever it is: the other thread waits without a limit

    threading.Thread(target=connect, name="connecting", daemon=True).start()
    try:
        group = made.get()
        while group is None:  # all members are there
            group = made.get(timeout=_CONNECT_S)
    except queue.Empty:
        shut_down(descriptors_by_inode().keys() - before)
        raise RuntimeError(f"not within {_CONNECT_S:g} s") from None
    if isinstance(group, Exception):
        raise group
    return group


def _connected(store: Store, rank: int, size: int, timeout_s: float, address: str) -> Group:
    """Returns a group when all its members have connected, to each other or to strangers."""
    before = descriptors_by_inode().keys()
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Not lazy: a connection that is made later would have no proof.
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    gloo = ProcessGroupGloo(store, rank, size, options)
    return Group(gloo, descriptors_by_inode().keys() - before)


class _GatheringStore(Store):
    """The rendezvous store as gloo uses it: gloo gets no address of a member before all members have told theirs."""

    def __init__(self, of: Store, size: int, on_all: Callable[[], None]):
        super().__init__()
        self._of, self._size, self._on_all, self._are_all = of, size, on_all, False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub has text
        self._of.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._of.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:  # type: ignore[override]
        if not self._are_all:
            place = keys[0].rpartition("/")[0]  # gloo's keys are ranks
            self._of.wait([f"{place}/{rank}" for rank in range(self._size)], timeout)
            self._are_all = True
            self._on_all()
        self._of.wait([*keys], timeout)


class _Meeting:
    """The members of a group, who tell each other values through the rendezvous store."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float):
        self.rank, self.size = rank, size
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """Returns the values of all members, in the order of ranks; waits until all have told them."""
        self._store.set(f"{name}/{self.rank}", own)  # type: ignore[arg-type]  # torch takes bytes too
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, self._timeout)
        return [self._store.get(key) for key in keys]
