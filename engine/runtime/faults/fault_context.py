"""The context of a fault by which a worker strikes itself: its replicas, its control thread, its pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runtime.faults.registry import Parameters

if TYPE_CHECKING:
    from engine.core.ownership import Slot
    from engine.runtime.ipc.control import Control
    from engine.runtime.replica.replicas import Replicas


@dataclass(frozen=True, slots=True)
class WorkerFaultContext:
    """The context of a fault by the worker itself; `slot` is the target of the fault, if it has one.

    `tell` confirms the effect with a description. `slow_down(factor, ns)` slows down compute actions from now on, for
    `ns` nanoseconds or, with None, to the end of the step.
    """

    fault: str
    parameters: Parameters
    slot: Slot | None
    control: Control
    replicas: Replicas
    tell: Callable[[str], None]
    slow_down: Callable[[float, int | None], None]
