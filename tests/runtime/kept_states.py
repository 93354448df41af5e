"""Keeps the state of a job after every step as checkpoints, and runs jobs that begin after one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.core.checkpoints.manifest import LayerHash, Manifest, Part
from engine.core.checkpoints.resumption import Resumption
from engine.core.config.job import Job
from engine.core.worker import outputs
from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.runtime.agent.run_view import Ending
from engine.runtime.checkpoint.layer_file import as_file
from engine.runtime.checkpoint.state_dict_names import aliases, transient_buffers
from engine.runtime.stage.stage import Stage
from engine.runtime.worker.training import Training
from tests.runtime.thread_runs import run_in_threads


def run_and_keep(job: Job, place: Path) -> tuple[Ending, list[Resumption]]:
    """Runs a job to its end; returns that, and a checkpoint of each step."""
    folder, parts, audit = checkpoints_at(place), dict[int, dict[int, Part]](), Training._audit

    def keep(training: Training, output: outputs.Audit) -> None:
        audit(training, output)
        of_step = parts.setdefault(output.step, {})
        for slot in output.slots:
            stage = training.context.replicas.stages[slot]
            for layer in stage.layers.keys() - of_step.keys():
                file = as_file(_tensors(stage, layer))
                module = stage.layers[layer]
                of_step[layer] = folder.write_part(
                    output.step,
                    layer,
                    file.chunks(),
                    strides=file.strides,
                    transient=transient_buffers(module),
                    aliases=aliases(module),
                )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_audit", keep)
        ending = run_in_threads(job)
    kept = []
    for step, of_step in sorted(parts.items()):
        rows = sorted((row.layer, row.state, row.buffers) for row in ending.view.run_state.rows if row.step == step)
        layers = tuple(LayerHash(*row) for row in rows)
        in_order = tuple(of_step[layer] for layer in sorted(of_step))
        names = tuple(ending.view.run_state.layers)
        manifest = Manifest(
            names=names, run="r", step=step, epoch=1, loss=1.0, job={}, facts={}, layers=layers, parts=in_order
        )
        kept.append(Resumption(step, str(place), folder.publish(manifest).file, "r"))
    return ending, kept


def _tensors(stage: Stage, layer: int) -> Iterator[tuple[str, Tensor]]:
    module: Any = stage.layers[layer]
    yield from ((f"weight/{name}", parameter) for name, parameter in module.named_parameters())
    for name, named in stage.optimizers[layer].state.items():
        yield from ((f"optimizer/{name}/{key}", tensor) for key, tensor in named.items())
    places = {id(buffer): place for place, buffer in enumerate(stage.buffers())}
    for pipeline, buffers in enumerate(stage.boundary or (stage.buffers(),)):
        yield from ((f"buffer/{pipeline}/{name}", buffers[places[id(each)]]) for name, each in module.named_buffers())
