"""The options of an agent on one of several hosts: each mistake is named, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core.hosts.host_options import CLEAR, TLS, HostOptions, problems_of
from engine.core.job.job import Job
from tests.looped import looped

JOB = Job(model="mlp", stages=4, checkpoint_every="0")
GOOD = HostOptions("4711", "2", "a", "10.0.0.1", ("10.0.0.9",), trusted="10.0.0.0/8")


def fields(given: HostOptions, job: Job = JOB, own: tuple[str, ...] = ("10.0.0.1", "127.0.0.2")) -> list[str]:
    """Returns the names of the fields with a mistake."""
    return [each.field for each in problems_of(given, job, own.__contains__)]


def test_good_options_have_no_mistake() -> None:
    assert fields(GOOD) == []
    assert fields(replace(GOOD, hosts="a,b")) == []
    assert fields(replace(GOOD, address="127.0.0.2", etcd=("127.0.0.1",), trusted="")) == []
    assert fields(replace(GOOD, workers=2)) == []


@looped(
    ("change", "field"),
    [
        ({"etcd": ()}, "--hosts"),
        ({"run_id": ""}, "--run"),
        ({"run_id": "a/b"}, "--run"),
        ({"lease_s": 2}, "--lease"),
        ({"hosts": "0"}, "--hosts"),
        ({"hosts": "a,a"}, "--hosts"),
        ({"hosts": "a,b c"}, "--hosts"),
        ({"hosts": "b,c"}, "--node"),
        ({"hosts": ",".join(["a", *(f"b{each}" for each in range(256))])}, "--hosts"),  # 257, of at most 256
        ({"node": "-a"}, "--node"),
        ({"hosts": "5"}, "--hosts"),  # more than workers
        ({"workers": 1}, "--workers"),
        ({"workers": -1}, "--workers"),
        ({"address": "here"}, "--address"),
        ({"address": "10.0.0.2"}, "--address"),  # of another host
        ({"address": "127.0.0.2"}, "--address"),  # the etcd is elsewhere
        ({"trusted": "192.168.0.0/16"}, "--trusted-network"),
        ({"trusted": "10.0.0.1/8"}, "--trusted-network"),  # bits of a host
    ],
)
def test_each_mistake_is_named(change: dict[str, Any], field: str) -> None:
    is_large = len(change.get("hosts", "")) > 256
    assert fields(replace(GOOD, **change), replace(JOB, stages=512) if is_large else JOB) == [field]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"backend": "nccl"}, "backend"),
        ({"fsdp": 1, "pipelines": 2}, "fsdp"),
        ({"checkpoint_every": "end"}, "checkpoints"),
    ],
)
def test_a_job_that_wants_one_host_is_refused(change: dict[str, Any], field: str) -> None:
    assert fields(GOOD, replace(JOB, **change)) == [field]
    assert fields(GOOD, replace(JOB, checkpoint_every="end", checkpoints="/shared")) == []


@pytest.mark.parametrize(("trusted", "transfers"), [("10.0.0.0/8", CLEAR), ("", TLS)])
@pytest.mark.parametrize("own", [{}, {"address": "127.0.0.2", "etcd": ("127.0.0.1",)}])
def test_tensors_travel_over_tls_unless_a_network_is_trusted(own: dict[str, Any], trusted: str, transfers: str) -> None:
    given = replace(GOOD, trusted=trusted, **own)
    assert fields(given) == []
    assert given.transfers == transfers


def test_all_mistakes_come_at_once() -> None:
    wrong = HostOptions("", "a,a", "-", "there", (), -1, "x", 0)
    assert fields(wrong, replace(JOB, backend="nccl")) == [
        "--hosts",
        "--run",
        "--lease",
        "--hosts",
        "--node",
        "--address",
        "--workers",
        "backend",
    ]
