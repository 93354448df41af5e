"""Asks other systems to split the models of the zoo into three stages for training, in one process.

    python -m tests.e2e.hf_peers [NAME ...]

One line for each model and system: yes, or why not. Yes means three stages, and, for a microbatch with padding, which
is the example, and one without, the gradients of the unsplit model, within 1e-4. The optional packages are accelerate,
deepspeed and, for LoRA, peft.

torch.distributed.pipelining gets cuts before blocks, at thirds of the forward. It is tried with the export that
`pipeline` asks for and with the strict one, with all columns, without the attention mask and without the labels, until
one succeeds. DeepSpeed gets what `PipelineModule` documents: the model itself, or its modules in the order of the
forward, first its children, then the modules down to blocks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from engine.models.user_factory import made_by
from tests.e2e import hf_zoo
from tests.e2e.hf_soak import job_of

_STAGES = 3
_TOLERANCE = 1e-4
Columns = dict[str, Tensor]
Grads = dict[str, Tensor]


class Mismatch(Exception):
    """What a system split, but not into three stages, or with other gradients."""


def microbatches(name: str) -> list[Columns]:
    """Returns two rows with padding and two without, or any where there is none, as columns of the forward."""
    source = hf_zoo.rows(name).training
    samples = [source[each] for each in range(len(source))]
    key = "attention_mask" if "attention_mask" in samples[0] else "decoder_input_ids"
    padded = [each for each in samples if key not in each or bool((each[key] == 0).any())]
    whole = [each for each in samples if key not in each or not bool((each[key] == 0).any())]
    pairs = [rows[each : each + 2] for rows, each in ((padded, 0), (whole, 2))]
    return [{each: torch.stack([torch.as_tensor(row[each]) for row in rows]) for each in rows[0]} for rows in pairs]


def loss_of(output: Any) -> Tensor:
    """Returns the first value of an output if it is a loss, else its mean square."""
    first: Tensor = output[0]
    return first if first.dim() == 0 else first.square().mean()


def gradients(model: nn.Module, columns: Columns) -> Grads:
    """Returns the gradients of the unsplit model."""
    model.zero_grad()
    loss_of(model(**columns)).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def blocks(model: nn.Module, columns: Columns) -> list[str]:
    """Returns the modules in lists of modules, the outermost only, in the order of the forward."""
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[0] in lists]
    return _called(model, [name for name in names if sum(name.startswith(f"{each}.") for each in lists) == 1], columns)


def _called(model: nn.Module, names: list[str], columns: Columns) -> list[str]:
    order: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name in names
    ]
    with torch.no_grad():
        model(**columns)
    for hook in hooks:
        hook.remove()
    return order


def cuts(model: nn.Module, columns: Columns) -> list[str]:
    """Returns the blocks that the second and the third stage begin with."""
    names = blocks(model, columns)
    return [names[len(names) * each // _STAGES] for each in range(1, _STAGES)]


def of_torch(model: nn.Module, examples: list[Columns], strict: bool) -> None:
    """Splits a model with torch's own pipelining and compares gradients; raises what it raises."""
    expected = [gradients(model, each) for each in examples]
    first = {id(each): name for name, each in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = {name: first[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
    split = dict.fromkeys(cuts(model, examples[0]), SplitPoint.BEGINNING)
    with mock.patch.object(torch.export, "export", partial(torch.export.export, strict=strict)):
        pipe = pipeline(model, mb_args=(), mb_kwargs=examples[0], split_spec=split)
    if pipe.num_stages != _STAGES:
        raise Mismatch(f"{pipe.num_stages} stages")
    executor: Any = torch.fx.Interpreter(pipe.split_gm)
    pipe.executor = executor  # its own one detaches what goes from stage to stage
    for kind, columns, grads in zip(("padded", "unpadded"), examples, expected, strict=True):
        pipe.zero_grad()
        loss_of(pipe(**columns)).backward()
        parameters = {id(each): (name, each) for name, each in _of_stages(pipe)}
        found: Grads = {}
        for name, each in parameters.values():
            if each.grad is not None:
                found[names[name]] = found.get(names[name], 0) + each.grad
        compared(found, grads, kind)


def _of_stages(pipe: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for stage in range(pipe.num_stages):
        yield from pipe.get_stage_module(stage).named_parameters()


def compared(found: Grads, expected: Grads, kind: str) -> None:
    """Raises Mismatch if gradients are missing or differ."""
    missing = sorted(expected.keys() ^ found.keys())
    if missing:
        raise Mismatch(f"{kind} microbatch: {len(missing)} of {len(expected)} gradients are missing: {missing[0]}")
    worst = max(expected, key=lambda name: float((found[name] - expected[name]).abs().max()))
    difference = float((found[worst] - expected[worst]).abs().max())
    if not difference <= _TOLERANCE:
        raise Mismatch(f"{kind} microbatch: the gradient of {worst} differs by {difference:.2g}")


def of_accelerate(model: nn.Module, examples: list[Columns]) -> None:
    """Splits a model with `prepare_pippy`; raises Mismatch if its schedule has no backward."""
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy

    with _group(1):
        PartialState(cpu=True)
        split = cuts(model, examples[0])
        prepared = prepare_pippy(model, split_points=split, example_kwargs=examples[0], num_chunks=_STAGES)
        if not prepared.pippy_stage._has_backward:
            raise Mismatch("split for inference: its schedule gets no loss and has no backward")


@contextlib.contextmanager
def _group(size: int, rank: int = 0) -> Iterator[None]:
    """Makes the default group a double, which sends nothing: building stages needs no more."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size)}):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def of_deepspeed(model: Any, examples: list[Columns], layers: str) -> None:
    """Splits the model or its modules with `PipelineModule`, runs its stages in turn, and compares gradients."""
    comm = importlib.import_module("deepspeed.comm.comm")
    split: Any = importlib.import_module("deepspeed.pipe").PipelineModule
    expected = [gradients(model, each) for each in examples]
    names = [name for name, _ in model.named_children()]
    if layers == "blocks":
        names = _down_to(model, blocks(model, examples[0]))
    given: Any = (
        model if layers == "model" else [model.get_submodule(each) for each in _called(model, names, examples[0])]
    )
    stages = []
    for rank in range(_STAGES):
        with _group(_STAGES, rank), mock.patch.object(comm, "cdb", distributed):
            stages.append(split(layers=given, num_stages=_STAGES))
    for kind, columns, grads in zip(("padded", "unpadded"), examples, expected, strict=True):
        model.zero_grad()
        inputs = tuple(value for name, value in columns.items() if name != "labels")
        values: Any = inputs[0] if len(inputs) == 1 else inputs
        for stage in stages:
            values = stage(values)
        loss = loss_of((values,))
        if "labels" in columns:
            loss = _loss_beside(model, values, columns["labels"])
        loss.backward()
        compared({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, grads, kind)


def _down_to(model: nn.Module, names: list[str]) -> list[str]:
    """Returns the names of the modules that hold none of the named ones, and of these."""
    opened = {name.rpartition(".")[0] for name in names}
    opened = {"", *(".".join(name.split(".")[:each]) for name in opened for each in range(1, name.count(".") + 2))}
    return [name for name, _ in model.named_modules() if name not in opened and name.rpartition(".")[0] in opened]


def _loss_beside(model: Any, outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss that the forward of a model has for its last outputs."""
    if model.config.architectures[0].endswith("Classification"):
        loss: Tensor = model.loss_function(labels=labels, pooled_logits=outputs, config=model.config)
        return loss
    loss = model.loss_function(logits=outputs, labels=labels, vocab_size=hf_zoo.VOCABULARY)
    return loss


def tries(name: str) -> dict[str, list[tuple[str, Callable[[nn.Module, list[Columns]], None], set[str]]]]:
    """Returns for each system what is tried: its name, a function, and the columns that are left out."""
    left_out: dict[str, set[str]] = {"": set(), "without mask": {"attention_mask"}, "without labels": {"labels"}}
    columns = hf_zoo.rows(name).training[0]
    left_out = {text: each for text, each in left_out.items() if each <= set(columns)}
    strictness = {False: "", True: "strict"}
    return {
        "torch": [
            (f"{word} {text}".strip(), partial(of_torch, strict=strict), each)
            for text, each in left_out.items()
            for strict, word in strictness.items()
        ],
        "accelerate": [("", of_accelerate, set())],
        "deepspeed": [
            (f"{layers} {text}".strip(), partial(of_deepspeed, layers=layers), each)
            for text, each in left_out.items()
            if text != "without labels"  # no layer gets them
            for layers in ("model", "children", "blocks")
        ],
    }


def answer(name: str, system: str) -> str:
    """Returns yes with the first try that succeeds, or no with the last line of each error, and its tries."""
    errors: dict[str, list[str]] = {}
    for text, function, left_out in tries(name)[system]:
        with tempfile.TemporaryDirectory() as folder:
            job = job_of(name, Path(folder))
            model = made_by("model", job.model, job.model_args, 0)
        dropped = left_out | ({"labels"} if name == "clip" else set())
        examples = [{key: each[key] for key in each if key not in dropped} for each in microbatches(name)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                function(model, examples)
        except Exception as error:  # what a peer raises is its answer
            errors.setdefault(_last_line(error), []).append(text or "as it is")
        else:
            return f"yes{text and f' ({text})'}"
    return "no: " + "; ".join(f"{line} [{', '.join(texts)}]" for line, texts in errors.items())


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [each.strip() for each in str(error).splitlines() if each.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def main() -> int:
    """Prints the versions and the answers."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for package in ("torch", "transformers", "accelerate", "deepspeed", "peft"):
        try:
            print(package, importlib.metadata.version(package), flush=True)
        except importlib.metadata.PackageNotFoundError:
            print(package, "is not installed", flush=True)
    counts = dict.fromkeys(("torch", "accelerate", "deepspeed"), 0)
    names = sys.argv[1:] or [each for each in hf_zoo.CLASSES if not each.endswith("_labels")]
    for system in counts:
        for name in names:
            began = time.monotonic()
            text = answer(name, system)
            counts[system] += text.startswith("yes")
            print(f"{name:<18}{system:<12}{time.monotonic() - began:>4.0f} s  {text}", flush=True)
    print(", ".join(f"{system} {count} of {len(names)}" for system, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
