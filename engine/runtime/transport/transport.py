"""The transport of a worker: the protocol that each backend implements, and the only one that other rooms use.

    backend     one for each worker: joins the group of an epoch
    transport   the messages of one group, in two channels
    in_order    messages in program order: the transfers of a program
    aside       messages that may come late: streams, heals, validation passes, shards

Rules: a key names a message, together with the epoch that both ends are in; its type belongs to one channel. The main
thread of a worker calls everything here but `Joining`. It waits in the `Waiter` only, which a newer epoch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from engine.core.links.disturbance import Disturbance
from engine.models.layers import Tensors
from engine.runtime.device.copies import Leaving
from engine.runtime.device.device import Device
from engine.runtime.links.disturbed_wire import Met
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import AsideKey, Issued, ProgramKey

Found = TypeVar("Found")
AnyKey = TypeVar("AnyKey", bound=ProgramKey | AsideKey)
_Key_contra = TypeVar("_Key_contra", contravariant=True)


class LinkFaults(NamedTuple):
    """The faults of a worker's connections: `LinkCuts.cut` and `Links.disturb`; by default it has no connection."""

    cut: Callable[[int, str, int | None, Callable[[str], None]], bool] = lambda *given: False
    disturb: Callable[[int, Disturbance, Met], bool] = lambda *given: False


class Waiter(Protocol):
    """The place where the main thread of a worker waits; the control thread provides it."""

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called again after each `wake`, finds something; may raise to end the wait."""

    def wake(self) -> None:
        """Has the main thread look again."""


class Channel(Protocol[_Key_contra]):
    """The messages of one kind of key between this worker and the other members, each a tuple of tensors.

    A message that is sent may lie on the host or on the worker's device; one that is taken lies on the device.
    """

    @property
    def device(self) -> Device:
        """The device on which the tensors of a message lie when they are taken."""

    def post(self, source: int, key: _Key_contra, border: Border) -> None:
        """Posts the receive of one message from worker `source`; never waits.

        In program order, the receives from a source are posted in the order of its sends.
        """

    def has_arrived(self, source: int, key: _Key_contra) -> bool:
        """Returns whether `take` would return at once."""

    def take(self, source: int, key: _Key_contra) -> Tensors:
        """Waits for a posted message and returns its tensors.

        Raises TransferFailedError if the connection broke, and the errors of the waiter.
        """

    def take_arrived(self, source: int, key: _Key_contra) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived; never waits, never raises."""

    def leaving(self, key: _Key_contra, tensors: Leaving) -> Leaving:
        """Begins to bring the tensors of a message to where it is sent from, once for all of its targets."""

    def send(self, target: int, key: _Key_contra, tensors: Leaving) -> None:
        """Starts one message to worker `target`; never waits. Raises TransferFailedError if the connection broke.

        In program order, the tensors must not change before the commit of the step. Aside, they must not change before
        they are sent, and the transport then releases them.
        """


class Traffic(NamedTuple):
    """The numbers of messages to and from one other member, since the group was formed."""

    sent: int = 0  # begun, at this end
    posted: int = 0
    received: int = 0


class Transport(Protocol):
    """The messages of one worker in one group.

    `epoch` is that of the coming messages: a group may serve several epochs. The training sets it when it enters one.
    """

    epoch: int

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that were begun here."""

    @property
    def in_order(self) -> Channel[ProgramKey]:
        """The messages in program order."""

    @property
    def aside(self) -> Channel[AsideKey]:
        """The messages aside."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages in both channels by other member; any thread may ask."""

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Takes the transfers of a program that is about to run, in the order in which a backend without tags has them.

        There are some only if the job asks for such a backend.
        """

    def begin(self) -> None:
        """Takes the place of the group before, after a `join` in advance: its connections can be cut from now on."""

    def release_sent(self) -> None:
        """Releases the tensors sent in program order, after the commit of their step; they have all been received."""

    def abandon(self) -> None:
        """Breaks off all messages and leaves the group, within milliseconds; ends every wait for it."""

    def close(self) -> None:
        """Leaves the group when no message is under way at any member."""


class Joining(Protocol):
    """One attempt to join the group of an epoch; it needs a thread, since it waits for the other members."""

    def join(self) -> Transport:
        """Waits until all members have joined; raises TransferFailedError if the group could not be formed."""

    def abandon(self) -> None:
        """Ends a `join` in another thread, which then raises TransferFailedError."""


class TransportBackend(Protocol):
    """How one worker joins its groups; made with the waiter of its main thread."""

    link_faults: LinkFaults

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> Joining:
        """Returns the attempt of this worker, one of `members`, to join the group of `epoch`.

        With the number of an `attempt` it is one in advance: the present group stays, until `Transport.begin`.
        """
