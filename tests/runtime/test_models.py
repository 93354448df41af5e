"""Built-in models: published parameter counts, training layer by layer, ties, same bits, and wrong arguments."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.core.random_key import weights_key
from engine.core.units import Args
from engine.models import networks as timed
from engine.models.data import DataFacts
from engine.models.data_sources import open_data
from engine.models.layers import Batch, Model, Tie, as_tensors
from engine.models.losses import metrics_of
from engine.models.model_loader import build_model
from engine.models.model_registry import MODELS
from engine.models.networks import AveragePool

IMAGENET = DataFacts(task="classify", num_classes=1000, channels=3, height=224, width=224)
SMALL_ARGS: dict[str, Args] = {
    "gpt": {"width": 16, "depth": 2},
    "gpt-100m": {"width": 16, "depth": 2, "heads": 2},
    "gpt-1b": {"width": 16, "depth": 2, "heads": 2, "dropout": 0.1},
    "bert": {"width": 16, "depth": 2, "tied": True},
    "vgg19": {"width": 4, "hidden": 32},
    "alexnet": {"width": 4, "hidden": 32},
    "mlp": {"dropout": 0.1},
    "timed": {"forward_ms": 1, "backward_ms": 1.5},
    **{f"resnet{depth}": {"width": 4} for depth in (18, 34, 50, 101, 152)},
}


def job_of(name: str, **model_args: str | int | float | bool) -> Job:
    return Job(model=name, model_args={**SMALL_ARGS[name], **model_args})


def opened(job: Job) -> tuple[Model, Batch]:
    data = open_data(job)
    return build_model(job, data.facts), data.microbatch(0, 0, 0, job.microbatch_size)


def build(model: Model) -> list[nn.Module]:
    layers = []
    for index, spec in enumerate(model.layers):
        torch.manual_seed(weights_key(0, index))
        layers.append(spec.build())
    return layers


def outputs_of(layers: list[nn.Module], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns what each layer gave, each run under its own key."""
    outputs: list[Tensor] = []
    values = inputs
    for index, layer in enumerate(layers):
        torch.manual_seed(index)
        values = as_tensors(layer(*values), f"layer {index}")
        outputs += values
    return outputs


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("vgg19", 143_667_240),
        ("alexnet", 61_100_840),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, published: int) -> None:
    with torch.device("meta"):
        layers = [spec.build() for spec in build_model(Job(model=name), IMAGENET).layers]
        scores = outputs_of(layers, (torch.empty(2, 3, 224, 224),))[-1]
    assert sum(parameter.numel() for layer in layers for parameter in layer.parameters()) == published
    assert scores.shape == (2, 1000)


def test_the_parameters_of_a_gpt_are_those_of_its_formula() -> None:
    width, depth, sequence = 32, 3, 32
    layers = build(opened(Job(model="gpt", model_args={"width": width, "depth": depth}))[0])
    block = 12 * width**2 + 13 * width
    expected = 2 * 256 * width + sequence * width + depth * block + 2 * width
    assert sum(parameter.numel() for layer in layers for parameter in layer.parameters()) == expected


@pytest.mark.parametrize(("name", "millions"), [("gpt-100m", 100.4), ("gpt-1b", 1010.3)])
def test_a_model_of_a_real_size_has_the_parameters_of_its_name(name: str, millions: float) -> None:
    """On the meta device, so that nothing is allocated."""
    facts = open_data(Job(data_args={"sequence": 1024})).facts
    with torch.device("meta"):
        layers = [spec.build() for spec in build_model(Job(model=name), facts).layers]
        scores = outputs_of(layers, (torch.empty(1, 1024, dtype=torch.int64),))[-1]
    assert round(sum(each.numel() for layer in layers for each in layer.parameters()) / 1e6, 1) == millions
    assert scores.shape == (1, 1024, 256)
    assert not any(list(layer.buffers()) for layer in layers), "no mask of the square of the sequence"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_is_the_same_function(dtype: torch.dtype) -> None:
    args = {"width": 32, "depth": 1, "heads": 2, "dropout": 0.0}
    found = []
    for fused in (False, True):
        model, batch = opened(Job(model="gpt", model_args={**args, "fused": fused}))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found.append(outputs_of(build(model), batch.inputs)[-1].float())
    torch.testing.assert_close(*found, atol=1e-5 if dtype == torch.float32 else 2e-3, rtol=0)
    assert not torch.equal(*found)


