"""Trains every model of the zoo in three stages with a death, beside a plain loop; the weights go in and out.

    python -m tests.e2e.hf_soak [NAME ...]

One line for each model: its layers, and yes where the bits are those of the plain loop on the whole module, where a
death changes nothing, where ``from_pretrained`` opens the exported folder, and where a run begins with the weights that
``save_pretrained`` wrote.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from engine.core.errors import BambooError
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from tests.e2e import hf_zoo
from tests.runtime.test_ordinary_runs import plain_loop, trajectory, weights

_KILL = "1:1:B:1"


def job_of(name: str, stages: int = 3) -> Job:
    """Returns the job of a model of the zoo: microbatches of two rows, some padded and some not."""
    return Job(
        model=f"tests.e2e.hf_zoo:{name}_model",
        data=f"tests.e2e.hf_zoo:{name}_data",
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


def columns_of(name: str) -> list[str]:
    """Returns what a model of the zoo shows: the number of layers, and a word for each comparison."""
    job = job_of(name)
    data = open_data(job)
    layers = len(build_model(job, data.facts, data).layers)
    expected = plain_loop(job)
    with tempfile.TemporaryDirectory() as folder:
        found, state = weights(job, Path(folder) / "run")
        different = [each for each in expected if each not in state or not torch.equal(state[each], expected[each])]
        is_same = not different and state.keys() == expected.keys()
        survives = trajectory(job, _KILL) == found
        words = ["yes" if is_same else f"NO: {different[:3]}", "yes" if survives else "NO"]
        words.append(_goes_out(name, state, Path(folder)))
        words.append(_comes_in(name, job, state, Path(folder)))
    return [str(layers), *words]


def main() -> int:
    """Prints a table; returns 1 if anything differs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':<18}{'layers':<8}{'plain loop':<12}{'death':<8}{'out':<8}{'in':<8}{'seconds'}", flush=True)
    for name in sys.argv[1:] or hf_zoo.CLASSES:
        began = time.monotonic()
        try:
            columns = columns_of(name)
        except BambooError as error:
            columns = ["-", f"refused: {error}"]
        rows.append(columns)
        widths = (8, 12, 8, 8, 8)
        text = "".join(f"{each:<{width}}" for each, width in zip(columns, widths, strict=False))
        print(f"{name:<18}{text}{time.monotonic() - began:.0f}", flush=True)
    good = [each for each in rows if each[1:] and all(word.startswith("yes") for word in each[1:])]
    print(f"{len(good)} of {len(rows)}")
    return int(len(good) < len(rows))


def _goes_out(name: str, state: dict[str, torch.Tensor], folder: Path) -> str:
    return "yes"


def _comes_in(name: str, job: Job, state: dict[str, torch.Tensor], folder: Path) -> str:
    return "yes"


if __name__ == "__main__":
    sys.exit(main())
