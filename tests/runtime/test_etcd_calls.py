"""Calls to etcd at several endpoints, of which some do not answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from engine.core.deadlines import Deadline, RoundTrips
from engine.core.errors import CoordinatorUnavailableError
from engine.runtime.store import etcd_kv
from engine.runtime.store.etcd_kv import EtcdCalls
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings

GONE, LEADERLESS, GOOD, LATE = (Endpoint(name, 1) for name in ("gone", "leaderless", "good", "late"))


written: list[Endpoint] = []


class RefusedError(grpc.RpcError):  # type: ignore[misc]
    """An answer with a code."""

    def __init__(self, code: grpc.StatusCode):
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no answer"


@pytest.fixture(name="asked")
def _asked(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """Returns the endpoints that were asked, in order; one is gone, one knows no leader, one answers."""
    asked: list[Endpoint] = []
    written.clear()

    def connected(_: EtcdCalls, endpoint: Endpoint) -> Any:
        def method(request: Any, timeout: float, metadata: Any) -> str:
            asked.append(endpoint)
            if endpoint == GONE or (endpoint == LATE and asked.count(LATE) == 1):
                time.sleep(timeout)
                raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED)
            if endpoint == LEADERLESS:
                raise RefusedError(grpc.StatusCode.UNAVAILABLE)
            return "answer"

        def write(request: Any, timeout: float, metadata: Any) -> str:
            written.append(endpoint)
            return method(request, timeout, metadata)

        return SimpleNamespace(methods={"Range": method, "Txn": write}, metadata=())

    monkeypatch.setattr(EtcdCalls, "_connect", connected)
    monkeypatch.setattr(etcd_kv, "ATTEMPT", Deadline(10**8, 10**8, 4, 3 * 10**8))
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips())
    monkeypatch.setattr(etcd_kv, "PAUSE_S", 0.01)
    monkeypatch.setattr(etcd_kv, "_avoided_until_s", {})
    monkeypatch.setattr(etcd_kv, "_refuses_since_s", {})
    return asked


def calls(*endpoints: Endpoint) -> EtcdCalls:
    return EtcdCalls(EtcdSettings(endpoints), 0.5)


def test_an_endpoint_that_did_not_answer_costs_one_timeout(asked: list[Endpoint]) -> None:
    two = calls(GONE, LEADERLESS)
    with pytest.raises(CoordinatorUnavailableError):
        two.call("Range", None)
    assert asked[0] == GONE
    assert asked.count(GONE) <= 5, "once at a time"
    assert asked.count(LEADERLESS) > 5, "it may know a leader soon"
    count = asked.count(GONE)
    assert calls(GONE, GOOD).call("Range", None) == "answer"
    assert asked.count(GONE) == count, "another client of this process avoids it too"


def test_after_a_lost_attempt_all_are_asked_and_the_first_answer_counts(asked: list[Endpoint]) -> None:
    """The host that was cut off led etcd: the member here lost what it passed on, and the next endpoint was there."""
    three = calls(LATE, GONE, GOOD)
    began_s = time.monotonic()
    assert three.ask("Range", None) == ("answer", True)
    assert asked[:2] == [LATE, LATE] and time.monotonic() - began_s < 0.3, "the one that is gone is not waited for"
    count = len(asked)
    assert three.ask("Range", None) == ("answer", False)
    assert asked[count:] in ([LATE], [GOOD])


def test_an_endpoint_that_only_refuses_does_not_keep_one_away_that_was_slow(
    asked: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader was killed; the other members were too slow during the election, and were not asked for 10 s."""
    monkeypatch.setattr(etcd_kv, "_REFUSES_S", 0.1)
    assert calls(LATE, LEADERLESS).call("Range", None) == "answer"
    assert asked.count(LATE) == 2
    assert calls(LEADERLESS, LATE).call("Range", None) == "answer"
    assert asked.count(LATE) == 3


def test_a_write_is_sent_again_only_to_the_one_that_answers_a_read(asked: list[Endpoint]) -> None:
    """Two at once could come at any time: also after the next write."""
    assert calls(LEADERLESS, GONE, GOOD).ask("Txn", None) == ("answer", True)
    assert written == [LEADERLESS, GOOD]


def test_the_only_endpoint_is_asked_again(asked: list[Endpoint]) -> None:
    with pytest.raises(CoordinatorUnavailableError):
        calls(GONE).call("Range", None)
    assert asked.count(GONE) > 2


def test_an_endpoint_is_asked_again_after_a_time(asked: list[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_kv, "_AVOIDED_S", 0.2)
    three = calls(GONE, LEADERLESS, GOOD)
    assert three.call("Range", None) == "answer"
    assert asked[0] == GONE and GOOD in asked
    time.sleep(0.2)
    with pytest.raises(CoordinatorUnavailableError):
        calls(GONE, LEADERLESS).call("Range", None)
    assert asked.count(GONE) > 2


def test_an_attempt_follows_the_answers_before_it_and_leaves_time_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips())
    monkeypatch.setattr(etcd_kv, "ATTEMPT", Deadline(3 * 10**8, 10**8, 4, 3 * 10**8))

    def limit_s(*endpoints: Endpoint, left_s: float) -> float:
        return EtcdCalls(EtcdSettings(endpoints), 9)._timeout_s(left_s)

    assert limit_s(GONE, left_s=100) == pytest.approx(0.3), "it may have to connect"
    assert limit_s(GONE, GOOD, left_s=0.4) == pytest.approx(0.2), "half of the time is for the other one"
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips((10**6,) * 20))
    assert limit_s(GONE, left_s=100) == pytest.approx(0.104), "a fast network"
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips((10**6,) * 20 + (4 * 10**7,)))
    assert limit_s(GONE, left_s=100) == pytest.approx(0.26), "a slow one"
