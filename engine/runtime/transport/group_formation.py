"""Joins the group of an epoch in a thread, and gives up when a higher epoch comes."""

from __future__ import annotations

import threading

from engine.core.errors import TransferFailedError
from engine.core.history.run_records import MarkRecord
from engine.core.messages import EpochMessage
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.transport.transport import Transport, TransportBackend


class GroupFormation:
    """One attempt to form the group of `epoch`."""

    def __init__(self, control: Control, backend: TransportBackend, recorder: Recorder, epoch: EpochMessage):
        self._control = control
        self._recorder = recorder
        self._joining = backend.joining(epoch.epoch, epoch.members)
        self._plane: Transport | None = None
        self._failed: TransferFailedError | None = None
        threading.Thread(target=self._form, args=(epoch.epoch,), name="forming", daemon=True).start()

    def _form(self, epoch: int) -> None:
        try:
            self._control.mark("regroup")  # a fault in this phase strikes while the group forms
            self._plane = self._joining.join()
            self._recorder.write(MarkRecord(phase="regroup", epoch=epoch))
        except TransferFailedError as error:
            self._failed = error
        self._control.wake()

    @property
    def outcome(self) -> Transport | TransferFailedError | None:
        """The group, or the failure to form it; None at first. The main thread is woken when it is there."""
        return self._plane if self._plane is not None else self._failed

    def give_up(self) -> None:
        """Leaves the group, or abandons its formation."""
        if self._plane is not None:
            self._plane.abandon()
        else:
            self._joining.abandon()
