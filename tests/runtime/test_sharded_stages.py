"""Stages in shards, between real processes: what each holds when; and a wait for the others ends with the epoch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.ownership import Grid, Ownership, fresh
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.process.control import Fenced
from engine.runtime.stage.gradient_log import LogEntry, laid_out, take_step
from engine.runtime.stage.replicas import Replicas, hash_rows
from engine.runtime.stage.sharded_stages import ShardedStages
from engine.runtime.stage.state_hash import Shard, hash_tensors
from tests.runtime.peer_messages import an_epoch
from tests.runtime.peers import PeerServer, PeerWorker, connect, plane_of

JOB = Job(model="mlp", stages=1, pipelines=2, microbatches=1, redundancy="none", fsdp=1, warmup_steps=0)


def replicas_of(worker: int) -> tuple[Replicas, Ownership]:
    ownership = fresh(Grid(1, 1, 2))
    return Replicas(JOB, build_model(JOB, open_data(JOB).facts), (0,), ownership.slots_of(worker)), ownership


def gradients_of(replicas: Replicas, worker: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    stage = replicas.stages[worker, 0]
    return [torch.randn(each.shape, generator=generator) for each in stage.trained()]


def takes_a_step(prefix: str, worker: int) -> Any:
    """Puts the stage together, takes it apart, takes an optimizer step; returns what was held, and hashes."""
    plane = plane_of(prefix, worker)
    replicas, ownership = replicas_of(worker)
    stage = replicas.stages[worker, 0]
    before = hash_tensors(stage.layers[0].named_parameters())
    replicas.learn(((),))
    shards = ShardedStages(worker, replicas)
    shards.enter(plane, ownership)
    sizes = [sum(each.untyped_storage().nbytes() for each in stage.trained())]
    shards.unshard(0)
    sizes.append(sum(each.untyped_storage().nbytes() for each in stage.trained()))
    # Of copies: what numpy has seen cannot be freed.
    together = hash_tensors((name, each.detach().clone()) for name, each in stage.layers[0].named_parameters())
    shards.reshard(0)
    sizes.append(sum(each.untyped_storage().nbytes() for each in stage.trained()))
    take_step(stage, LogEntry(laid_out(stage, gradients_of(replicas, worker)), ((), ()), ()), 0.1, 0.5)
    states = [each for optimizer in stage.optimizers.values() for _, each in optimizer.state_tensors() if each.dim()]
    local = sum(each.numel() for each in states)
    after = [row[:3] for _, row in shards.hash_rows()]
    shards.unshard(0)
    again = hash_tensors((name, each.detach().clone()) for name, each in stage.layers[0].named_parameters())
    plane.release_sent()
    plane.close()
    return {"sizes": sizes, "kept": before == together, "local": local, "after": after, "again": again}


def test_a_shard_is_kept_and_a_step_of_shards_is_the_step_of_the_whole(peers: PeerServer) -> None:
    started = [peers.start(takes_a_step, "takes-a-step", worker) for worker in range(2)]
    results = [each.result() for each in started]
    replicas, _ = replicas_of(0)
    stage = replicas.stages[0, 0]
    num_bytes = sum(each.nbytes for each in stage.trained())
    take_step(stage, LogEntry(laid_out(stage, gradients_of(replicas, 0)), ((), ()), ()), 0.1, 0.5)
    for result in results:
        assert result["sizes"] == [0, num_bytes, 0]
        assert result["kept"]
        assert result["after"] == [list(row[:3]) for row in hash_rows(stage, replicas.device)]
        assert result["again"] == hash_tensors(stage.layers[0].named_parameters())
    whole = 3 * num_bytes // 4  # float32: the weights and two moments
    assert sum(result["local"] for result in results) == whole
    assert all(0 < result["local"] < 0.6 * whole for result in results)


def waits_alone(prefix: str, worker: int) -> Any:
    """Worker 0 puts its stage together while worker 1 stays away, and an epoch has been told."""
    store, me = connect(prefix), PeerWorker(prefix, worker)
    plane = me.enter(0)
    replicas, ownership = replicas_of(worker)
    replicas.learn(((),))
    shards = ShardedStages(worker, replicas)
    shards.enter(plane, ownership)
    outcome = "stayed away"
    if worker == 0:
        me.control._take_in(an_epoch(1, (0, 1)), [])
        try:
            shards.unshard(0)
        except Fenced:
            outcome = "fenced"
        store.set("is-out", b"yes")
    store.wait(["is-out"], timedelta(seconds=60))
    plane.close()
    return outcome


def test_a_wait_for_the_others_ends_with_the_epoch(peers: PeerServer) -> None:
    started = [peers.start(waits_alone, "waits-alone", worker) for worker in range(2)]
    assert [each.result() for each in started] == ["fenced", "stayed away"]


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 2), (8,)])
def test_shards_are_the_chunks_of_a_tensor_and_its_views(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.zeros(shape).numel())).reshape(shape)
    parts = [Shard(each, 4).of(whole) for each in range(4)]
    if shape:
        chunks = [each for each in whole.chunk(4) if len(each)]
        assert [each.tolist() for each in parts if len(each)] == [each.tolist() for each in chunks]
        assert torch.cat(parts).tolist() == whole.tolist()
    for each in parts:
        each.add_(1)  # of a scalar, four times the same
    assert whole.tolist() == (torch.arange(float(whole.numel())).reshape(shape) + (1 if shape else 4)).tolist()


def test_weights_in_another_order_are_refused() -> None:
    replicas, _ = replicas_of(0)
    layer = replicas.stages[0, 0].layers[0]
    linear = next(each for each in layer.modules() if isinstance(each, nn.Linear))
    linear.weight.data = linear.weight.data.t().contiguous().t()
    with pytest.raises(UserError, match="weights that are not contiguous"):
        replicas.learn(((),))
