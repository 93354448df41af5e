"""Healing between real processes: a new replica has every bit of its owner's, and a wrong bit is told by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.core.job.job import Job
from engine.core.ownership import Slot
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.stage import state_transfer as heal
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.gradient_log import LogEntry, losses_of, take_step
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.state_hash import hash_tensors
from engine.runtime.stage.state_transfer import send_state, state_of, take_state
from engine.runtime.transport.direct_transport import DirectTransport
from engine.runtime.transport.transfers import chunks_of
from engine.runtime.transport.transport import TensorSpec
from tests.runtime.peers import PeerServer, an_aside, an_order, plane_of
from tests.runtime.small_jobs import ALL_KINDS, NORMED, TIED_GPT, small_job, starts_of

SLOT = (0, 1)
KEY = an_aside(7)
ONE = TensorSpec((1,), torch.float32, False)
JOBS: dict[str, dict[str, Any]] = {
    "adamw": NORMED,
    "sgd": NORMED | {"optimizer": "sgd"},
    "momentum": NORMED | {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
    "two pipelines": NORMED | {"pipelines": 2},
    "all kinds": ALL_KINDS | {"pipelines": 2},
    "gpt": TIED_GPT,
    "large": {"model": "mlp", "model_args": {"width": 900, "depth": 3}, "stages": 2},
}


def replicas_of(job: Job, slots: Sequence[Slot]) -> Replicas:
    model = build_model(job, open_data(job).facts)
    return Replicas(job, model, starts_of(job, model), slots)


def changed(buffer: Tensor, by: int) -> Tensor:
    return buffer ^ bool(by) if buffer.dtype is torch.bool else buffer + by


def trained(job: Job, num_steps: int) -> Replicas:
    """Returns a replica that has taken steps, and is in the middle of one more."""
    replicas = replicas_of(job, [SLOT])
    stage = replicas.stages[SLOT]
    generator = torch.Generator().manual_seed(5)
    for step in range(num_steps + 1):
        for buffer in stage.buffers():
            overwrite(buffer, changed(buffer, 1))
        for parameter in stage.trained():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if step < num_steps:
            buffers = tuple(
                tuple(changed(buffer, 10 * each) for buffer in stage.buffers()) for each in range(job.pipelines)
            )
            take_step(stage, LogEntry(stage.gradients(), buffers, (losses_of(stage),) * job.pipelines), 0.1, 1.0)
            stage.forget_step()
    return replicas


def state_bits(replicas: Replicas) -> list[list[Any]]:
    """Returns what the state as of the boundary is, with its strides and its bits."""
    return [
        [*map(str, place), str(tensor.dtype), list(tensor.shape), list(tensor.stride()), hash_tensors([("", tensor)])]
        for place, tensor in state_of(replicas.stages[SLOT])
    ]


def sends(prefix: str, values: dict[str, Any], num_steps: int) -> Any:
    replicas = trained(small_job(**values), num_steps)
    plane = plane_of(prefix, 0)
    send_state(plane.aside, (1,), KEY, replicas.stages[SLOT])
    _part(plane, 1)
    return state_bits(replicas)


def takes(prefix: str, values: dict[str, Any]) -> Any:
    replicas = replicas_of(small_job(**values), [])
    replicas.await_heal(SLOT)
    assert replicas.whole() == ()
    plane = plane_of(prefix, 1)
    assert take_state(plane.aside, 0, KEY, replicas.stages[SLOT]) > 0
    replicas.healed(SLOT)
    assert replicas.whole() == (SLOT,)
    stage = replicas.stages[SLOT]
    assert all(torch.equal(*pair) for pair in zip(stage.buffers(), stage.boundary[0], strict=True))
    _part(plane, 0)
    return state_bits(replicas)


def _part(plane: DirectTransport, other: int) -> None:
    """Leaves when the other has all that it needs."""
    plane.in_order.post(other, an_order(3), (ONE,))
    plane.in_order.send(other, an_order(3), (torch.ones(1),))
    plane.in_order.take(other, an_order(3))
    plane.release_sent()
    plane.close()


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("name", JOBS)
def test_a_new_replica_has_the_bits_of_the_boundary(peers: PeerServer, name: str, num_steps: int) -> None:
    prefix = f"heal/{name}/{num_steps}"
    owner = peers.start(sends, prefix, JOBS[name], num_steps)
    shadow = peers.start(takes, prefix, JOBS[name])
    sent, got = owner.result(), shadow.result()
    assert got == sent
    has_optimizer_state = any(line[0] == "optimizer" for line in sent)
    assert has_optimizer_state == (num_steps > 0 and name != "sgd")


@pytest.mark.parametrize("name", ["adamw", "two pipelines"])
def test_what_is_sent_is_as_of_the_boundary_though_forwards_have_run_since(name: str) -> None:
    stage = trained(small_job(**JOBS[name]), 2).stages[SLOT]
    sent = [tensor for place, tensor in state_of(stage) if place[0] == "buffer"]
    of_boundary = [buffer for buffers in stage.boundary for buffer in buffers]
    assert all(torch.equal(*pair) for pair in zip(sent, of_boundary, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(sent, stage.buffers(), strict=False))


def sends_and_waits(prefix: str) -> None:
    """What the other expects first of all it sends last, when it has heard that the replica is whole."""
    replicas, plane = trained(small_job(**NORMED), 1), plane_of(prefix, 0)
    send_state(plane.aside, (1,), KEY, replicas.stages[SLOT])
    plane.in_order.post(1, an_order(1), (ONE,))
    plane.in_order.take(1, an_order(1))
    plane.in_order.send(1, an_order(2), (torch.ones(1),))
    _part(plane, 1)


def takes_while_it_expects_another(prefix: str) -> Any:
    replicas, plane = replicas_of(small_job(**NORMED), []), plane_of(prefix, 1)
    plane.in_order.post(0, an_order(2), (ONE,))
    replicas.await_heal(SLOT)
    take_state(plane.aside, 0, KEY, replicas.stages[SLOT])
    plane.in_order.send(0, an_order(1), (torch.ones(1),))
    plane.in_order.take(0, an_order(2))
    _part(plane, 0)
    return True


def test_a_state_need_not_wait_for_what_was_posted_before_it(peers: PeerServer) -> None:
    peers.start(sends_and_waits, "aside")
    assert peers.start(takes_while_it_expects_another, "aside").result()


def sends_a_wrong_bit(prefix: str, what: str) -> None:
    replicas = trained(small_job(**NORMED), 1)
    plane = plane_of(prefix, 0)
    stage = replicas.stages[SLOT]
    wrong = next(tensor for place, tensor in state_of(stage) if place[0] == what)
    hash_of = heal._hash_of
    heal._hash_of = lambda tensor: hash_of(tensor) if tensor.data_ptr() != wrong.data_ptr() else "0"
    send_state(plane.aside, (1,), KEY, stage)
    _part(plane, 1)


def finds_a_wrong_bit(prefix: str) -> list[Any]:
    replicas = replicas_of(small_job(**NORMED), [])
    replicas.await_heal(SLOT)
    plane = plane_of(prefix, 1)
    with pytest.raises(InvariantError) as refused:
        take_state(plane.aside, 0, KEY, replicas.stages[SLOT])
    _part(plane, 0)
    return [str(refused.value), replicas.whole()]


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("weight", "layer 1 (1), weight norm.weight"),
        ("optimizer", "layer 1 (1), optimizer norm.weight step"),
        ("buffer", "pipeline 0, buffer 0"),
    ],
)
def test_a_wrong_bit_is_told_by_name(peers: PeerServer, what: str, where: str) -> None:
    peers.start(sends_a_wrong_bit, f"wrong/{what}", what)
    text, whole = peers.start(finds_a_wrong_bit, f"wrong/{what}").result()
    expected = "the new replica of layers 1 to 2 of pipeline 0 is not what its owner sent: "
    assert text == expected + where
    assert whole == []


def test_pieces_cover_every_byte_once_and_are_bounded() -> None:
    mib = 1 << 20
    sizes = [5, 0, 40 * mib, 7 * mib // 8, 3, *[mib - 1] * 20, 16 * mib, mib]
    pieces = chunks_of(sizes)
    covered: dict[int, int] = {}
    for piece in pieces:
        assert 0 < sum(end - start for _, start, end in piece) <= 16 * mib
        for index, start, end in piece:
            if len(piece) > 1:
                assert sizes[index] < mib, "a large tensor travels by itself"
            assert start == covered.get(index, 0)
            covered[index] = end
    assert covered == {index: size for index, size in enumerate(sizes) if size}
    assert chunks_of([]) == chunks_of([0, 0]) == []


def test_an_adopted_replica_has_the_buffers_of_its_own_pipeline_as_of_the_boundary() -> None:
    job = small_job(**NORMED | {"pipelines": 2})
    replicas = trained(job, 2)
    source = replicas.stages[SLOT]
    replicas.adopt((1, 1))
    adopted = replicas.stages[1, 1]
    assert replicas.whole() == (SLOT, (1, 1))
    assert adopted.pipeline == 1
    assert all(torch.equal(*pair) for pair in zip(adopted.buffers(), source.boundary[1], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(adopted.buffers(), source.buffers(), strict=True))
    assert (adopted.counted, adopted.added, adopted.losses) == (0, 0, {})
    for index, optimizer in adopted.optimizers.items():
        pairs = zip(optimizer.state_tensors(), source.optimizers[index].state_tensors(), strict=True)
        for (name, mine), (other_name, other) in pairs:
            assert name == other_name
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr(), "two replicas share memory"
    buffers = [buffer.clone() for buffer in source.boundary[1]]
    for buffer in adopted.buffers():
        buffer.add_(1)
    assert all(torch.equal(*pair) for pair in zip(buffers, source.boundary[1], strict=True))
