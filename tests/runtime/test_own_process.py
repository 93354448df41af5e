"""A process of a worker for another host: whether it has left the run, or the run has stopped it."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.codec.messages import encode
from engine.core.errors import ExitCode
from engine.core.messages import PingMessage, StopMessage
from engine.runtime.agent.host_workers import LocalProcess


@pytest.mark.parametrize(
    ("message", "code", "has_left"),
    [
        (PingMessage(), ExitCode.LEFT_WITH_NOTICE, True),
        (PingMessage(), -signal.SIGKILL, True),  # by a second notice
        (PingMessage(), ExitCode.OK, False),  # at the end of the run
        (StopMessage(), -signal.SIGKILL, False),
    ],
)
def test_a_process_has_left_if_the_run_goes_on_without_it(message: Any, code: int, has_left: bool) -> None:
    sent: list[bytes] = []
    child, link = SimpleNamespace(is_closed=False), SimpleNamespace(send_packet=sent.append)
    process = LocalProcess(0, 1, cast(Any, child), cast(Any, link))
    process.tell(encode(message))
    process.tell(encode(PingMessage()))
    assert sent == [encode(message), encode(PingMessage())]
    assert not process.has_left
    process.code = code
    assert process.has_left is has_left
