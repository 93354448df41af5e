"""``python -m engine.runtime.worker.layer_costs FD`` builds the model of a job, and reports what each layer costs.

It builds and cuts the model as worker 0 does, runs a microbatch through each layer on the CPU, and takes one optimizer
step of it: a model that cannot be trained fails here as it would at the start of its run.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from engine.core.checks.determinism import settings_of
from engine.core.job.job import Job
from engine.models.data_sources import main, open_data
from engine.models.model_loader import build_model
from engine.models.slices import slice_of
from engine.runtime.device.action_clock import LiveBytes, in_blocks
from engine.runtime.device.device import HOST, set_up
from engine.runtime.stage.class_optimizer import check_groups
from engine.runtime.stage.memory_watch import stage_bytes
from engine.runtime.stage.stage import Stage, cut_off, later_uses, stage_of
from engine.runtime.transport.transport import border_of
from engine.runtime.worker.validation import unmeasured
from engine.runtime.worker.worker import partition_of


def layer_costs(job: Job) -> dict[str, Any]:
    """Returns the costs of each layer as `layers`, and the notes on the model; raises UserError as a run does.

    Sizes are bytes. `flops` are those of the forward and the backward of a microbatch, as torch counts them: two for
    each multiplication with an addition in matrix products, convolutions and attention, none for other operations.
    `parameters` of the whole model counts tied ones once. With slices all are of a first slice, which reads no state.
    """
    set_up(settings_of(job))
    data = open_data(job)
    model = build_model(job, data.facts, data)
    notes = [*model.notes, *unmeasured(job, model, data)]
    starts = partition_of(job, model, data, HOST)
    batch = slice_of(data.microbatch(0, 0, 0, job.microbatch_size), 0, job.slices)
    values, layers = batch.inputs, dict[int, nn.Module]()
    rows: list[dict[str, Any]] = []
    for index, spec in enumerate(model.layers):
        stage = Stage(job, model, 0, index, index + 1, slices=1)
        layers[index] = stage.layers[index]
        with FlopCounterMode(display=False) as counter:
            with LiveBytes() as live:
                outputs = stage.forward(0, 0, values, batch.targets if stage.is_last else None)
                residual = live.begin()
            forward_flops = counter.get_total_flops()
            ones = tuple(output.new_ones(output.shape) for output in outputs if output.requires_grad)
            stage.backward(0, 0, () if stage.is_last else ones)
        stage.optimizers[index].step(job.lr, stage.gradients()[index])
        stage.border = border_of(outputs)
        size = stage_bytes(stage)
        row: dict[str, Any] = {"layer": index, "name": spec.name, "kind": spec.kind, "stage": stage_of(index, starts)}
        row |= {"parameters": sum(each.numel() for each in layers[index].parameters())}
        row |= {"forward_flops": forward_flops, "flops": counter.get_total_flops()}
        row |= {"weights": size.weights, "gradients": size.trained, "optimizer": size.optimizer}
        row |= {"residual": residual, "input": sum(in_blocks(each.nbytes) for each in values)}
        rows.append(row | {"buffers": size.buffers, "output": size.output})
        values = cut_off(outputs)
    check_groups(job, model, layers)
    again = sum(layers[index].get_parameter(name).numel() for index, name in later_uses(model.ties))
    return {"layers": rows, "parameters": sum(row["parameters"] for row in rows) - again, "notes": notes}


if __name__ == "__main__":
    main(layer_costs)
