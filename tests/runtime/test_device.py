"""The device of a worker: jobs on a double of a GPU have the bits of the host, and each forgotten copy is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.core.checkpoint_rules import Resumption
from engine.core.checks.trajectory import trajectory_hash
from engine.core.errors import EnvironmentLacksError
from engine.core.job.job import Job
from engine.files.checkpoint_folder import checkpoints_at
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.runtime.agent import session
from engine.runtime.agent.run_state import Ending
from engine.runtime.device.copies import StreamCopies, ToHost, tensors_of
from engine.runtime.device.device import HOST, Device, open_device, ordinal
from engine.runtime.stage import state_transfer
from engine.runtime.stage.replicas import ValueStore
from engine.runtime.stage.stage import build_layer
from engine.runtime.transport.direct_transport import EndChannel
from engine.runtime.worker import microbatches as microbatch_loader
from tests.doubles.fake_gpu import PLACE, FakeGpu, MixedDevicesError, fake_gpu
from tests.kills import parse_kills
from tests.looped import looped
from tests.runtime.marked_waits import unmarked_waits
from tests.runtime.small_jobs import NORMED as WITH_BUFFERS
from tests.runtime.thread_runs import run_in_threads

MLP: dict[str, Any] = {"model": "mlp", "steps": 3, "stages": 3, "microbatches": 2, "validate_every": 2}
GPT: dict[str, Any] = {**MLP, "model": "gpt", "model_args": {"width": 8, "depth": 1, "heads": 1, "tied": True}}
RESNET: dict[str, Any] = {**MLP, "model": "resnet18", "model_args": {"width": 4}, "microbatch_size": 2}
LONGER: dict[str, Any] = {"steps": 4, "microbatches": 4}
NORMED: dict[str, Any] = {**MLP, **WITH_BUFFERS}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A double of one GPU, which the launcher finds too; each wait of a main thread for it must be marked."""
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    with fake_gpu() as gpu, unmarked_waits(gpu) as unmarked:
        yield gpu
    assert unmarked == []


def run(job: Job, *kills: str, **options: Any) -> Ending:
    ending = run_in_threads(job, parse_kills(kills, job), **options)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.state for worker in ending.view.workers].count("dead") == len(kills)
    return ending


def trajectory(ending: Ending) -> str:
    return trajectory_hash(ending.view.run_state.rows)


def same_bits(gpu: FakeGpu, fields: dict[str, Any]) -> None:
    kill = "1:1:I:1" if fields.get("schedule") == "zb1p" else "1:1:B:1"
    expected = trajectory(run(Job(**fields, check_pure=False), kill))
    assert not gpu.copies and not gpu.opened_in
    assert trajectory(run(Job(**fields, device="cuda", share_gpu=True), kill)) == expected
    assert min(gpu.copies["to host"], gpu.copies["to device"]) > 10
    assert len(gpu.opened_in) == Job(**fields).num_workers


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({**GPT, "log_every": 1, "retain": "cpu"}, id="gpt", marks=pytest.mark.soak),
        pytest.param(NORMED, id="normed"),
        pytest.param({**NORMED, "microbatches": 5, "schedule": "gpipe", "offload": "host"}, id="offloaded"),
    ],
)
def test_a_job_with_a_death_and_a_heal_has_the_bits_of_the_host(gpu: FakeGpu, fields: dict[str, Any]) -> None:
    same_bits(gpu, fields)


