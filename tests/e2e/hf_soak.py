"""Trains every model of the zoo in three stages with a death, beside a plain loop; its weights go out and in again.

    python -m tests.e2e.hf_soak [NAME ...]

One line for each model: the number of its layers, and a yes for each of these. The weights are those of a plain loop on
the whole module. A death changes nothing. ``from_pretrained`` opens the exported folder, with the same weights. A run
that begins with this folder gives the weights of a plain loop that does.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.core.checks.trajectory import trajectory_hash
from engine.core.errors import BambooError
from engine.core.job.hugging_face import MODEL
from engine.core.job.job import Job
from engine.core.random_key import random_key
from engine.files.checkpoint_folder import CheckpointName, checkpoints_at
from engine.models.data_sources import open_data
from engine.models.hugging_face import save_config
from engine.models.model_loader import build_model
from engine.models.user_factory import made_by
from engine.runtime.checkpoint.export import export
from tests.e2e import hf_zoo
from tests.runtime.kept_states import run_and_keep
from tests.runtime.test_ordinary_runs import plain_loop, trajectory

_KILL = "1:1:B:1"
State = dict[str, Tensor]


def job_of(name: str, folder: Path, stages: int = 3) -> Job:
    """Returns the job of a model of the zoo, with its config in a folder: microbatches of two rows, some padded."""
    hf_zoo.config_of(name).save_pretrained(folder)
    attention = hf_zoo.CLASSES[name][2].get("attn_implementation", "")
    args = {"path": str(folder), "random": True, "attention": attention}
    return Job(
        model=MODEL if name != "lora" else f"{hf_zoo.__name__}:lora_model",
        model_args=args if name != "lora" else {},
        data=f"{hf_zoo.__name__}:{name}_data",
        stages=stages,
        microbatches=3,
        microbatch_size=2,
        steps=3,
        lr=0.01,
        warmup_steps=0,
        lr_schedule="constant",
        clip_norm=0.0,
        validate_every=2,
        validation_microbatches=1,
    )


def trained(job: Job, place: Path) -> tuple[str, State, Path]:
    """Returns the trajectory of a run, its weights, and the folder that they are exported to."""
    ending, origins = run_and_keep(job, place / "checkpoints")
    folder, last = checkpoints_at(origins[-1].place), origins[-1]
    manifest = folder.manifest(CheckpointName(last.step, last.file))
    export(folder, manifest, place / "model.pt")
    is_whole = job.model == MODEL
    export(folder, manifest, place / "out", beside=partial(save_config, job.model_args) if is_whole else _nothing)
    return trajectory_hash(ending.view.run_state.rows), torch.load(place / "model.pt"), place / "out"


def columns_of(name: str, place: Path) -> list[str]:
    """Returns what a model of the zoo shows: the number of layers, and a word for each comparison."""
    job = job_of(name, place / "config")
    data = open_data(job)
    layers = len(build_model(job, data.facts, data).layers)
    found, state, out = trained(job, place / "run")
    words = [_compared(state, plain_loop(job)), "yes" if trajectory(job, _KILL) == found else "NO"]
    if name == "lora":
        return [str(layers), *words, *_adapters(job, state, place)]
    opened = made_by("model", MODEL, {**job.model_args, "path": str(out), "random": False}, 0)
    again = replace(job, model_args={**job.model_args, "path": str(out), "random": False}, steps=1)
    words += [_compared(opened.state_dict(), state), _compared(trained(again, place / "again")[1], plain_loop(again))]
    return [str(layers), *words]


def _adapters(job: Job, state: State, place: Path) -> list[str]:
    """Returns the words about weights of adapters: out with peft's own format, in with the weights of a run."""
    from peft import PeftModel

    with torch.random.fork_rng(devices=[]):
        module = made_by("model", job.model, {}, random_key(job.seed, "model"))
        module.load_state_dict(state)
        module.save_pretrained(place / "adapters")
        torch.manual_seed(random_key(job.seed, "model"))
        opened = PeftModel.from_pretrained(hf_zoo.base(), place / "adapters")
    again = replace(job, init=str(place / "run" / "model.pt"), lr=1e-30, steps=1, optimizer_args={"weight_decay": 0.0})
    return [_compared(opened.state_dict(), state), _compared(trained(again, place / "again")[1], state)]


def _compared(found: State, expected: State) -> str:
    names = [each for each in {**found, **expected} if each not in found or each not in expected]
    names += [each for each in found if each in expected and not torch.equal(found[each], expected[each])]
    return f"NO: {names[:3]}" if names else "yes"


def _nothing(folder: Path) -> None:
    pass


def main() -> int:
    """Prints a table; returns 1 if anything differs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':<18}{'layers':<8}{'plain loop':<12}{'death':<8}{'out':<8}{'in':<8}{'seconds'}", flush=True)
    for name in sys.argv[1:] or hf_zoo.CLASSES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                columns = columns_of(name, Path(folder))
            except BambooError as error:
                columns = ["-", f"refused: {error}"]
        rows.append(columns)
        text = "".join(f"{each:<{width}}" for each, width in zip(columns, (8, 12, 8, 8, 8), strict=False))
        print(f"{name:<18}{text}{time.monotonic() - began:.0f}", flush=True)
    good = [each for each in rows if each[1:] and all(word.startswith("yes") for word in each[1:])]
    print(f"{len(good)} of {len(rows)}")
    return int(len(good) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
