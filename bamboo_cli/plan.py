"""Prints the plan of a job: the grid of actions per worker, and the predictions of the dry run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from bamboo_cli.echo import echo
from bamboo_cli.worker_rows import slots_text
from engine.core.action import Program
from engine.core.faults.expansion import describe
from engine.core.faults.fault import Fault, to_plain
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.job.partition import initial_program, known_ownership
from engine.core.job.schedule_comparison import over_none
from engine.core.job.tensor_model import TensorBytes, predicted_tensors, residual_of
from engine.core.ownership import Ownership, Slot
from engine.core.program.build import pairs_in
from engine.core.program.dry_run import DryRun, bubbles, dry_run, grid_lines, peak_stash
from engine.core.program.offload import with_copy_times
from engine.core.program.passes import lazy_slots
from engine.core.program.schedule_csv import name_of
from engine.core.protocol.block_choice import is_run_dry, step_after_death, step_of
from engine.core.texts import numbered, size_text

Costs = Mapping[str, Any]  # of `layer_costs`
_COSTS = ("layer", "name", "stage", "parameters", "MFLOP/microbatch", "memory", "output")
NOT_COUNTED = "the samples are not counted in a dry run: the number of steps is not known"
NOT_CALLED = "the schedule's generator is not called in a dry run"


def print_plan(
    job: Job, as_json: bool, faults: Sequence[Fault] = (), *, build: bool = False, why_blocks: str = ""
) -> None:
    """Prints the grid with a forward of 1 unit and a backward of 2, the bubble, the peak stash and the faults.

    Without a program, as its generator is not called in a dry run, it prints the rest. With `build` it builds the model
    first, and prints its layers last; raises BambooError if that fails. JSON has `why_blocks`, why bamboo has chosen so
    many blocks per stage.
    """
    from engine.harness.job_checks import layer_costs

    costs = layer_costs(job) if build else None
    if not job.has_program:
        _print_without_program(job, as_json, faults, costs)
        return
    program, ownership = initial_program(job)
    cost = with_copy_times(job.copy_time or 0.0)
    run = dry_run(program, ownership, cost)
    longer = over_none(dry_run(program, ownership), job.schedule, ownership) if job.redundancy == "eager" else 0.0
    at_once = dry_run(program, ownership, cost, overlapping=True).makespan if pairs_in(job.schedule) else run.makespan
    if as_json:
        plan = _plain_plan(job, program, ownership, run) | {"blocks": job.blocks, "why_blocks": why_blocks or None}
        plan |= {"makespan_with_overlap": at_once, "over_none": longer, **_growth(job)}
        plan |= {"tensors": tensors_of(job, program, ownership, costs)} if costs is not None else {}
        _print_json(plan, job, faults, costs)
        return
    echo(f"{name_of(job.schedule)}: {_sizes(job)}")
    for line in grid_lines(run, shutil.get_terminal_size((120, 24)).columns, ownership):
        echo(line)
    echo(_redundancy_line(job, ownership))
    if job.redundancy == "eager":
        echo(f"redundant forwards lengthen the step by {longer:.1%}")
    of_block = " of a block" if job.blocks > 1 else ""
    costs_of = f"backward = 2 x forward{_copies_text(job)}"
    echo(f"predicted, with {costs_of}: {_forwards(run.makespan, job)}, bubble {run.bubble:.1%} of the time")
    if at_once < run.makespan:
        echo(f"with a handler that runs the actions of a pair at once: {_forwards(at_once, job)}")
    for line in _growth_lines(job, _growth(job)):
        echo(line)
    stash = ", ".join(f"worker {worker}: {peak}" for worker, peak in run.peak_stash.items())
    echo(f"peak stashed activations, in {'slices' if job.slices > 1 else 'microbatches'}{of_block}: {stash}")
    _print_faults(faults, job, costs)
    if costs is not None:
        _print_tensors(tensors_of(job, program, ownership, costs))


def _plain_plan(job: Job, program: Program, ownership: Ownership, run: DryRun) -> dict[str, Any]:
    return {
        "schedule": job.schedule,
        "actions": {worker: [str(action) for action in actions] for worker, actions in program.items()},
        "makespan": run.makespan,
        "bubble": run.bubble,
        "bubbles": bubbles(run),
        "peak_stash": run.peak_stash,
        "redundancy": job.redundancy,
        "shadows": _shadows(ownership),
        "lazy": [f"{stage}@{pipeline}" for pipeline, stage in _left_lazy(job, ownership)],
    }


def _forwards(time: float, job: Job) -> str:
    """Returns a time in forwards of a stage, and of a block, as the grid has it, if a stage has several."""
    of_stage = f"{time / job.blocks:g} forwards of a stage"
    return of_stage if job.blocks == 1 else f"{of_stage} ({time:g} of a block)"


def _growth(job: Job) -> dict[str, Any]:
    """Returns the steps of an elastic job with other workers, in forwards of a stage; None for what it has not.

    `standby` is about the workers that wait: the step after a death, then with one of them. `most` is about the most
    workers: the step, and the number of workers that own something in it.
    """
    standby: dict[str, Any] = {"workers": [*range(job.num_workers, job.num_workers + job.standby)]}
    if job.standby and job.elastic and job.num_workers > 1 and is_run_dry(job):
        standby |= {"after_a_death": step_after_death(job), "replaced": step_after_death(job, 1)}
    most: dict[str, Any] = {"workers": job.max_workers}
    if job.max_workers and is_run_dry(job):
        most |= step_of(job, job.max_workers)._asdict()
    return {"standby": standby if job.standby else None, "most": most if job.max_workers else None}


def _growth_lines(job: Job, growth: Mapping[str, Any]) -> Iterator[str]:
    if standby := growth["standby"]:
        line = f"{numbered('worker', standby['workers'])} {'waits' if job.standby == 1 else 'wait'} (--standby)"
        line += " until another one is lost"
        if "replaced" in standby:
            line += f": a step then takes {standby['after_a_death']:.4g} forwards of a stage, and "
            line += f"{standby['replaced']:.4g} once {'it' if job.standby == 1 else 'one of them'} has replaced it"
        yield line
    if most := growth["most"]:
        line = f"{job.num_workers} to {job.max_workers} workers (--max-workers)"
        if "time" in most:
            own = "all of them own" if most["owners"] == job.max_workers else f"{most['owners']} of them own"
            line += f": a step of {job.max_workers} takes {most['time']:.4g} forwards of a stage, and {own}"
            line += f" {job.slot_noun}s"
        yield line


def _copies_text(job: Job) -> str:
    return "" if job.copy_time is None else f" and a copy to the host = {job.copy_time:g} x forward"


def tensors_of(job: Job, program: Program, ownership: Ownership, costs: Costs) -> list[dict[str, Any]]:
    """Returns the predicted bytes of the tensors of each worker by kind, at the boundary and at the peak of a step."""
    sizes, residuals, rows = dict[int, StageBytes](), dict[int, int](), list[dict[str, Any]]()
    of_layer = {each["layer"]: each["residual"] for each in costs["layers"]}
    for stage in range(job.slots):
        mine = [each for each in costs["layers"] if each["stage"] == stage]
        weights, trained, moments, buffers = (
            sum(each[kind] for each in mine) for kind in ("weights", "gradients", "optimizer", "buffers")
        )
        shares = job.pipelines if job.fsdp else 1
        sizes[stage] = StageBytes(weights // shares, weights, trained, moments // shares, buffers, mine[-1]["output"])
        residuals[stage] = residual_of(job, [each["layer"] for each in mine], of_layer) + mine[0]["input"]
    for worker, actions in program.items():
        held = zip(
            ("boundary", "peak"), predicted_tensors(job, actions, ownership, worker, sizes, residuals), strict=True
        )
        for at, by_slot in held:
            total = reduce(TensorBytes.plus, by_slot.values(), TensorBytes())
            rows.append({"worker": worker, "at": at, **total._asdict(), "total": sum(total)})
        if job.residuals != "recompute" and (come := _most_that_come(program, ownership, worker, residuals)):
            total = total.plus(TensorBytes(transfer=come))
            rows.append({"worker": worker, "at": "hand-over", **total._asdict(), "total": sum(total)})
    return rows


def _most_that_come(program: Program, ownership: Ownership, worker: int, residuals: Mapping[int, int]) -> int:
    """Returns the most bytes of residuals that a worker gets if the owner of slots that it shadows first leaves."""
    come = Counter[int]()
    for slot in ownership.grid.slots():
        if ownership.shadows_of(*slot)[:1] == (worker,):
            owner = ownership.owner(*slot)
            actions = tuple(each for each in program[owner] if (each.pipeline, each.stage) == slot)
            come[owner] += peak_stash(actions) * residuals[slot[1]]
    return max(come.values(), default=0)


def _print_tensors(rows: Sequence[Mapping[str, Any]]) -> None:
    from bamboo_cli.tables import print_table

    echo("predicted tensors, without the temporary memory of computations:")
    texts = [[str(row["worker"]), row["at"], *map(size_text, list(row.values())[2:])] for row in rows]
    print_table(tuple(rows[0]), (True, False, *[True] * (len(rows[0]) - 2)), texts)


def _print_json(plan: dict[str, Any], job: Job, faults: Sequence[Fault], costs: Costs | None) -> None:
    plan |= {"faults": faults_as_plain(faults, job)} if faults else {}
    plan |= {"model": costs} if costs is not None else {}
    echo(json.dumps(plan if job.has_steps else plan | {"not_counted": job.data}))


def _print_without_program(job: Job, as_json: bool, faults: Sequence[Fault], costs: Costs | None) -> None:
    ownership = known_ownership(job)
    if as_json:
        unknown = dict.fromkeys(("actions", "makespan", "bubble", "bubbles", "peak_stash", "over_none"))
        plan = {"schedule": job.schedule, "not_called": job.schedule, **unknown, "redundancy": job.redundancy}
        plan |= {"shadows": None if ownership is None else _shadows(ownership)}
        _print_json(plan, job, faults, costs)
        return
    echo(f"{job.schedule}: {_sizes(job)}")
    echo(f"{NOT_CALLED}: its actions, the bubble and the stash are not known")
    if ownership is not None:
        echo(_redundancy_line(job, ownership))
    _print_faults(faults, job, costs)


def _sizes(job: Job) -> str:
    slices = f" of {job.slices} slices" if job.slices > 1 else ""
    return f"P={job.cut}, M={job.microbatches} microbatches{slices}, D={job.pipelines} pipelines"


def _shadows(ownership: Ownership) -> dict[str, Any]:
    return {f"{slot[1]}@{slot[0]}": ownership.shadows_of(*slot) for slot in ownership.grid.slots()}


def _print_faults(faults: Sequence[Fault], job: Job, costs: Costs | None) -> None:
    for line in describe(faults, job):
        echo(line)
    if not job.has_steps:
        echo(f"{NOT_COUNTED}, and no fault is checked against it")
    if costs is None:
        echo("the model is not built in a dry run; --build builds it and shows its layers")
    else:
        _print_layers(job, costs)


def _print_layers(job: Job, costs: Costs) -> None:
    """Prints a row per layer and the sums of each stage; memory is that of an owner, without activations inside."""
    from bamboo_cli.tables import print_table

    rows, layers = [], costs["layers"]
    for number in range(job.slots):
        mine = [each for each in layers if each["stage"] == number]
        rows += [_layer_row(str(each["layer"]), f"{each['name']} ({each['kind']})", [each]) for each in mine]
        rows.append(_layer_row("", f"= {job.slot_noun} {number}", mine))
    print_table(_COSTS, (True, False, True, True, True, True, True), rows)
    flops = sum(each["flops"] for each in layers) * job.program_microbatches * job.pipelines
    echo(f"model: {costs['parameters']:,} parameters, {flops / 1e6:,.2f} MFLOP per step, as torch counts them")
    for note in costs["notes"]:
        echo(note)


def _layer_row(number: str, name: str, layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    stage = str(layers[0]["stage"]) if number and layers else ""
    num_bytes = sum(each[kind] for each in layers for kind in ("weights", "gradients", "optimizer", "buffers"))
    flops = sum(each["flops"] for each in layers) / 1e6
    sizes = (size_text(num_bytes), size_text(layers[-1]["output"]) if layers else "")
    return number, name, stage, f"{sum(each['parameters'] for each in layers):,}", f"{flops:,.2f}", *sizes


def faults_as_plain(faults: Sequence[Fault], job: Job) -> list[dict[str, Any]]:
    """Returns faults as plain values, each with its description as `text`."""
    return [to_plain(fault) | {"text": text} for fault, text in zip(faults, describe(faults, job), strict=True)]


def _left_lazy(job: Job, ownership: Ownership) -> tuple[Slot, ...]:
    """Returns the shadowed slots whose forwards no shadow runs, as it has not their input."""
    return lazy_slots(ownership) if job.redundancy == "eager" else ()


def _redundancy_line(job: Job, ownership: Ownership) -> str:
    if job.redundancy == "reroute":
        return f"redundancy reroute: the owner of the same {job.slot_noun} in the next pipeline takes over"
    shadows = {slot: ownership.shadows_of(*slot) for slot in ownership.grid.slots()}
    if not any(shadows.values()):
        return f"redundancy {job.redundancy}: no worker shadows a {job.slot_noun}"
    named = {slot: f"{job.slot_noun} {slot[1]}{f'@{slot[0]}' if slot[0] else ''}" for slot in shadows}
    texts = ", ".join(f"{named[slot]} on {numbered('worker', line, ' and ')}" for slot, line in shadows.items())
    note = " (redundant forwards in brackets)" if job.redundancy == "eager" else ""
    if lazy := _left_lazy(job, ownership):
        slots = f"{job.slot_noun}{'s' if len(lazy) > 1 else ''} {slots_text(lazy, job.pipelines > 1, {})}"
        note += f"\nno redundant forwards of {slots}, which stay lazy: their shadows lack the input"
    return f"redundancy {job.redundancy}; shadows: {texts}{note}"
