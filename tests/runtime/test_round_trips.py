"""The round trips to another host, as its signs of life carry them back, and the deadlines that follow."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.history.process_records import NetworkRecord
from engine.core.hosts.host_messages import SignsHostMessage
from engine.core.hosts.host_options import RegisteredHost
from engine.core.protocol.run_status import status_of_history
from engine.runtime.agent import remote_workers
from engine.runtime.agent.frames import read_from_host, sign_frames
from engine.runtime.agent.remote_workers import RemoteSpawner
from tests.core.made_records import made_history

MS = 1_000_000
TICK_NS = 250 * MS


class Clock:
    """The clock of the host that coordinates."""

    now_ns = 10**15

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(remote_workers, "now_ns", clock := Clock())
    return clock


def signs(away: RemoteSpawner, clock: Clock, round_trip_ms: float, *, times: int = 20, late_ms: float = 0) -> None:
    """Lets signs come, each with the tick before it, which the other host has held for a tenth of a second."""
    for _ in range(times):
        sent_ns = clock.now_ns
        clock.now_ns += TICK_NS + round(late_ms * MS)
        held_ns = clock.now_ns - sent_ns - round(round_trip_ms * MS)
        (data,) = sign_frames(1, 77, [], (sent_ns, held_ns))
        header, packet = read_from_host(data)
        away._deliver(header, packet)


def test_the_deadlines_of_a_host_follow_its_round_trips(clock: Clock) -> None:
    away = RemoteSpawner(RegisteredHost("b", "1", "10.0.0.2", 1, {}, lease_s=7))
    signs(away, clock, 0.2, times=19)
    assert away.network_record() is None
    signs(away, clock, 0.2, times=1)
    record = away.network_record()
    assert record == NetworkRecord(of="b", worst_ns=200_000, silent_ns=801 * MS, back_ns=201_200_000, lease_s=7)
    assert away.network_record() is None, "nothing is new"
    signs(away, clock, 200.0, times=1)
    assert str(away.network_record()) == (
        "host b is lost after 1.8 s of silence, or 1.4 s without a stream, or with its lease of 7 s "
        "(round trips of up to 200 ms)"
    )
    signs(away, clock, 0.2, times=240)
    assert away.network_record() is not None, "a minute without a slow one"
    assert away.round_trips.worst_ns == 200_000


def test_signs_that_come_late_make_a_host_waited_for(clock: Clock) -> None:
    away = RemoteSpawner(RegisteredHost("b", "1", "10.0.0.2", 1, {}))
    signs(away, clock, 0.2, late_ms=300)
    assert away.round_trips.worst_ns == 150 * MS


@pytest.mark.parametrize("echo", [(), (1, 2)])
def test_an_echo_comes_over_the_wire(echo: tuple[int, ...]) -> None:
    (data,) = sign_frames(3, 4, [], echo)
    assert read_from_host(data)[0] == SignsHostMessage(3, 4, (), echo)


@pytest.mark.parametrize("echo", [(1,), (1, 2, 3), (-1, 2), (1, -2)])
def test_an_echo_of_another_form_is_refused(echo: Any) -> None:
    (data,) = sign_frames(3, 4, [], echo)
    with pytest.raises(Exception, match="two times"):
        read_from_host(data)


def test_the_status_has_the_last_deadlines_of_each_host() -> None:
    told = [("b", 2.0), ("c", 0.9), ("b", 0.8)]
    records = [
        {
            "event": "network",
            "worker": -1,
            "at_ns": at,
            "of": of,
            "worst_ns": MS,
            "silent_ns": round(s * 1e9),
            "back_ns": MS,
        }
        for at, (of, s) in enumerate(told)
    ]
    own = {"event": "host", "worker": -1, "at_ns": 0, "cpu": "", "cores": 1, "python": "", "torch": "", "began": ""}
    own |= {"node": "a", "lease_s": 17}
    lines = status_of_history("r", made_history([{"event": "job"}, own, *records])).policy
    assert [line.partition(" of silence")[0] for line in lines] == [
        "host a is lost after 17 s without a renewal of its lease",
        "host b is lost after 0.8 s",
        "host c is lost after 0.9 s",
        "a worker is lost after 5 s",
    ]
