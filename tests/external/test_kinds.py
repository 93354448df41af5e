"""The signals of faults that strike any process."""

from __future__ import annotations

import itertools
import signal

from engine.external.kinds import PAUSE, SLOW, signals_of

MS = 1_000_000


def test_a_slow_process_is_stopped_for_its_part_of_each_period() -> None:
    timed = list(signals_of(SLOW, {"factor": 4.0, "for_ns": 60 * MS}))
    assert [each.after_ns // MS for each in timed] == [0, 15, 20, 35, 40, 55]
    assert {each.number for each in timed[::2]} == {signal.SIGSTOP} and timed[-1].number == signal.SIGCONT
    endless = list(itertools.islice(signals_of(SLOW, {"factor": 2.0}), 1001))
    assert endless[-1].after_ns == 500 * 20 * MS
    assert [each.after_ns for each in signals_of(PAUSE, {"for_ns": 7})] == [0, 7]
