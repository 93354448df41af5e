"""Values that a forward reads: what code hears that asks for a tracer, what is checked again, and what stays whole."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.core.checks.trajectory import trajectory_hash
from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.layers import Model, as_tensors
from engine.models.model_loader import build_model
from engine.models.traced import ordinary
from engine.models.traced.reads import OtherValueError, ValueCheck
from engine.models.user_code import exception_of
from engine.runtime.stage.stage import build_layer
from tests.kills import parse_kills
from tests.runtime.test_ordinary_runs import assert_equal, plain_loop, weights
from tests.runtime.thread_runs import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = __name__
WIDTH, LENGTH = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.outer(self.inner(x).tanh())
        return x if mask is None else x * mask[..., None]


class Inner(nn.Module):
    """Blocks behind a line that subclasses add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x[..., None])
        mask = self.seen(x, attention_mask)
        for block in self.blocks:
            x = block(x, mask)
        return x

    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        raise NotImplementedError


class Whole(nn.Module):
    """A model around blocks, as in transformers: the loss is in the root."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.inner(x, attention_mask).sum(1))
        return {"loss": None if labels is None else functional.cross_entropy(logits, labels), "logits": logits}


class Repeats(Inner):
    """One block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x[..., None])
        for _ in range(3):
            x = self.blocks[0](x, attention_mask)
        return x


