"""Forms the data plane of an epoch in a thread, and gives up when a higher epoch comes.

Gloo's constructor returns when all members have joined. If one dies first, the constructor would block for long.
`give_up` therefore shuts down its sockets, and ends its wait at the rendezvous.
"""

from __future__ import annotations

import threading

from engine.core.errors import TransferFailedError
from engine.core.history.run_records import MarkRecord
from engine.core.messages import EpochMessage
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.sockets import descriptors_by_inode, shut_down
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.pair_guard import PairGuard
from engine.runtime.transport.rendezvous import MeetingPlace, Rendezvous


class GroupFormation:
    """One attempt to form the plane of `epoch`; a worker's rank is its position among the members."""

    def __init__(
        self,
        control: Control,
        place: MeetingPlace,
        recorder: Recorder,
        worker: int,
        epoch: EpochMessage,
        guard: PairGuard,
    ):
        self._control = control
        self._store = Rendezvous(place, f"epoch-{epoch.epoch}")
        self._recorder = recorder
        self._guard = guard
        self._before = descriptors_by_inode().keys()
        self._plane: DataPlane | None = None
        self._failed: TransferFailedError | None = None
        threading.Thread(target=self._form, args=(worker, epoch), name="forming", daemon=True).start()

    def _form(self, worker: int, epoch: EpochMessage) -> None:
        try:
            self._control.mark("regroup")  # a fault in this phase strikes while the group forms
            self._plane = DataPlane(
                self._control, self._store, worker, epoch.members, guard=self._guard, name=f"epoch-{epoch.epoch}"
            )
            self._recorder.write(MarkRecord(phase="regroup", epoch=epoch.epoch))
        except TransferFailedError as error:
            self._failed = error
        self._control.wake()

    def plane(self) -> DataPlane:
        """Waits for the plane; raises Stopped, Fenced, or TransferFailedError if it could not be formed."""

        def look() -> DataPlane | None:
            if self._failed is not None:
                raise self._failed
            return self._plane

        return self._control.wait_until(look)

    def give_up(self) -> None:
        """Closes the plane, or aborts its formation."""
        if self._plane is not None:
            self._plane.close()
        else:
            self._store.give_up()
            shut_down(descriptors_by_inode().keys() - self._before)
