"""Layers that never return, in five ways, and data whose loading takes long, in two."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from engine.models.layers import Batch, Model
from tests.e2e.stall_models import obeying_layers
from tests.e2e.user_batches import Microbatches

_FORWARD_S, _BACKWARD_S = 0.001, 0.001
_SLOW_S = 0.006  # a source this slow loads ahead
_C_CALLS = 10**7  # of a loop in C, which takes a fraction of a second


def _sleep() -> None:
    time.sleep(3600)


def _wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _spin() -> None:
    while True:
        pass


def _hold_lock_of_python() -> None:
    ctypes.PyDLL(None).sleep(3600)


def _spin_in_c() -> None:
    sum(range(_C_CALLS**2))  # with Python's lock in its hand


HANGS: dict[str, Callable[[], None]] = {
    "sleep": _sleep,
    "lock": _wait_for_lock,
    "GIL": _hold_lock_of_python,
    "spin": _spin,
    "spin with GIL": _spin_in_c,
}


def _hang(order: str) -> None:
    HANGS[order]()


def hanging(layers: int, orders: str) -> Model:
    """Returns layers that hang in the way that the order names."""
    return obeying_layers(layers, orders, _hang, _FORWARD_S, _BACKWARD_S)


class LongLoad(Microbatches):
    """Loads one microbatch for `seconds`: in a loop that keeps Python's lock, or from storage that does not answer."""

    def __init__(self, seed: int, how: str, seconds: float, ahead: bool):
        super().__init__(seed)
        self.is_tokenizer, self.seconds = how == "tokenizer", seconds
        self.call_s = _SLOW_S if ahead else 0.0
        self.has_waited = False

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        time.sleep(self.call_s)
        if (step, microbatch) == (3, 1) and not self.has_waited:
            self.has_waited = True
            if self.is_tokenizer:
                self._keep_lock()
            else:
                time.sleep(self.seconds)
        return super().microbatch(step, pipeline, microbatch, size)

    def _keep_lock(self) -> None:
        """Runs for the whole time in one loop in C; a busy machine only makes it longer."""
        start_s = time.thread_time()
        sum(range(_C_CALLS))
        taken_s = time.thread_time() - start_s
        sum(range(round(_C_CALLS * self.seconds / taken_s)))
