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

    def connected(_: EtcdCalls, endpoint: Endpoint) -> Any:
        def method(request: Any, timeout: float, metadata: Any) -> str:
            asked.append(endpoint)
            if endpoint == GONE or (endpoint == LATE and asked.count(LATE) == 1):
                time.sleep(timeout)
                raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED)
            if endpoint == LEADERLESS:
                raise RefusedError(grpc.StatusCode.UNAVAILABLE)
            return "answer"

        return SimpleNamespace(methods={"Range": method}, metadata=())

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
    assert asked.count(GONE) == 1
    assert asked.count(LEADERLESS) > 5, "it may know a leader soon"
    assert calls(GONE, GOOD).call("Range", None) == "answer"
    assert asked.count(GONE) == 1, "another client of this process avoids it too"


def test_an_endpoint_that_only_refuses_does_not_keep_one_away_that_was_slow(
    asked: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader was killed; the other members were too slow during the election, and were not asked for 10 s."""
    monkeypatch.setattr(etcd_kv, "_REFUSES_S", 0.1)
    assert calls(LATE, LEADERLESS).call("Range", None) == "answer"
    assert asked.count(LATE) == 2
    assert calls(LEADERLESS, LATE).call("Range", None) == "answer"
    assert asked[-1] == LATE and asked.count(LATE) == 3


def test_the_only_endpoint_is_asked_again(asked: list[Endpoint]) -> None:
    with pytest.raises(CoordinatorUnavailableError):
        calls(GONE).call("Range", None)
    assert asked.count(GONE) > 2


def test_an_endpoint_is_asked_again_after_a_time(asked: list[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_kv, "_AVOIDED_S", 0.2)
    three = calls(GONE, LEADERLESS, GOOD)
    assert three.call("Range", None) == "answer"
    assert asked == [GONE, LEADERLESS, GOOD]
    time.sleep(0.2)
    with pytest.raises(CoordinatorUnavailableError):
        calls(GONE, LEADERLESS).call("Range", None)
    assert asked.count(GONE) > 2


def test_an_attempt_follows_the_answers_before_it_and_leaves_time_for_another(
    asked: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_kv, "ATTEMPT", Deadline(3 * 10**8, 10**8, 4, 3 * 10**8))

    waits_s: list[float] = []
    monkeypatch.setattr(time, "sleep", waits_s.append)  # that is how long the endpoint that is gone lets a call wait

    def limit_s(*endpoints: Endpoint, deadline_s: float) -> float:
        monkeypatch.setattr(etcd_kv, "_avoided_until_s", {})
        until_s = time.monotonic() + deadline_s
        assert EtcdCalls(EtcdSettings(endpoints), 9).attempt("Range", None, until_s) is None
        wait_s, _ = waits_s  # and the pause behind it
        waits_s.clear()
        return wait_s

    assert limit_s(GONE, deadline_s=100) == pytest.approx(0.3), "it may have to connect"
    assert 0.1 <= limit_s(GONE, GOOD, deadline_s=0.4) <= 0.2, "half of the time is for the other one"
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips((10**6,) * 20))
    assert limit_s(GONE, deadline_s=100) == pytest.approx(0.104), "a fast network"
    monkeypatch.setattr(etcd_kv, "_answers", RoundTrips((10**6,) * 20 + (4 * 10**7,)))
    assert limit_s(GONE, deadline_s=100) == pytest.approx(0.26), "a slow one"
    assert asked == [GONE] * 4
