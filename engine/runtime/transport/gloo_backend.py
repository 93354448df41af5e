"""The backend of Gloo: the groups of one worker, which meet at the rendezvous of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.runtime.device.device import HOST, Device
from engine.runtime.transport.gloo_transport import GlooJoining
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.pair_guard import UNGUARDED, PairGuard
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.transport import CutLink


class GlooBackend:
    """The groups of `worker`; `meet` returns the rendezvous of a group by its epoch and own name."""

    def __init__(
        self,
        cuts: LinkCuts,
        worker: int,
        meet: Callable[[int, str], Rendezvous],
        guard: PairGuard = UNGUARDED,
        device: Device = HOST,
    ):
        self.cut: CutLink = cuts.cut
        self._cuts = cuts
        self._meet = meet
        self._worker = worker
        self._guard = guard
        self._device = device

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> GlooJoining:
        """Returns the attempt to join the group of an epoch; with a number it is one in advance."""
        name = f"epoch-{epoch}-attempt-{attempt}" if attempt else f"epoch-{epoch}"
        meeting, guard = self._meet(epoch, name), self._guard
        early, device = attempt > 0, self._device
        return GlooJoining(
            self._cuts,
            meeting,
            self._worker,
            members,
            epoch,
            device=device,
            guard=guard,
            name=name,
            in_advance=early,
        )
