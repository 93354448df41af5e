"""Joins the group of an epoch in a thread, and gives up when a higher epoch comes; groups of coming epochs, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.core.errors import TransferFailedError, required
from engine.core.history.run_records import MarkRecord
from engine.core.messages import EpochMessage, NextGroupMessage
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.transport.transport import Joining, Transport, TransportBackend

_Key = tuple[int, int]


class _Attempt:
    """One attempt to form a group: it ends with a group or a failure, or is given up."""

    def __init__(self, joining: Joining):
        self.plane: Transport | None = None
        self.failed: TransferFailedError | RuntimeError | None = None
        self._joining = joining
        self._ending = threading.Lock()
        self._is_given_up = False

    def join(self) -> None:
        """Waits for the other members."""
        try:
            plane = self._joining.join()
        except (TransferFailedError, RuntimeError) as error:  # the latter of the device: the main thread ends by it
            self.failed = error
            return
        with self._ending:
            if not self._is_given_up:
                self.plane = plane
                return
        plane.abandon()
        self.failed = TransferFailedError("the group was given up when it had just been formed")

    def give_up(self) -> None:
        """Leaves the group, or abandons its formation."""
        with self._ending:
            self._is_given_up = True
        if self.plane is not None:
            self.plane.abandon()
        else:
            self._joining.abandon()


class GroupFormation:
    """One attempt to form the group of `epoch`."""

    def __init__(self, control: Control, backend: TransportBackend, recorder: Recorder, epoch: EpochMessage):
        self._control = control
        self._recorder = recorder
        self._attempt = _Attempt(backend.joining(epoch.epoch, epoch.members))
        self.give_up = self._attempt.give_up
        threading.Thread(target=self._form, args=(epoch.epoch,), name="forming", daemon=True).start()

    def _form(self, epoch: int) -> None:
        self._control.mark("regroup")  # a fault in this phase strikes while the group forms
        self._attempt.join()
        if self._attempt.plane is not None:
            self._recorder.write(MarkRecord(phase="regroup", epoch=epoch))
        self._control.wake()

    @property
    def outcome(self) -> Transport | TransferFailedError | RuntimeError | None:
        """The group, or the failure to form it; None at first. The main thread is woken when it is there."""
        return self._attempt.plane if self._attempt.plane is not None else self._attempt.failed


class NextGroups:
    """The groups of coming epochs of one worker, by epoch and number; they form in threads while it trains.

    `tell` gets the end of each attempt, in its thread: why it failed, or nothing.
    """

    def __init__(self, backend: TransportBackend, tell: Callable[[_Key, str], None]):
        self._backend, self._tell = backend, tell
        self._attempts: dict[_Key, _Attempt] = {}

    def form(self, told: NextGroupMessage) -> None:
        """Begins to form a group; any thread may call."""
        key = (told.epoch, told.number)
        attempt = self._attempts[key] = _Attempt(self._backend.joining(told.epoch, told.members, told.number))
        threading.Thread(target=self._form, args=(key, attempt), name=f"forming {key}", daemon=True).start()

    def _form(self, key: _Key, attempt: _Attempt) -> None:
        attempt.join()
        self._tell(key, "" if attempt.failed is None else str(attempt.failed))

    def leave(self, keys: Sequence[_Key]) -> None:
        """Gives up groups, and attempts to form them; any thread may call."""
        for key in keys:
            if (attempt := self._attempts.pop(key, None)) is not None:
                attempt.give_up()

    def enter(self, key: _Key) -> Transport:
        """Returns the group of a key, which is formed, as the present one."""
        plane = required(self._attempts.pop(key).plane, "a group that is entered has formed")
        plane.begin()
        return plane