@pytest.mark.parametrize("name", MODELS)
def test_layers_train_one_by_one_on_detached_inputs(name: str) -> None:
    model, batch = opened(job_of(name))
    layers = build(model)
    tape, values = [], batch.inputs
    for index, layer in enumerate(layers):
        leaves = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        values = as_tensors(layer(*leaves), f"layer {index}")
        assert all(leaf._version == 0 for leaf in leaves), f"{model.layers[index].name} writes into its input"
        tape.append((leaves, values))
    leaves = tuple(value.detach().requires_grad_() for value in values)
    loss = model.loss(leaves, batch.targets)
    assert loss.dim() == 0
    assert loss.isfinite()
    loss.backward()
    for inputs, outputs in reversed(tape):
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])
        leaves = inputs
    gradients = [parameter.grad for layer in layers for parameter in layer.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    metrics = metrics_of(model, values, batch.targets)
    assert (not metrics) == batch.targets[0].is_floating_point()
    assert all(0 <= metric <= 1 for metric in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt", "gpt-1b", "bert", "resnet18", "resnet50", "vgg19", "alexnet", "mlp"])
def test_a_forward_without_gradients_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model, batch = opened(job_of(name))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with_gradients = outputs_of(build(model), batch.inputs)
        with torch.no_grad():
            without = outputs_of(build(model), batch.inputs)
    for index, (one, other) in enumerate(zip(with_gradients, without, strict=True)):
        assert torch.equal(one, other), f"layer {index}"


def test_dropout_draws_from_the_default_generator() -> None:
    for name in ("gpt", "bert", "mlp", "vgg19", "alexnet"):
        model, batch = opened(job_of(name, dropout=0.5))
        layers = build(model)
        first, second = outputs_of(layers, batch.inputs), outputs_of(layers, batch.inputs)
        assert torch.equal(first[-1], second[-1])
        for layer in layers:
            layer.eval()
        assert not torch.equal(first[-1], outputs_of(layers, batch.inputs)[-1])


def test_gpt_does_not_see_the_future_and_bert_does() -> None:
    for name, sees in (("gpt", False), ("bert", True)):
        model, batch = opened(job_of(name))
        layers = [layer.eval() for layer in build(model)]
        tokens = batch.inputs[0].clone()
        before = outputs_of(layers, (tokens,))[-1]
        tokens[:, 20] = (tokens[:, 20] + 1) % 256
        changed = (outputs_of(layers, (tokens,))[-1] != before).any(dim=-1)
        assert changed[:, 20:].all()
        assert bool(changed[:, :20].any()) == sees


def test_tied_names_the_weights_of_embedding_and_head() -> None:
    model, _ = opened(job_of("gpt", tied=True))
    assert model.ties == (Tie(((0, "token.weight"), (3, "logits.weight"))),)
    layers = build(model)
    first, last = (layers[index].get_parameter(name) for index, name in model.ties[0].uses)
    assert first.shape == last.shape
    assert first is not last
    assert opened(job_of("gpt"))[0].ties == ()


def test_a_layer_is_the_same_wherever_it_is_built() -> None:
    model, _ = opened(job_of("gpt"))
    alone = model.layers[2]
    torch.manual_seed(weights_key(0, 2))
    for one, other in zip(alone.build().parameters(), build(model)[2].parameters(), strict=True):
        assert torch.equal(one, other)


def test_timed_sleeps_in_forward_and_backward_even_of_the_first_layer() -> None:
    job = job_of("timed", layers=1, forward_ms=20, backward_ms=30, width=100)
    model, batch = opened(job)
    (layer,) = build(model)
    start_s = time.monotonic()
    output = layer(*batch.inputs)
    forward_s = time.monotonic() - start_s
    model.loss((output,), batch.targets).backward()
    assert output.shape == (job.microbatch_size, 100)
    assert forward_s >= 0.02
    assert time.monotonic() - start_s - forward_s >= 0.03
    gradient = layer.get_parameter("scale").grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_timed_sleeps_for_the_input_and_for_the_weights_as_each_is_asked_for() -> None:
    model, batch = opened(job_of("timed", layers=2, backward_ms=30, width=100))
    first, second = build(model)
    cut = first(*batch.inputs).detach().requires_grad_()
    timed.backwards_ns.clear()
    loss = model.loss((second(cut),), batch.targets)
    torch.autograd.grad(loss, cut, retain_graph=True)
    torch.autograd.grad(loss, second.get_parameter("scale"))
    assert len(timed.backwards_ns) == 2
    assert min(timed.backwards_ns) >= 15_000_000


def test_alexnet_and_vgg_take_small_images() -> None:
    for name in ("alexnet", "vgg19"):
        model, batch = opened(job_of(name))
        assert batch.inputs[0].shape[-1] == 8
        assert outputs_of(build(model), batch.inputs)[-1].shape == (4, 10)


def test_kinds_are_what_a_partition_can_match() -> None:
    kinds = {name: [spec.kind for spec in opened(job_of(name))[0].layers] for name in ("gpt", "resnet18", "vgg19")}
    assert kinds["gpt"] == ["Embedding", "Block", "Block", "Head"]
    assert kinds["resnet18"] == ["Stem", *["BasicBlock"] * 8, "Head"]
    assert kinds["vgg19"] == ["Conv"] * 16 + ["Linear"] * 3


def test_a_small_resnet_learns_the_digits() -> None:
    job = Job(model="resnet18", model_args={"width": 8}, microbatch_size=32)
    data = open_data(job)
    model = build_model(job, data.facts)
    network = nn.Sequential(*build(model))
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for step in range(60):
        batch = data.microbatch(step, 0, 0, job.microbatch_size)
        optimizer.zero_grad()
        model.loss((network(*batch.inputs),), batch.targets).backward()
        optimizer.step()
    held_out = data.validation(0, 360)
    network.eval()
    assert metrics_of(model, (network(*held_out.inputs),), held_out.targets)["accuracy"] > 0.85


@pytest.mark.parametrize("args_of", ["default", "other"])
@pytest.mark.parametrize("name", MODELS)
def test_the_layers_are_as_many_as_is_said(name: str, args_of: str) -> None:
    entry = MODELS[name]
    args: Args = {entry.more_layers: 7} if args_of == "other" and entry.more_layers else {}
    job = Job(model=name, model_args=args)
    assert len(build_model(job, open_data(job).facts).layers) == entry.num_layers(args)


@pytest.mark.parametrize(
    ("job", "field", "words"),
    [
        (Job(model="resnet19"), "model", "did you mean 'resnet1"),
        (Job(model="gpt", model_args={"widht": 3}), "model_args.widht", "did you mean 'width'?"),
        (Job(model="gpt", model_args={"width": "wide"}), "model_args.width", "a whole number >= 1, found 'wide'"),
        (Job(model="gpt", model_args={"width": 3.5}), "model_args.width", "a whole number"),
        (Job(model="gpt", model_args={"width": True}), "model_args.width", "found True"),
        (Job(model="gpt", model_args={"depth": 0}), "model_args.depth", "found 0"),
        (Job(model="gpt", model_args={"tied": 1}), "model_args.tied", "true or false"),
        (Job(model="gpt", model_args={"dropout": 1.0}), "model_args.dropout", "< 1"),
        (Job(model="gpt", model_args={"heads": 3}), "model_args.heads", "a divisor of width 128"),
        (Job(model="timed", model_args={"forward_ms": float("nan")}), "model_args.forward_ms", "finite"),
        (Job(model="timed", model_args={"backward_ms": -1}), "model_args.backward_ms", ">= 0"),
        (Job(model="resnet18", microbatch_size=1), "microbatch_size", "batch norm"),
    ],
)
def test_wrong_arguments_are_refused(job: Job, field: str, words: str) -> None:
    facts = DataFacts(task="classify", num_classes=10, channels=1, height=8, width=8)
    if not job.model.startswith("resnet"):
        facts = open_data(job).facts
    with pytest.raises(UserError) as caught:
        build_model(job, facts)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert words in str(problem)


@pytest.mark.parametrize("sides", [(1, 1), (7, 7), (3, 14), (8, 20)])
@pytest.mark.parametrize("area", [6, 7])
def test_the_pool_of_conv_stacks_is_that_of_torch_in_a_deterministic_form(sides: tuple[int, int], area: int) -> None:
    """The backward of `nn.AdaptiveAvgPool2d` is refused on GPUs, and so alexnet and vgg19 were."""
    torch.manual_seed(0)
    maps = torch.randn(2, 3, *sides, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 3, area, area, dtype=torch.float64)
    found, expected = AveragePool(area)(maps), nn.AdaptiveAvgPool2d(area)(maps)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, maps, gradient) for each in (found, expected)))