def test_values_that_stay_on_the_host_are_used_after_a_death(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    consume, to_send, sent = ValueStore.consume, ValueStore.to_send, ValueStore.sent

    def noted(what: str, values: ValueStore, value: Any) -> None:
        if isinstance(values._tensors[value], ToHost):
            used.append(what)

    def consuming(values: ValueStore, value: Any) -> Any:
        noted("consumed", values, value)
        return consume(values, value)

    def sending(values: ValueStore, value: Any) -> Any:
        noted("sent again", values, value)
        return to_send(values, value)

    def kept(values: ValueStore, value: Any, leaving: Any) -> None:
        sent(values, value, leaving)
        assert not any(map(gpu.holds, tensors_of(values._tensors[value])))

    monkeypatch.setattr(ValueStore, "consume", consuming)
    monkeypatch.setattr(ValueStore, "to_send", sending)
    monkeypatch.setattr(ValueStore, "sent", kept)
    run(Job(**MLP | {"steps": 2, "microbatches": 4}, device="cuda", share_gpu=True, retain="cpu"), "1:1:B:1")
    assert set(used) == {"consumed", "sent again"}


@pytest.mark.soak
@pytest.mark.parametrize(
    "fields",
    [
        {**MLP, **LONGER},
        {**GPT, **LONGER, "log_every": 2, "redundancy": "eager"},
        {**RESNET, **LONGER, "log_every": 2},
        {**MLP, **LONGER, "pipelines": 2, "redundancy": "reroute"},
        {**GPT, **LONGER, "pipelines": 2, "activation_checkpoint": 1},
        {**MLP, **LONGER, "optimizer": "adam", "clip_norm": 0.1},
        {**MLP, **LONGER, "optimizer": "nadam", "schedule": "zb1p"},
        {**MLP, **LONGER, "optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "partition": "profile"},
        {**MLP, **LONGER, "blocks": 2, "model_args": {"depth": 5, "width": 8}},
    ],
    ids=lambda fields: "-".join(map(str, [fields["model"], *list(fields)[5:]])),
)
def test_every_way_of_state_has_the_bits_of_the_host(gpu: FakeGpu, fields: dict[str, Any]) -> None:
    same_bits(gpu, fields)


@pytest.mark.parametrize("fields", [MLP, pytest.param(RESNET, marks=pytest.mark.soak)], ids=["mlp", "resnet18"])
def test_a_checkpoint_of_either_device_is_resumed_on_the_other(
    gpu: FakeGpu, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The double computes as the host does, so the rows of both are those of a run without an end."""
    job = Job(**fields | {"steps": 3, "checkpoint_every": "1", "checkpoints": str(tmp_path / "kept")})
    on_gpu = replace(job, device="cuda", share_gpu=True)
    whole = run(on_gpu).view.run_state.rows
    names = {each.step: each.file for each in checkpoints_at(job.checkpoints).names()}
    origin = Resumption(1, job.checkpoints, names[1])
    for each in (job, on_gpu):
        rest = run(replace(each, checkpoints=str(tmp_path / each.device)), origin=origin).view.run_state.rows
        assert [row for row in whole if row.step == 2] == [row for row in rest if row.step == 2]


def _losses_on_host(stage: Any) -> tuple[Tensor, ...]:
    return (torch.tensor([0.0] * stage.job.microbatches, dtype=torch.float64, device="cpu"),) if stage.is_last else ()


def _seed_of_host_only(device: Device, key: int) -> None:
    torch.default_generator.manual_seed(key)


def _taken_on_host(channel: Any, source: int, key: Any) -> Any:
    return channel._of.arrived.pop((source, key), None)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a batch": lambda patch: patch.setattr(microbatch_loader, "on_device", lambda batch, device: batch),
    "a message": lambda patch: patch.setattr(EndChannel, "take_arrived", _taken_on_host),
    "losses beside buffers": lambda patch: patch.setattr("engine.runtime.worker.step_end.losses_of", _losses_on_host),
    "a number of an optimizer": lambda patch: patch.setattr(state_transfer, "_on_host", lambda tensor: True),
    "the seed": lambda patch: patch.setattr(Device, "seed", _seed_of_host_only),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_slip_is_found(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fields = {"a batch": MLP, "the seed": GPT, "a number of an optimizer": MLP | {"steps": 6}}.get(name, NORMED)
    job = Job(**fields, device="cuda", share_gpu=True)
    PLANTED[name](monkeypatch)
    ending = run_in_threads(job, parse_kills(["1:1:B:1"], job))
    assert ending.outcome == "failed", name


def test_buffers_that_share_memory_share_it_on_the_device_too() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3).t())
            self.register_buffer("whole", torch.arange(6.0))
            self.register_buffer("part", self.get_buffer("whole")[2:4])
            self.register_buffer("again", self.get_buffer("whole"))

    model = Model((LayerSpec("shared", "Shared", Shared),), default_loss)
    with fake_gpu() as gpu:
        layer = build_layer(Job(), model, 0, Device(PLACE, is_host=False, copies=StreamCopies(PLACE)))
        whole, part, again = (layer.get_buffer(name) for name in ("whole", "part", "again"))
        assert gpu.holds(whole) and gpu.holds(layer.get_parameter("weight")) and again is whole
        assert layer.get_parameter("weight").stride() == (1, 3)
        part.fill_(9.0)
        assert whole.tolist() == [0.0, 1.0, 9.0, 9.0, 4.0, 5.0]


def test_the_double_refuses_what_a_gpu_refuses() -> None:
    with fake_gpu() as gpu:
        there, here = torch.ones(3, device=PLACE), torch.ones(3, device="cpu")
        assert (there.device, here.device) == (PLACE, torch.device("cpu"))
        assert (there * torch.tensor(2.0)).device == PLACE
        for forbidden in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here.index_add(0, there, here),
        ):
            with pytest.raises(MixedDevicesError):
                forbidden()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, generator=torch.Generator(), device=PLACE)
        assert there.cpu().numpy().tolist() == [1, 1, 1] and gpu.copies["to host"] == 1


@looped(
    ("rank", "num_gpus", "shares", "number"),
    [
        (0, 1, False, 0),
        (3, 4, False, 3),
        (3, 1, True, 0),
        (3, 2, True, 1),
        (0, 0, False, -1),
        (0, 0, True, -1),
        (1, 1, False, -1),
        (4, 4, False, -1),
    ],
)
def test_each_worker_has_a_gpu_of_its_own_unless_they_share(
    rank: int, num_gpus: int, shares: bool, number: int
) -> None:
    if number >= 0:
        assert ordinal(rank, num_gpus, shares=shares) == number
        return
    with pytest.raises(EnvironmentLacksError, match=f": {num_gpus} GPU.* this is number {rank + 1} on its host"):
        ordinal(rank, num_gpus, shares=shares)


def test_on_the_host_nothing_is_copied() -> None:
    tensors = (torch.ones(3),)
    assert open_device("cpu", 5) == HOST
    assert HOST.put(tensors[0]) is tensors[0]
    assert HOST.put_all(tensors) is tensors and HOST.copies.fetched(tensors) is tensors


class Held(nn.Module):
    """Makes tensors on the device of its input, and has one that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = torch.linspace(0.5, 1.5, 8, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1], device=x.device) / 8
        for block in self.blocks:
            x = x + block(x * self.scale) * places.to(x.device, x.dtype) + torch.ones(8, device=x.device)
        return x


def held() -> Held:
    return Held()


class OnTheHost(Held):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.ones(8))


def on_the_host() -> OnTheHost:
    return OnTheHost()


OWN: dict[str, Any] = {"data": "synthetic", "data_args": {"features": 8, "outputs": 8}, "steps": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "tests.runtime.test_device:held", **OWN},
        pytest.param({"model": "tests.runtime.test_device:held", **OWN, "dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param(
            {"model": "tests.e2e.ordinary_modules:language_model", "model_args": {"dropout": 0.1}, "data": "text"},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["held", "held, bfloat16", "language model"],
)
def test_an_ordinary_module_has_the_bits_of_the_host(gpu: FakeGpu, fields: dict[str, Any]) -> None:
    same_bits(gpu, {"steps": 3, "stages": 3, "microbatches": 2, "validate_every": 2, **fields})


def test_a_module_that_makes_a_tensor_on_the_host_is_told(gpu: FakeGpu) -> None:
    fields = {"model": "tests.runtime.test_device:on_the_host", "stages": 3, "microbatches": 2, **OWN}
    ending = run_in_threads(Job(**fields, device="cuda", share_gpu=True))
    assert ending.outcome == "failed"
    assert "layer 0 (from blocks.0): MixedDevicesError" in str(ending.error)
