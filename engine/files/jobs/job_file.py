"""Resolves a job from all its layers: default < user file < project file < job file < ``BAMBOO_*`` < ``--set`` < flag.

Rules: layers are merged field by field, and ``model_args`` and the other arguments one by one. The problems of all
layers are reported together, each at the place of its value. The record of a run (``run.json``) repeats its job, so
that only ``--set`` and flags change it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.core.errors import MASK, Problem, UserError, is_secret, required
from engine.core.job.job import ARGS_FIELDS, Job
from engine.core.job.job_rules import ANYTHING, JobParts, check_job
from engine.core.units import MILLI, parse_epochs
from engine.files.accelerators import accelerators, device_for, nccl_stand_in
from engine.files.jobs.job_layers import (
    KEPT,
    LYING_THERE,
    PROJECT_FILE,
    Layer,
    document_layer,
    environment_layer,
    file_layer,
    flag_layer,
    foreign_values,
    init_of,
    last_with,
    set_layer,
    with_its_faults,
    without_noted,
)
from engine.files.jobs.job_value import A_FIELD, AUTO, FIELD_TYPES, IN_EPOCHS, FieldValue, is_automatic
from engine.files.jobs.resolved_job import ResolvedJob
from engine.files.jobs.user_files import own_schedule
from engine.files.strict_yaml import Document

# Turns what a job says in epochs into steps: those of the job, and those between validations or checkpoints.
#
# Rules: the samples are counted once, and only if a field is in epochs. A number of steps is rounded up, so that an
# epoch is whole. A command that does not count them gets a job with 0 steps, which stand for an unknown number, and its
# `checkpoint_every` stays in epochs.


def spans_of(entries: Iterable[FieldValue]) -> dict[str, str]:
    """Returns the text of each field that is given in epochs, such as ``2epochs``, by its name."""
    return {each.name: each.value for each in entries if each.name in IN_EPOCHS and parse_epochs(str(each.value))}


def in_steps(job: Job, layers: Sequence[Layer], spans: Mapping[str, str], offered: JobParts) -> Job:
    """Returns the job with steps in place of epochs, unless a later layer, or a record, has steps.

    Raises UserError if another layer has both, and for epochs of data without an end.
    """
    by_epochs = _goes_by_epochs(job, layers)
    if by_epochs is None:
        job = replace(job, epochs=0)
    if not by_epochs and not spans:
        return job
    samples = None if offered.samples_of is None else offered.samples_of(job)
    if samples is None:
        every = spans.get("checkpoint_every", job.checkpoint_every)
        return replace(job, checkpoint_every=every, steps=0 if by_epochs else job.steps)
    if not samples:
        field, hint = next(iter(spans), "epochs"), "this source has no end: give a number of steps"
        raise UserError([Problem("epochs" if by_epochs else field, "a finite training set", repr(job.data), hint)])
    counted: dict[str, Any] = {
        name: FIELD_TYPES[name](_steps(job, required(parse_epochs(text), "a span in epochs"), samples))
        for name, text in spans.items()
    }
    if by_epochs:
        counted["steps"] = _steps(job, job.epochs * MILLI, samples)
    return replace(job, **counted)


def _steps(job: Job, thousandths: int, samples: int) -> int:
    """Returns the steps that train so many thousandths of an epoch, rounded up."""
    return -(-thousandths * samples // (MILLI * job.pipelines * job.microbatches * job.microbatch_size))


def _goes_by_epochs(job: Job, layers: Sequence[Layer]) -> bool | None:
    """Returns whether epochs decide the steps, False for a record with both, None if steps count instead."""
    at = {name: last_with(name, layers) for name in ("epochs", "steps")}
    if not job.epochs or at["steps"] > at["epochs"]:
        return None
    layer = layers[at["epochs"]]
    if at["steps"] < at["epochs"]:
        return True
    if not FIELD_TYPES.keys() - ARGS_FIELDS <= {each.name for each in layer.entries}:  # no record
        (entry,) = [each for each in layer.entries if each.name == "epochs"]
        raise UserError([entry.problem("no steps with it", str(job.steps), "give epochs or steps, not both")])
    return False


# The defaults of a job that other workers can join: it shares out slots anew, and stages have blocks.
#
# Rules: a value that is given wins, and so do those in the record of a run. A job for `bamboo run` moves stages if
# other workers can take them over. A scenario, which may say where each stage is, and a job on several hosts, whose
# network is not measured, do only if they say so. Blocks change the numbers that kills and records name. So only a job
# that asks for elasticity has them by itself: with it, and with `--blocks auto`, dry runs choose the blocks once
# (`offered`), so each later reader finds a number.

FOR_JOINERS = "default with elastic, standby or max_workers"  # the origin of such a value
FOR_SEVERAL = "default with several workers"


def with_elastic_defaults(
    job: Job, layers: Sequence[Layer], entries: Mapping[tuple[str, ...], FieldValue], offered: JobParts, *, moves: bool
) -> tuple[Job, dict[str, str], str]:
    """Returns the job with these defaults, their origins, and why it has so many blocks if it `moves` stages."""
    origins, blocks = dict[str, str](), entries.get(("blocks",))
    asking = (name for name in ("standby", "max_workers") if getattr(job, name) > 0)
    if any(_is_later(name, "elastic", layers) for name in asking):
        job = replace(job, elastic=True)
        origins = {} if ("elastic",) in entries else {"elastic": FOR_JOINERS}
    is_asked = job.elastic
    if moves and ("elastic",) not in entries and not is_asked and can_move(job):
        job, origins = replace(job, elastic=True), {"elastic": FOR_SEVERAL}
    if blocks and job.max_workers > job.slots * job.pipelines and _is_later("max_workers", "blocks", layers):
        blocks = None  # such as those of a run that is resumed with more workers
    if not (is_automatic(blocks) if blocks else is_asked):
        return job, origins, ""
    choice = offered.blocks(job)
    origin = blocks.origin if blocks else FOR_JOINERS
    origins["blocks"] = f"{origin} ({AUTO}: {choice.why})"
    return replace(job, blocks=choice.blocks), origins, choice.why


def _is_later(name: str, other: str, layers: Sequence[Layer]) -> bool:
    """Returns whether a later layer gives the field `name` than the other one."""
    return last_with(name, layers) > last_with(other, layers)


def can_move(job: Job) -> bool:
    """Returns whether another worker can take over a stage of a job."""
    return job.num_workers > 1 and job.retains and not job.predict_args


# The defaults of a job that its model has: a model of a real size is trained in another dtype, on longer samples.
#
# Rule: a value that is given wins. So the record of a run, which has every field, repeats its job.


def with_model_defaults(job: Job, paths: Collection[tuple[str, ...]], offered: JobParts) -> tuple[Job, dict[str, str]]:
    """Returns the job with the defaults of its model, and the origin of each; `paths` have a value already."""
    origins = {}
    for name, value in offered.defaults(job).items():
        path = tuple(name.split(".", 1))
        if path in paths:
            continue
        field = path[0]
        changed: dict[str, Any] = {field: value if len(path) == 1 else {**getattr(job, field), path[1]: value}}
        job = replace(job, **changed)
        origins[name] = f"default of {job.model}"
    return job, origins


def resolve_job(
    job_file: Path | None,
    environment: Mapping[str, str],
    settings: Iterable[str] = (),
    flags: Mapping[str, str] | None = None,
    project: Path = Path(),
    offered: JobParts = ANYTHING,
    kept: Document | None = None,
    last: Layer | None = None,
    *,
    moves: bool = True,
) -> ResolvedJob:
    """Returns the job that all layers make together.

    `settings` holds the ``FIELD=VALUE`` of each ``--set``, `flags` the text of each flag by its field, and `project` is
    the folder of the project file ``bamboo.yaml``. Beside the `kept` job of a checkpoint, only the job file, ``--set``
    and flags count. The `last` layer overrides all of them. With `moves` a new job moves stages by itself.

    Raises:
        UserError: with every problem of every layer.
    """
    layers = [file_layer(job_file)] if job_file else []
    overrides = [set_layer(settings), flag_layer(flags or {}), *([last] if last is not None else [])]
    if kept is not None:
        of_checkpoint = document_layer(kept, KEPT)
        of_checkpoint.entries = without_noted(of_checkpoint.entries)
        return merge([of_checkpoint, *layers, *overrides], offered)
    if record := next((each.record for each in layers), None):
        resolved = merge([*layers, *overrides], offered)
        init = init_of(record) if resolved.origins.get("init", "").startswith(f"{record.source}:") else ""
        return replace(resolved, with_faults=with_its_faults(record), init=init)
    files = ((_user_file(environment), ""), (project / PROJECT_FILE, LYING_THERE))
    lower = [file_layer(path, foreign) for path, foreign in files if path and os.path.exists(path)]
    return merge([*lower, *layers, environment_layer(environment), *overrides], offered, moves=moves)


def merge(layers: Sequence[Layer], offered: JobParts = ANYTHING, *, moves: bool = False) -> ResolvedJob:
    """Returns the job that the layers make together; a later layer overrides an earlier one.

    With `moves` it moves stages if others can take them over, and no layer says otherwise.

    Raises:
        UserError: with every problem of every layer.
    """
    entries = {each.path: each for layer in layers for each in layer.entries}
    spans = spans_of(entries.values())
    job = _job(each for each in entries.values() if each.name not in spans and not is_automatic(each))
    problems = [problem for layer in layers for problem in layer.problems]
    problems += [_masked(each) for each in entries.values() if each.value == MASK and is_secret(each.path[-1])]
    foreign = foreign_values(entries.values())
    refused = [] if offered.trusts_files else [each for each in foreign if each.field in offered.acts_on]
    may_call = offered.calls_code and not any(each.field == "schedule" for each in refused)
    own = own_schedule(job) if may_call or job.has_program else job.schedule
    if isinstance(own, Problem):
        problems += [_at_its_place(own, entries)]
    else:
        job = replace(job, schedule=own)
    job, of_model = with_model_defaults(job, entries, offered)
    job, of_joiners, why_blocks = with_elastic_defaults(job, layers, entries, offered, moves=moves)
    problems += [
        _at_its_place(problem, entries)
        for problem in check_job(job, nccl_on_cpu=bool(nccl_stand_in()))
        if problem.field != "schedule" or (job.has_program and not isinstance(own, Problem))
    ]
    # A bad name is replaced by the default in `job`, so its arguments would be checked against the wrong model.
    if not {"model", "data", "optimizer"} & {problem.field for problem in problems}:
        known_fields = {problem.field for problem in (*problems, *refused)}  # one problem is enough for a value
        problems += [_at_its_place(each, entries) for each in offered.problems(job) if each.field not in known_fields]
    problems += refused
    if problems:
        raise UserError(_in_order([_with_a_field(each, job, offered) for each in problems], layers))
    counted, origins = in_steps(job, layers, spans, offered), _origins(job, entries) | of_model | of_joiners
    if counted.epochs and counted.steps != job.steps:
        origins["steps"] = origins["epochs"]
    origins |= {name: f"{origins[name]} ({text})" for name, text in spans.items()}
    device, why = device_for(counted, accelerators())
    if why:
        counted, origins["device"] = replace(counted, device=device), f"{origins['device']} ({why})"
    return ResolvedJob(counted, origins, foreign=foreign, why_blocks=why_blocks)


def _masked(entry: FieldValue) -> Problem:
    """Returns the problem of a masked value, which was left out of the file that it comes from."""
    return entry.problem("its value, which is secret and was not recorded", "", f"give it: --set {entry.name}=VALUE")


def _with_a_field(problem: Problem, job: Job, offered: JobParts) -> Problem:
    """Returns the problem of an unknown field with the argument of that name, or else with all fields."""
    if problem.expected != A_FIELD or problem.hint:
        return problem
    by_last = {each.partition(".")[2]: each for each in offered.arguments(job)}
    close = get_close_matches(problem.field.rpartition(".")[2], by_last, n=1)
    hint = f"did you mean {by_last[close[0]]!r}?" if close else f"there is {', '.join(FIELD_TYPES)}"
    return replace(problem, hint=hint)


def _user_file(environment: Mapping[str, str]) -> Path | None:
    if folder := environment.get("XDG_CONFIG_HOME"):
        return Path(folder, "bamboo", "job.yaml")
    if home := environment.get("HOME"):
        return Path(home, ".config", "bamboo", "job.yaml")
    return None


def _job(entries: Iterable[FieldValue]) -> Job:
    values: dict[str, Any] = {}
    for field in entries:
        if len(field.path) == 1:
            values[field.name] = field.value
        else:
            values.setdefault(field.path[0], {})[field.path[1]] = field.value
    return Job(**values)


def _at_its_place(problem: Problem, entries: Mapping[tuple[str, ...], FieldValue]) -> Problem:
    path = tuple(problem.field.split(".", 1))
    origin = entries.get(path) or entries.get(path[:1])  # an argument within a text, such as param_groups.lr
    if origin is None:
        return problem
    return replace(problem, source=origin.source, line=origin.line, column=origin.column)


def _in_order(problems: Iterable[Problem], layers: Iterable[Layer]) -> list[Problem]:
    rank: dict[str, int] = {}
    for layer in layers:
        for source in [*(each.source for each in layer.problems), *(each.source for each in layer.entries)]:
            rank.setdefault(source, len(rank))
    # A problem between defaults and given values may have no source; it comes first.
    return sorted(problems, key=lambda problem: (rank.get(problem.source, -1), problem.line, problem.column))


def _origins(job: Job, entries: Mapping[tuple[str, ...], FieldValue]) -> dict[str, str]:
    origins = {
        field.name: "default" for field in fields(job) if field.name not in ARGS_FIELDS or not getattr(job, field.name)
    }
    return origins | {each.name: each.origin for each in entries.values()}
