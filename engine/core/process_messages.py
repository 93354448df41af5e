"""The control messages about processes: between the launcher and its fork server, lanes; signs of life, ends; groups.

`messages.py` has those of training.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.message_codec import CUT, Message, Plain, TextsToAgent, ToAgent, ToWorker, message


@message
class BeginMessage(Message):
    """The launcher asks the fork server for a process in between, before the first of some children.

    The server imports the modules of `preload` first.
    """

    preload: tuple[str, ...] = ()


@message
class ForkMessage(Message):
    """The launcher asks the process in between for a child, with the child's descriptors: first pipe and log."""

    role: str
    name: str


@message
class ForkedMessage(Message):
    """The process in between has forked a child, whose pidfd comes along."""

    pid: int


@message
class UnforkedMessage(Message):
    """The process in between was refused a child."""

    error: str


@message
class LeaveMessage(Message):
    """The launcher wants no more children now."""


@message
class LeftMessage(Message):
    """The fork server says that the process in between has ended."""


@message
class CaseMessage(Message):
    """The launcher gives a lane its next case."""

    task: Plain


@message
class DoneMessage(Message):
    """A lane answers its case."""

    cut_note = CUT
    result: Plain


@message
class PingMessage(ToWorker):
    """The agent asks for a sign of life, of each worker, with every tick."""


@message
class BusyMessage(TextsToAgent):
    """The part of the start that a worker has been in since `since_ns`, for seconds; empty if it is over.

    `line` is the line of the user's code that runs, empty if there is none.
    """

    part: str = ""
    line: str = ""
    since_ns: int = 0


@message
class NoticeMessage(ToAgent):
    """The worker got SIGTERM, and is going to leave."""


@message
class ByeMessage(ToWorker):
    """Every worker has finished, and may leave."""


@message
class StopMessage(ToWorker):
    """The run ends now; each worker leaves its wait."""


@message
class KeyMessage(ToAgent, ToWorker):
    """A key of an epoch's rendezvous, from one worker and passed on to every worker; the value is in base64."""

    epoch: int
    key: str
    value: str


@message
class LinkWantedMessage(ToAgent):
    """The worker has messages for worker `peer`, and no link to it; `before` is the number of one that has ended.

    In a run on several hosts it listens at an address and a port.
    """

    peer: int
    before: int = 0
    address: str = ""
    port: int = 0


@message
class LinkMessage(ToWorker):
    """The worker gets a link to worker `peer`; no other one of the run has its number.

    On one host its ends come along: a socket, the ring to that worker, the ring from it. Between hosts it has a token
    in hexadecimal, with which the other one connects; the worker that gets a port does so.
    """

    peer: int
    number: int
    token: str = ""
    address: str = ""
    port: int = 0


@message
class NextGroupMessage(ToWorker):
    """These members of a coming epoch form its group while they train; the attempt before is given up.

    An epoch may have several attempts, numbered from 1 on. A worker that is no member only gives up the one before.
    """

    epoch: int
    number: int
    members: tuple[int, ...]


@message
class NextGroupFormedMessage(TextsToAgent):
    """The worker has its part of the next group, or could not form it because of a `failure`, in words."""

    epoch: int
    number: int
    failure: str = ""


@message
class PureMessage(ToAgent):
    """The marks of some layers, by layer and name of the value, from the check before training."""

    rows: tuple[tuple[str, Mapping[str, str]], ...]