class AsksForTracer(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        if not isinstance(mask, torch.fx.Proxy) and mask.all():
            return None
        return mask


class OtherUnderTracer(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        return mask * 1.5 if isinstance(mask, torch.fx.Proxy) else mask  # here


class AsksAboutModes(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling() or isinstance(torch.ones(2), torch.fx.Proxy):
            return mask * 2
        return mask


class Steady(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        if x.mean() > 1e9:  # here
            return None
        return mask


class Checks(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        torch._check_tensor_all(mask >= 0)
        return mask


class Varying(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        if mask.all():  # here
            return None
        return mask


class SizeOfSelection(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        return mask / x[mask > 0].shape[0]  # here


class SizeOfRange(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        shortest: Any = mask.sum(1).long().min()
        return mask / torch.arange(shortest).shape[0]  # here


class SizeOfSlice(Inner):
    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        lengths = mask.sum(1).long()
        return mask / x[:, : lengths.min()].size(1)  # here


class InRow(Inner):
    """Reads in a submodule without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Branching()

    def seen(self, x: Tensor, mask: Tensor) -> Tensor | None:
        return mask


class Branching(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(-x if x.sum() > 0 else x, mask)


class OtherOrder(Inner):
    """Makes the mask before the hidden values in evaluation, and after them in training."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x[..., None])
        mask = attention_mask[..., None].expand(-1, -1, WIDTH) * 2.0
        x = functional.dropout(x, 0.5, self.training) if self.training else x
        for block in self.blocks:
            x = block(x) * mask
        return x


class Router(nn.Module):
    """Returns an order of the rows, and how many of them come first in this microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        first = self.gate(x).squeeze(-1) > 0
        return first.long().argsort(stable=True), first.long().bincount(minlength=2).tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        order, counts = self.router(flat)
        parts = [expert(part) for expert, part in zip(self.experts, flat[order].split(counts), strict=True)]
        return x + torch.zeros_like(flat).index_add(0, order, torch.cat(parts)).view_as(x)


class Routed(Inner):
    """Its blocks call a submodule that returns what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x[..., None]) * attention_mask[..., None]
        for block in self.blocks:
            x = block(x)
        return x


class ByBatch(nn.Module):
    """Takes all columns as one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Whole(AsksForTracer())

    def forward(self, batch: Any) -> Any:
        return self.whole(batch["x"], batch.attention_mask, labels=batch.get("labels"))


class LogitsByBatch(ByBatch):
    def forward(self, batch: Any) -> Any:
        return self.whole(batch["x"], batch.attention_mask)["logits"]


def rows() -> list[dict[str, Any]]:
    """Rows with padding: none of the first microbatch, some later."""
    drawn = torch.randn(48, LENGTH, generator=torch.Generator().manual_seed(0))
    masks = [torch.arange(LENGTH) < (LENGTH - at % 3 * (at % 2)) for at in range(48)]
    return [{"x": each, "attention_mask": masks[at].float(), "labels": at % 3} for at, each in enumerate(drawn)]


def __getattr__(name: str) -> Any:
    """Returns the factory of a model around a class of this module."""
    kind = globals().get(name.removeprefix("whole_"))
    if name.startswith("whole_") and kind is not None:
        return lambda: Whole(kind())
    raise AttributeError(name)


def job_of(kind: type[nn.Module], **changed: Any) -> Job:
    name = f"whole_{kind.__name__}" if issubclass(kind, Inner) else kind.__name__
    given = {"microbatches": 3, "microbatch_size": 2, "steps": 3, "validate_every": 2, "validation_microbatches": 1}
    fixed = {"lr": 0.01, "warmup_steps": 0, "lr_schedule": "constant", "clip_norm": 0.0}
    return Job(model=f"{HERE}:{name}", data=f"{HERE}:rows", **{**given, **fixed, **changed})


def built(job: Job) -> tuple[Model, Any]:
    data = open_data(job)
    return build_model(job, data.facts, data), data


def names(model: Model) -> list[str]:
    return [each.name.removeprefix("from ") for each in model.layers]


CUT = ["inner.embed", "inner.blocks.0", "inner.blocks.1", "inner.blocks.2", "head"]


@pytest.mark.parametrize("kind", [AsksForTracer, AsksAboutModes, Steady, Checks, InRow])
def test_a_run_has_the_bits_of_a_plain_loop_over_batches_with_and_without_padding(kind: Any, tmp_path: Any) -> None:
    job = job_of(kind, stages=3)
    model, _ = built(job)
    assert (names(model), model.notes) == (CUT, ())
    _, state = weights(job, tmp_path)
    assert_equal(state, plain_loop(job))


def test_a_number_that_a_whole_submodule_returns_is_not_baked_in(tmp_path: Any) -> None:
    job = job_of(Routed, stages=3)
    model, _ = built(job)
    assert names(model) == CUT
    _, state = weights(job, tmp_path)
    assert_equal(state, plain_loop(job))


def test_dropping_a_mask_would_be_seen(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(AsksForTracer, stages=1, steps=1)
    expected = plain_loop(job)
    monkeypatch.setattr(AsksForTracer, "seen", lambda *others: None)
    _, state = weights(job, tmp_path)
    assert any(not torch.equal(state[name], expected[name]) for name in state)


def through(job: Job, model: Model, columns: Any) -> Tensor:
    values = columns
    for index in range(len(model.layers)):
        values = as_tensors(build_layer(job, model, index)(*values), "a layer")
    return values[0]


def test_another_value_ends_the_run_and_is_never_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(Steady)
    model, data = built(job)
    batch = data.microbatch(0, 0, 0, 2)
    huge = (batch.inputs[0] * 0 + 1e12, batch.inputs[1] * 0, batch.inputs[2])
    with pytest.raises(OtherValueError) as caught:
        through(job, model, huge)
    told = exception_of(caught.value)
    assert told.file.endswith("test_read_values.py")
    assert "if x.mean() > 1e9:  # here" in told.frames
    assert "has read False in the record, and True here" in str(caught.value)
    monkeypatch.setattr(ValueCheck, "__call__", lambda *others: None)  # the bug that the check prevents
    torch.manual_seed(0)
    module = Whole(Steady())
    for index in range(len(model.layers)):
        found = build_layer(job, model, index)
        module.load_state_dict(found.state_dict(), strict=False)
    assert not torch.equal(through(job, model, huge), module(*huge[:2])["logits"])


def test_a_block_that_is_called_again_stays_one_layer_and_is_told() -> None:
    job = job_of(Repeats, stages=2)
    model, _ = built(job)
    told = "inner.blocks.0 stays one layer: 3 calls share its weights (--split with its name cuts between them)"
    assert model.notes == (told,)
    named, _ = built(replace(job, split="inner.blocks.*"))
    assert len(named.layers) == 5 > len(model.layers) and named.notes == ()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Varying, "__bool__ gives"),
        (SizeOfSelection, "__get__|shape gives"),
        pytest.param(SizeOfRange, "__get__|shape gives", marks=pytest.mark.soak),
        (SizeOfSlice, "size gives|__index__ gives"),
    ],
)
def test_a_value_that_differs_keeps_its_submodule_whole_and_is_told(kind: Any, words: str, tmp_path: Any) -> None:
    job = job_of(kind, stages=2)
    model, _ = built(job)
    assert names(model) == ["inner", "head"]
    assert len(model.notes) == 1
    assert re.match(r"inner stays one layer: .*test_read_values.py:\d+, in seen: `.*# here`: ", model.notes[0])
    assert re.search(rf"({words}) .*\(.*\)", model.notes[0])
    _, state = weights(job, tmp_path)
    assert_equal(state, plain_loop(job))
    with pytest.raises(UserError, match=r"split: .*`.*# here`"):
        built(replace(job, split="inner.blocks.*"))
    ending = run_in_threads(replace(job, stages=3))
    assert re.search(r"stages: expected at most 2, .*inner stays one layer: .*# here`", str(ending.error))


def test_more_stages_than_layers_are_refused_with_the_names_of_the_layers() -> None:
    ending = run_in_threads(replace(job_of(Steady), stages=9))
    assert f"(they begin {', '.join(f'from {name}' for name in CUT)}; --split SUBMODULE.*" in str(ending.error)


def test_code_that_computes_other_bits_under_a_tracer_is_told() -> None:
    model, _ = built(job_of(OtherUnderTracer))
    assert (names(model), len(model.notes)) == (CUT, 1)
    assert re.search(r"in seen: `.*# here`: the answer, that a forward is recorded, gives other bits", model.notes[0])


def test_equal_tensors_in_another_order_are_one_order() -> None:
    model, _ = built(job_of(OtherOrder))
    assert names(model) == CUT


def test_a_compiled_root_is_unwrapped() -> None:
    job = Job(model=f"{HERE}:compiled", data=f"{HERE}:rows", microbatch_size=2)
    model, _ = built(job)
    assert names(model) == CUT


class Compiled(nn.Module):
    """What ``torch.compile(module)`` returns, without the seconds that torch takes to load its compiler."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def compiled() -> nn.Module:
    return Compiled(Whole(AsksForTracer()))


def encoded(samples: list[dict[str, Any]]) -> Any:
    """Returns a microbatch as a tokenizer of transformers does."""
    from transformers import BatchEncoding

    return BatchEncoding({name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in samples[0]})


@pytest.mark.parametrize(("kind", "collate"), [(ByBatch, f"{HERE}:encoded"), (LogitsByBatch, "")])
def test_a_forward_may_take_all_columns_as_one_dict(kind: Any, collate: str, tmp_path: Any) -> None:
    job = job_of(kind, stages=2, collate=collate)
    found, state = weights(job, tmp_path)
    assert_equal(state, plain_loop(job))
    ending = run_in_threads(job, parse_kills(["1:1:B:1"], job))
    assert (ending.error, trajectory_hash(ending.view.run_state.rows)) == (None, found)


def test_the_layers_do_not_depend_on_the_number_of_steps() -> None:
    assert ordinary._TRIED == (1, 2)
    assert names(built(job_of(Varying, steps=1))[0]) == names(built(job_of(Varying, steps=9))[0])
