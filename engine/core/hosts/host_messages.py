"""The messages between the coordinator's host and another host of the run; `engine/runtime/agent/frames.py` sends them.

host                                  coordinator's host
HelloHost ------------------------->  knows the host, by name and incarnation
<------------------- HelloReplyHost   each resends all that the other has not received
ProcessesHost --------------------->  first of all: its processes, which another coordinator takes over
PastDecisionHost ------------------>  decisions that it has, and the next coordinator may lack
PastControlHost ------------------->  messages that its workers got, and each newcomer must get
ControlHost, then ResendDoneHost -->  messages of its workers, where the previous coordinator may have lost them
<------------------------- ForkHost   forks a worker; its process has a number of its own, as workers begin again
ForkedHost, or ForkFailedHost ----->
<--------- ControlHost ------------>  a control message of a worker, or to one, which follows in the frame
<----------------------- SignalHost
EndedHost ------------------------->  after the last words of the worker, and its last sign of life
SignsHost ------------------------->  four times a second: signs of life, places and times of all workers
<------------------------- TickHost   four times a second
<--------------------- DecisionHost   a decision, as the coordinator's host has recorded it
<--------- ShippedHost ------------>  parts of the files of records, when nothing else waits to be sent
<------- StoredSizesHost ---------->  so much of these files is stored: the next part may come
LeavesHost ------------------------>  the host ends, and has no worker any more
<----------------------- OutcomeHost  the run has ended
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.history.step_files import ENTRY_BYTES, FOLDER, step_file
from engine.core.message_kinds import CUT, Message, message


class FromOtherHost(Message):
    """A message of a host to the coordinator's host."""

    __slots__ = ()


class ToOtherHost(Message):
    """A message of the coordinator's host to another one."""

    __slots__ = ()


@message
class HelloHostMessage(FromOtherHost):
    """The first of a connection; `received` frames have come over the connections before."""

    name: str
    incarnation: str
    received: int


@message
class HelloReplyHostMessage(ToOtherHost):
    """The answer."""

    received: int


@message
class ProcessesHostMessage(FromOtherHost):
    """The processes of a host: number, worker, pid, the exit code of one that has ended; and its decisions."""

    processes: tuple[tuple[int, ...], ...]
    heard: int  # the number of decisions


@message
class ResendDoneHostMessage(FromOtherHost):
    """All that another coordinator needs has been sent again."""


@message
class ForkHostMessage(ToOtherHost):
    """Asks for the process of a worker, which has `num_lines` of its host's board."""

    process: int
    worker: int
    num_lines: int


@message
class ForkedHostMessage(FromOtherHost):
    """The process of a worker was forked."""

    process: int
    pid: int


@message
class ForkFailedHostMessage(FromOtherHost):
    """The host could not fork a worker."""

    cut_note = CUT
    process: int
    error: str


@message
class ControlHostMessage(FromOtherHost, ToOtherHost):
    """A control message of a process, or to one, follows in the frame."""

    process: int


@message
class SignalHostMessage(ToOtherHost):
    """Sends a signal to a process, if it has not ended; with 0 its handle is closed, and it is killed."""

    process: int
    number: int


@message
class EndedHostMessage(FromOtherHost):
    """A process has ended; a negative `code` is the number of a signal."""

    process: int
    code: int


@message
class SignsHostMessage(FromOtherHost):
    """The signs of life of the processes of a host.

    `echo` has the time of sending of the last `TickHost`, by the clock of its sender, and how long ago it came.
    """

    received: int
    sent_ns: int
    signs: tuple[WorkerSign, ...]
    echo: tuple[int, ...] = ()


@message
class TickHostMessage(ToOtherHost):
    """The coordinator's host lives, and has received so many frames; the times compare the clocks of both.

    `heard` has the time of sending of the last `SignsHost`, and that of its arrival; none if none has come.
    """

    received: int
    sent_ns: int
    heard: tuple[int, ...] = ()


@message
class DecisionHostMessage(ToOtherHost):
    """A decision of the coordinator's host, which each host stores under its number; its line follows in the frame."""

    number: int


@message
class ShippedHostMessage(FromOtherHost, ToOtherHost):
    """Parts of files of records, whose bytes follow in the frame."""

    parts: tuple[ShippedPart, ...]
    is_last: bool  # the host has nothing more


@message
class StoredSizesHostMessage(FromOtherHost, ToOtherHost):
    """The answer: how many bytes of each file are stored; a file has the name of its host and its path."""

    sizes: tuple[tuple[str, str, int], ...]
    is_last: bool


@message
class PastDecisionHostMessage(FromOtherHost):
    """A decision that the host received, and its next coordinator may lack; its line follows in the frame."""

    number: int


@message
class PastControlHostMessage(FromOtherHost):
    """A control message that workers of the host got, and the next coordinator may lack; it follows in the frame."""


@message
class LeavesHostMessage(FromOtherHost):
    """The host leaves: all its workers have ended."""


@message
class OutcomeHostMessage(ToOtherHost):
    """The run has ended, with this exit code."""

    cut_note = CUT
    code: int
    words: str


class WorkerSign(NamedTuple):
    """A process as its host sees it. `place` is the fields of a `BoardPlace`, with an age in the place of a time."""

    process: int
    heartbeat: str  # the last one since the sign before, as it travels; empty for none
    progress: tuple[int, int, str]
    place: tuple[int, int, int, int, int, int, int] | None = None
    times: tuple[str, int, int] | None = None
    num_signals: int = 0  # that this coordinator has sent to it, and that it had got before its state was read
    age_ns: int = 0  # since its last word


# Parts of the files of records as they travel from one host to another: a frame has parts of several files.
#
# Rules: files of records only grow, so a copy is a beginning of its file. The host that keeps a copy says how many
# bytes it has, and the next part begins there: after a take-over as well. A part has whole lines and whole entries, so
# a copy ends between two records. A part without bytes says that its host has left the file out. Bytes of any other
# form, and names of any other file, are refused.

EVENTS = "events.jsonl"
MOST_SHIPPED_BYTES = 1 << 16  # of files in one frame: control messages wait for no more than that


class ShippedPart(NamedTuple):
    """So many bytes of a file of a host; `file` is its path in the folder of the run on that host."""

    node: str
    file: str
    begin: int
    length: int


def is_shipped(file: str) -> bool:
    """Whether a path in the folder of a run is one of the files of its records."""
    folder, _, name = file.rpartition("/")
    return file == EVENTS or (folder == FOLDER and step_file(name) is not None)


def whole_bytes(file: str, begin: int, data: bytes) -> int:
    """Returns how many of the bytes behind `begin` are whole lines or entries; all of a line that fills a frame."""
    if file.endswith(".bin"):
        return max(0, (begin + len(data)) // ENTRY_BYTES * ENTRY_BYTES - begin)
    end = data.rfind(b"\n") + 1
    return end or (len(data) if len(data) == MOST_SHIPPED_BYTES else 0)
