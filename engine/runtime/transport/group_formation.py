"""Joins groups: that of the current epoch, until a newer epoch comes, and in threads those of coming epochs.

A thread takes a millisecond of each worker while all wait for a recovery: there is none where nothing is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.core.errors import TransferFailedError, required
from engine.core.history.run_records import MarkRecord
from engine.core.messages import EpochMessage, NextGroupMessage
from engine.runtime.process.control import Control
from engine.runtime.process.recorder import Recorder
from engine.runtime.transport.transport import Joining, Transport, TransportBackend

_Key = tuple[int, int]


class _Attempt:
    """One attempt to form a group: it succeeds, fails, or is given up."""

    def __init__(self, joining: Joining):
        self.plane: Transport | None = None
        self.failed: TransferFailedError | RuntimeError | None = None
        self._joining = joining
        self._ending = threading.Lock()
        self._is_given_up = False

    def join(self) -> None:
        try:
            plane = self._joining.join()
        except (TransferFailedError, RuntimeError) as error:  # a RuntimeError, of the device, ends the main thread
            self.failed = error
            return
        with self._ending:
            if not self._is_given_up:
                self.plane = plane
                return
        plane.abandon()
        self.failed = TransferFailedError("the group was given up when it had just been formed")

    def give_up(self) -> None:
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
        joining = backend.joining(epoch.epoch, (*epoch.members,))
        self._attempt = _Attempt(joining)
        self.give_up = self._attempt.give_up
        if joining.may_wait:
            threading.Thread(target=self._form_aside, args=(epoch.epoch,), name="forming", daemon=True).start()
        else:
            self._form(epoch.epoch)

    def _form(self, epoch: int) -> None:
        self._control.mark("regroup")  # faults in this phase strike while the group forms
        self._attempt.join()
        if self._attempt.plane is not None:
            self._recorder.write(MarkRecord(phase="regroup", epoch=epoch))

    def _form_aside(self, epoch: int) -> None:
        self._form(epoch)
        self._control.wake()

    @property
    def outcome(self) -> Transport | TransferFailedError | RuntimeError | None:
        """The group, or why it could not be formed; None at first. The main thread is woken when a thread sets it."""
        return self._attempt.plane if self._attempt.plane is not None else self._attempt.failed


class NextGroups:
    """A worker's groups of coming epochs, formed in threads; `tell` gets each result: why it failed, or ""."""

    def __init__(self, backend: TransportBackend, tell: Callable[[_Key, str], None]):
        self._backend, self._tell = backend, tell
        self._attempts: dict[_Key, _Attempt] = {}

    def form(self, message: NextGroupMessage) -> None:
        """Starts forming a group; any thread may call."""
        key = (message.epoch, message.number)
        attempt = self._attempts[key] = _Attempt(self._backend.joining(message.epoch, message.members, message.number))
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
        """Makes a formed group the current one, and returns it."""
        plane = required(self._attempts.pop(key).plane, "a group that is entered has formed")
        plane.begin()
        return plane
