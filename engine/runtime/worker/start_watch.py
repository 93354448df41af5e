"""The watch on a worker's start: the agent hears of a long part of it, and the log gets the stack of the main thread.

Rule: the control thread looks, at each ping, so that the user's code can be named while it blocks the main thread.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import CodeType, FrameType

from engine.core.process_messages import BusyMessage
from engine.models.model_loader import build_model
from engine.models.sources.open_data import open_data
from engine.models.user_code import log_stack, running_line
from engine.runtime.checkpoint.loader import load
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.optimizers.learning_rates import check_rates
from engine.runtime.stage.build_layer import build_layer
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.weigh_layers import weigh_layers
from engine.runtime.worker.pure_check import check_pure
from engine.runtime.worker.watched_data import WatchedData

_TOLD_AFTER_NS, _LOGGED_AFTER_NS = 3_000_000_000, 30_000_000_000
_PARTS: dict[CodeType, str] = {
    Control.wait_until.__code__: "",  # for the other workers
    open_data.__code__: "opens the data",
    WatchedData.microbatch.__code__: "reads the data",
    WatchedData.evaluation.__code__: "reads the data",
    build_model.__code__: "builds the model",
    build_layer.__code__: "builds a layer",
    weigh_layers.__code__: "measures the layers",
    Stage.probe.__code__: "tries its layers",
    check_pure.__code__: "tries its layers",
    check_rates.__code__: "makes the learning rates",
    load.__code__: "reads the checkpoint",
}


class StartWatch:
    """The watch on the thread that makes it; `look` is called in another one."""

    def __init__(self, control: Control):
        self._control, self._thread = control, threading.get_ident()
        self._part, self._since_ns, self._is_logged = "", now_ns(), False
        self._told = BusyMessage()

    def look(self) -> None:
        """Tells the agent of a part of the start that goes on for seconds, and of its end; logs a longer one."""
        time_ns, frame = now_ns(), sys._current_frames().get(self._thread)
        if frame is None:  # the thread has ended
            return
        if (part := part_of(frame)) != self._part:
            self._part, self._since_ns, self._is_logged = part, time_ns, False
        lasted_ns = time_ns - self._since_ns if part else 0
        is_long = lasted_ns >= _TOLD_AFTER_NS
        busy = BusyMessage(part, running_line(frame), self._since_ns) if is_long else BusyMessage()
        if busy != self._told:
            self._told = busy
            self._control.send(busy)
        if lasted_ns >= _LOGGED_AFTER_NS and not self._is_logged:
            self._is_logged = True
            log_stack(f"it {part} for {lasted_ns / 1e9:.0f} s; the stack of its main thread:", frame)


def part_of(frame: FrameType) -> str:
    """Returns the innermost part of the start that a thread is in, in words; empty if it waits for other workers."""
    return next((_PARTS[each.f_code] for each, _ in traceback.walk_stack(frame) if each.f_code in _PARTS), "")
