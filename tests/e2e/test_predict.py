"""A prediction on a pipeline has the outputs of the plain model, each sample once, in order, also with a kill."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bamboo
from engine.core.job.bit_fields import prediction_of
from engine.core.job.job import Job
from engine.files.jobs.checkpoint_choice import find_checkpoint
from engine.files.run_folder import RunFolder
from engine.models.layers import Batch
from engine.runtime.checkpoint.outputs import merged_outputs
from engine.runtime.process.fork_client import ForkServer
from tests.e2e import plain_loop
from tests.e2e.kill_runs import Runs
from tests.e2e.launcher import ROOT
from tests.e2e.ordinary_modules import perceptron
from tests.e2e.recorded import events_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

FEW: dict[str, Any] = {
    **{"microbatches": 4, "steps": 2, "warmup_steps": 1, "validate_every": 0, "checkpoint_every": "end"},
    "check_pure": False,
}
GPT = Job(**FEW, model="gpt", model_args={"width": 16, "depth": 2, "heads": 2}, microbatch_size=2, stages=3)
RESNET = Job(**FEW, model="resnet18", model_args={"width": 4}, microbatch_size=7, stages=3)
KILLED_AFTER = 3  # files of outputs


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("predict"), server)


def plain_outputs(loop: plain_loop.PlainLoop, batches: list[Batch]) -> Tensor:
    """Returns the outputs of the trained layers, called one after the other in this process."""
    layers, outputs = [each.eval() for each in copy.deepcopy(loop.pipelines[0])], []
    with torch.no_grad():
        for batch in batches:
            values: Any = batch.inputs
            for layer in layers:
                made = layer(*values)
                values = made if isinstance(made, tuple) else (made,)
            outputs.append(values[0])
    return torch.cat(outputs)


def kill_in(folder: Path, worker: int) -> threading.Thread:
    """Kills a worker of the run in a folder as soon as a few microbatches are there."""

    def wait_and_kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (folder / "outputs").is_dir() and len(list((folder / "outputs").iterdir())) >= KILLED_AFTER:
                started = [each for each in events_of(folder / "events.jsonl") if each["event"] == "started"]
                os.kill(next(each["child"] for each in started if each["of"] == worker), signal.SIGKILL)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("job", "rows", "redundancy"),
    [
        pytest.param(GPT, 301, "eager", id="gpt, an heir"),
        pytest.param(RESNET, 0, "none", id="resnet, a restart"),
        pytest.param(GPT, 301, "none", id="gpt, a restart", marks=pytest.mark.soak),
        pytest.param(RESNET, 0, "eager", id="resnet, an heir", marks=pytest.mark.soak),
    ],
)
def test_outputs_are_those_of_the_plain_model_with_a_kill(runs: Runs, job: Job, rows: int, redundancy: str) -> None:
    loop = plain_loop.PlainLoop(job)
    for step in range(job.steps):
        loop.step(step)
    ending, _ = runs.run(job)
    assert ending.error is None, ending.error
    origin = find_checkpoint(str(runs.last / "checkpoints"), runs.last, print).origin
    asked = prediction_of(job, origin.step, {"samples": "", "rows": rows})
    killer = kill_in(runs.next, worker=1)
    ending, events = runs.run(asked, origin=origin, redundancy=redundancy)
    killer.join()
    assert (ending.error, ending.outcome) == (None, "finished")
    exits = [each for each in events if each["event"] == "exit" and not each["expected"]]
    assert [each["of"] for each in exits][:1] == [1]
    assert bool([each for each in events if each["event"] == "restart"]) == (redundancy == "none")
    count = rows or loop.data.evaluation_sets["validation"]  # type: ignore[attr-defined]
    batches = [loop.data.validation(number, job.microbatch_size) for number in range(-(-count // job.microbatch_size))]
    outputs = merged_outputs(RunFolder(runs.last).outputs)
    assert count % job.microbatch_size
    assert torch.equal(outputs["output"], plain_outputs(loop, batches)[:count])


def test_rows_of_a_program_give_the_outputs_of_its_module(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job = Job(**FEW, model="tests.e2e.ordinary_modules:perceptron", data="synthetic", microbatch_size=4, stages=2)
    ending, _ = runs.run(job)
    assert ending.error is None, ending.error
    kept, module = str(runs.last / "checkpoints"), perceptron().eval()
    module.load_state_dict(bamboo.load_weights(kept))
    rows = torch.randn(13, 32, generator=torch.Generator().manual_seed(1))
    outputs = bamboo.predict(kept, rows, stages=3, results=str(tmp_path), trust_code=True)
    filled = torch.cat([rows, rows])[:16]
    with torch.no_grad():
        expected = torch.cat([module(each) for each in filled.split(4)])[:13]
    assert isinstance(outputs, Tensor)
    assert torch.equal(outputs, expected)
    assert (tmp_path / "predictions" / "latest").is_dir()
    with pytest.raises(bamboo.BambooError, match="rows of float32 \\[32\\] as input 0"):
        bamboo.predict(kept, rows[:, :31], results=str(tmp_path), trust_code=True)
