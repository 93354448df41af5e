"""The control messages that only benchmarks have."""

from __future__ import annotations

from engine.bench.figures.rows import Stamps
from engine.core.message_codec import ToAgent, ToWorker, message

LINKS, GLOO, TORCH = "links", "Gloo", "torch's batch_isend_irecv"  # ways of the links benchmark


@message
class Turns(ToWorker):
    """The first message to a worker of the pipeline benchmark: how often it measures each side, and where it writes."""

    iterations: int
    temporary: str


@message
class CodecTimes(ToAgent):
    """One iteration of a side at a worker of the pipeline benchmark, told when all are done."""

    side: str
    stamps: Stamps


@message
class Round(ToWorker):
    """The first message to a worker of the relay benchmark: its group, and the worker that ends itself."""

    worker: int
    ranks: tuple[int, ...]
    victim: int


@message
class Hops(ToWorker):
    """The first message to a worker of the links benchmark: how many hops of each size, in bytes, each way takes."""

    worker: int
    hops: int
    sizes: tuple[int, ...]


@message
class HopTimes(ToAgent):
    """The nanoseconds of all hops of a size over one way."""

    way: str
    size: int
    took_ns: tuple[int, ...]
