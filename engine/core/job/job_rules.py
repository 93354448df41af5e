"""The rules about the fields of a job; each broken rule becomes a `Problem`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.core.action import Program
from engine.core.checkpoint_rules import KEEPING_FORM, keeping_of, keeps_any
from engine.core.errors import Problem, ScheduleError, nearest
from engine.core.job.job import (
    ACTING,
    AT_MOST,
    FACTORY,
    PARTITION_FORMS,
    SIZE_FORM,
    Job,
    metric_problems,
    parse_size,
    size_problems,
)
from engine.core.job.partition import written
from engine.core.job.torch_parts import PREDICT_ARGUMENTS, argument_problems, scaling_problems
from engine.core.job.update_rules import update_problems
from engine.core.monitors import FIGURE_FORM, figure_of
from engine.core.ownership import Grid, PlacementChoice, directions_of, fresh
from engine.core.program.build import build_program
from engine.core.program.schedule_csv import (
    cell_of,
    has_placement,
    is_text,
    lists_from_csv,
    named_pairs,
    placement_of,
    stages_on,
)
from engine.core.program.schedules import OVERLAPS, SCHEDULES, Schedule, overlap_of, pairs_of
from engine.core.program.verify import Violation, verify
from engine.core.texts import counted, pattern_error
from engine.core.units import DURATION_FORM, MOST_FLOAT, Scalar, parse_duration, whole_number

# The models, data and arguments that a job can name, as the resolution of a job asks for them.


class BlockChoice(NamedTuple):
    """The blocks of each stage that a job has by itself, and the reason in words."""

    blocks: int
    why: str


@dataclass(frozen=True, slots=True)
class JobParts:
    """The models, data and arguments that a job can name.

    `problems` returns the problems with those that a job names, `arguments` the arguments that its parts take, such as
    ``model_args.width``. `acts_on` has the fields of `ACTING` that the command acts on: it imports the code that they
    name, or writes to the folder. If `schedule` is not in `acts_on`, the user's generator is not called and program
    rules are skipped. A value of these fields from a file that the command line does not name as a job is refused,
    unless the user `trusts_files`. `samples_of` counts the training samples of a job with epochs: 0 for endless data,
    None if they are not counted. `blocks` chooses the blocks of each stage, for a job that leaves them to bamboo.
    `defaults` returns the fields and arguments that have other defaults with the model of a job.
    """

    problems: Callable[[Job], Iterable[Problem]]
    arguments: Callable[[Job], Iterable[str]]
    acts_on: tuple[str, ...] = ACTING
    trusts_files: bool = False
    samples_of: Callable[[Job], int | None] | None = None
    blocks: Callable[[Job], BlockChoice] = lambda job: BlockChoice(1, "the layers of the model are not known")
    defaults: Callable[[Job], Mapping[str, Scalar]] = lambda job: {}

    @property
    def calls_code(self) -> bool:
        """Whether a generator of a schedule, which is the user's code, is called."""
        return "schedule" in self.acts_on

    def trusting(self, is_trusted: bool) -> JobParts:
        """Returns the same, with the user's word on whether files are trusted."""
        return replace(self, trusts_files=is_trusted)


ANYTHING = JobParts(lambda job: (), lambda job: ())

# The rules between a schedule and the other fields of a job: placement, stages, workers and microbatches.
_MOST_SHOWN = 5


def check_schedule(
    schedule: str, stages: int, stages_per_worker: int, microbatches: int, choice: PlacementChoice, slices: int = 1
) -> list[Problem]:
    """Returns a problem for each broken rule about schedules; with `slices`, `microbatches` counts slices."""
    unknown = []
    if not is_text(schedule) and schedule not in SCHEDULES:
        expected = f"one of {', '.join(sorted(SCHEDULES))}"
        unknown = [Problem("schedule", expected, repr(schedule), nearest(schedule, SCHEDULES))]
    if stages_per_worker < 1 or stages < 1 or microbatches < 1:
        return unknown  # `check_job` reports these counts
    if stages % stages_per_worker:
        fitting = ", ".join(str(each) for each in range(1, stages + 1) if stages % each == 0)
        expected = f"a divisor of {stages} stages: {fitting}"
        return [*unknown, Problem("stages_per_worker", expected, str(stages_per_worker))]
    if unknown:
        return unknown
    num_workers = stages // stages_per_worker
    if is_text(schedule):
        grid = Grid(stages, microbatches, slices=slices)
        return _check_text(schedule, num_workers, stages_per_worker, grid, choice)
    return _check_named(schedule, SCHEDULES[schedule], num_workers, stages_per_worker, microbatches, choice)


def _check_named(
    name: str, schedule: Schedule, num_workers: int, stages_per_worker: int, microbatches: int, choice: PlacementChoice
) -> list[Problem]:
    problems = []
    least, most = schedule.stages_per_worker
    if not schedule.takes(stages_per_worker):
        stages, shape = num_workers * stages_per_worker, str(least) if least == most else f"{least} to {most}"
        hint = f"{stages} stages are then on {stages // least} workers"
        if stages % least:
            hint = f"and a number of stages that {least} divides"
        problems.append(Problem("stages_per_worker", f"{shape} with schedule {name}", str(stages_per_worker), hint))
    if choice not in ("auto", schedule.placement) and stages_per_worker > 1:
        problems.append(Problem("placement", f"{schedule.placement} with schedule {name}", repr(choice)))
    if num_workers % directions_of(name):
        hint = "a worker of the first half has the mirror image of one of the second half"
        problems.append(Problem("stages", f"an even number with schedule {name}", str(num_workers), hint))
    few = schedule.least_microbatches(num_workers)
    if microbatches < few and not problems:
        expected = f"a whole number >= {few} with schedule {name} on {num_workers} workers"
        problems.append(Problem("microbatches", expected, str(microbatches)))
    return problems


def _check_text(
    text: str, num_workers: int, stages_per_worker: int, grid: Grid, choice: PlacementChoice
) -> list[Problem]:
    try:
        lists = lists_from_csv(text)
        stages_on(lists)
    except ScheduleError as error:
        return [Problem("schedule", "the compute lists of every worker", "a file of which", str(error))]
    if len(lists) != num_workers:
        expected = f"one row per worker of a pipeline: {num_workers}"
        hint = f"{num_workers * stages_per_worker} stages, {stages_per_worker} on each worker"
        return [Problem("schedule", expected, f"{len(lists)} rows", hint)]
    placement = placement_of(text, choice)
    if not has_placement(lists, placement):
        expected = f"the stages on the workers as placement {placement} has them"
        stands = (f"stage {stage} on worker {worker}" for stage, worker in sorted(stages_on(lists).items()))
        return [Problem("schedule", expected, ", ".join(stands))]
    ownership = fresh(grid, stages_per_worker, placement)
    program = build_program(text, ownership)
    broken = verify(program, ownership)[:_MOST_SHOWN]
    if not broken:
        return list(_lost_pairs(text, program))
    places = (str(_in_text(violation, text, program)) for violation in broken)
    return [Problem("schedule", "a program that runs to its end", place) for place in places]


def _lost_pairs(text: str, program: Program) -> Iterator[Problem]:
    """Yields the overlap pairs that are named in `text`, and whose actions do not run as a pair in its program."""
    named = [*named_pairs(text)]
    kinds = {overlap_of(first, second) for _, _, first, second in named}
    pairs = {
        worker: [actions[place : place + 2] for place, _ in pairs_of(actions, kinds)]
        for worker, actions in program.items()
    }
    for worker, position, first, second in named:
        if (first, second) not in pairs[worker]:
            beside = next((pair for pair in pairs[worker] if {first, second} & {*pair}), None)
            why = f"{beside[0]} and {beside[1]} are a pair" if beside else f"{second} needs {first}"
            place = f"worker {worker}, position {position}: ({first};{second}){OVERLAPS[first.op, second.op]}"
            yield Problem("schedule", "overlap pairs that can run as they are written", place, why)


def _in_text(broken: Violation, text: str, program: Program) -> Violation:
    """Returns a violation with its position in `text`, from which the program was built."""
    if broken.position < 0:
        return broken
    actions = program[broken.worker]
    action = actions[broken.position]
    nth = actions[: broken.position].count(action)
    return replace(broken, position=cell_of(text, broken.worker, action, nth))


_LEAST_PATIENCE_NS = 100_000_000


_NAME_FORM = "up to 40 of a-z 0-9 . _ - (first a letter or digit)"
MOST_ADAPTED = 4096  # the policy runs every schedule dry while training continues


def check_job(job: Job, *, nccl_on_cpu: bool = False) -> list[Problem]:
    """Returns a problem for each rule that a job of valid types breaks; `nccl_on_cpu` is for tests."""
    problems = size_problems(job)
    problems += _refused(
        job,
        ("lr", "a finite float32 number > 0", not 0 < job.lr <= MOST_FLOAT, ""),
        ("clip_norm", "a finite float32 number >= 0", not 0 <= job.clip_norm <= MOST_FLOAT, ""),
        ("ema", "a number >= 0 and < 1", not 0 <= job.ema < 1, ""),
    )
    if job.best and figure_of(job.best) is None:
        problems.append(Problem("best", FIGURE_FORM, repr(job.best)))
    elif job.best and not (job.validate_every and keeps_any(job.checkpoint_every)):
        hint = "it needs validations (--validate-every) and checkpoints (--checkpoint-every)"
        problems.append(Problem("best", "no value in this job", repr(job.best), hint))
    shape = job.stages, job.stages_per_worker, job.program_microbatches
    problems += check_schedule(job.schedule, *shape, job.placement, job.slices)
    problems += [*_check_directions(job), *_check_blocks(job), *_check_growth(job), *_check_device(job, nccl_on_cpu)]
    problems += [*update_problems(job), *scaling_problems(job), *_check_partition(job), *metric_problems(job)]
    problems += argument_problems("predict_args", PREDICT_ARGUMENTS, job.predict_args, all_of=False)
    if job.adapt_schedule and job.slots * job.program_microbatches > MOST_ADAPTED:
        expected = f"0 with more than {MOST_ADAPTED} forwards of a pipeline"
        problems.append(Problem("adapt_schedule", expected, str(job.adapt_schedule), "use `bamboo schedule search`"))
    problems += [*_check_slices(job), *_check_workers(job), *_check_shards(job)]
    problems += [*_check_offload(job), *_check_streams(job), *_check_redundancy(job)]
    problems += [
        Problem(name, f"{DURATION_FORM}, at least 100ms", repr(getattr(job, name)))
        for name in ("hang_after", "silent_after", "data_retry_for")
        if (parse_duration(getattr(job, name)) or 0) < _LEAST_PATIENCE_NS
    ]
    return problems + _refused(
        job,
        ("collate", "package.module:function", job.collate and not FACTORY.fullmatch(job.collate), ""),
        (
            "split",
            "a whole number >= 1, or names of submodules",
            job.split.isdecimal() and not whole_number(job.split),
            "",
        ),
        ("checkpoint_every", KEEPING_FORM, keeping_of(job.checkpoint_every) is None, ""),
        ("events_max", SIZE_FORM, parse_size(job.events_max) is None, ""),
        ("name", _NAME_FORM, job.name and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,39}", job.name), ""),
    )


def _check_blocks(job: Job) -> Iterator[Problem]:
    if job.slots > AT_MOST["stages"] >= max(job.stages, job.blocks):
        yield Problem("blocks", "a number with which stages x blocks <= 4096", repr(job.blocks))


def _refused(job: Job, *rows: tuple[str, str, object, str]) -> list[Problem]:
    """Returns a problem for each row that holds: a field, what is expected of it, whether it is not that, and why."""
    values = {field: repr(getattr(job, field)) for field, *_ in rows}
    return [Problem(field, expected, values[field], hint) for field, expected, is_broken, hint in rows if is_broken]


def _check_slices(job: Job) -> list[Problem]:
    """Slices have been shown to be right with some other fields only."""
    if job.slices == 1:
        return []
    unsliced = unsliced_schedules()
    refused = (
        ("fsdp", "0", job.fsdp, "a slice keeps keys and values that were computed with whole weights"),
        ("variable_shapes", "false", job.variable_shapes, "all microbatches are cut at the same places"),
        ("activation_checkpoint", "0", job.activation_checkpoint, "a later slice reads what a checkpoint drops"),
        ("residuals", "auto or recompute", job.residuals == "ship", "a residual has the states of earlier slices"),
        ("loss_normalisation", "microbatches", job.loss_normalisation != "microbatches", "a loss sees one slice"),
        ("schedule", f"none of {', '.join(unsliced)}", job.schedule in unsliced, "slices have not been tried with it"),
    )
    return _refused(
        job, *((field, f"{expected} with slices", is_set, hint) for field, expected, is_set, hint in refused)
    )


def unsliced_schedules() -> list[str]:
    """Returns the schedules of pairs and those of two directions, with which slices have not been tried."""
    return [name for name, each in SCHEDULES.items() if each.overlaps or directions_of(name) > 1]


def _check_directions(job: Job) -> Iterator[Problem]:
    directions = directions_of(job.schedule)
    if directions == 1:
        return
    if job.pipelines % directions:
        hint = "microbatches enter at both ends, and each direction is a pipeline with weights of its own"
        yield Problem("pipelines", f"an even number with schedule {job.schedule}", str(job.pipelines), hint)
    if job.fsdp:
        hint = "a worker needs the whole stages of both directions in turn"
        yield Problem("fsdp", f"0 with schedule {job.schedule}", str(job.fsdp), hint)


def _check_device(job: Job, nccl_on_cpu: bool) -> Iterator[Problem]:
    if job.device == "cuda" and job.fsdp:
        hint = "shards have been put together on CPUs only"
        yield Problem("fsdp", "0 with device cuda", repr(job.fsdp), hint)
    if job.device == "cpu" and job.backend == "nccl" and not nccl_on_cpu:
        hint = "NCCL sends between GPUs; --device cuda computes on them"
        yield Problem("backend", "auto or direct with device cpu", "'nccl'", hint)
    if job.variable_shapes and job.backend == "nccl":
        hint = "NCCL needs the size of a message before it comes; --backend direct sends it with the message"
        yield Problem("variable_shapes", "false with backend nccl", "true", hint)
    if job.device == "cpu" and job.retain == "cpu":
        hint = "what the CPU computes lies on the host already"
        yield Problem("retain", "device with device cpu", "'cpu'", hint)


def _check_offload(job: Job) -> Iterator[Problem]:
    if job.offload == "host" and job.fsdp:
        hint = "the weights in what autograd saves come and go with fsdp"
        yield Problem("offload", "none with fsdp", "'host'", hint)
    if not 0 < job.offload_time < math.inf:
        yield Problem("offload_time", "a number > 0, in forwards", repr(job.offload_time))


def _check_shards(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.fsdp and job.pipelines == 1:
        expected, hint = "0 with one pipeline", "shards lie over the pipelines: give --pipelines 2 or more"
    elif job.fsdp and job.redundancy not in ("none", "lazy"):
        expected = f"0 with redundancy {job.redundancy}"
        hint = "the shadow of a shard holds that shard, and runs no forwards: give --redundancy lazy or none"
    elif job.fsdp > job.stages_per_worker >= 1:
        expected = f"a whole number <= {job.stages_per_worker}"
        fits = "" if job.stages % job.fsdp else f": give --stages-per-worker {job.fsdp} --schedule looped-bfs"
        hint = f"a worker has {counted(job.stages_per_worker, 'stage')} of each pipeline{fits}"
    return [Problem("fsdp", expected, repr(job.fsdp), hint)] if expected else []


def _check_workers(job: Job) -> Iterator[Problem]:
    if job.workers > max(1, job.most_workers):
        hint = "stages / stages_per_worker x pipelines; a worker has at least one stage of one pipeline"
        yield Problem("workers", f"a whole number <= {job.most_workers}", repr(job.workers), hint)
    elif job.workers and job.fsdp:
        hint = "the owners of a stage hold its shards, one in each pipeline"
        yield Problem("workers", "0 with fsdp", repr(job.workers), hint)


def _check_growth(job: Job) -> list[Problem]:
    """Each worker owns at least one slot of one pipeline, and moves must be allowed."""
    expected = hint = ""
    slots, least = job.slots * job.pipelines, job.num_workers
    if job.max_workers and not job.elastic:
        expected, hint = "0 without elastic", "no stage moves to a worker that joins: give --elastic"
    elif 0 < job.max_workers < least:
        expected, hint = f"a whole number >= {least}", f"the job starts with {counted(least, 'worker')}"
    elif AT_MOST["max_workers"] >= job.max_workers > slots:
        where = f"each of the {job.pipelines} pipelines has" if job.pipelines > 1 else "there are"
        expected = f"a whole number <= {slots}"
        hint = f"a worker owns at least one {job.slot_noun}, and {where} {job.cut}"
    return [Problem("max_workers", expected, repr(job.max_workers), hint)] if expected else []


def _check_streams(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.log_every and job.redundancy not in ("lazy", "eager"):
        expected = "0 without shadows"
        hint = f"with redundancy {job.redundancy} there is no shadow to send to: give --redundancy lazy or eager"
    elif job.log_every >= job.program_microbatches >= 1:
        expected = f"a whole number <= {job.program_microbatches - 1}"
        hint = f"of {job.program_microbatches} microbatches; after the last, the log of the whole step is sent"
    elif job.slices and job.log_every % job.slices:
        expected = f"a multiple of {job.slices} slices"
        hint = "a shadow runs all slices of a microbatch, or none"
    return [Problem("log_every", expected, repr(job.log_every), hint)] if expected else []


def _check_redundancy(job: Job) -> Iterator[Problem]:
    """A shadow is another worker than the owner; only a job of one worker may ask for a shadow and have none."""
    most = max(1, job.num_workers - 1)
    if job.redundancy == "reroute" and job.pipelines == 1:
        hint = "the next pipeline takes over: give --pipelines 2 or more"
        yield Problem("redundancy", "none, lazy or eager with one pipeline", "'reroute'", hint)
    elif job.redundancy in ("lazy", "eager") and job.redundancy_level > most:
        hint = f"{job.num_workers} workers, and a shadow is another one than the owner"
        yield Problem("redundancy_level", f"a whole number <= {most}", repr(job.redundancy_level), hint)


def _check_partition(job: Job) -> list[Problem]:
    form = job.partition
    if form in ("uniform", "parameters", "profile"):
        return []
    if form.startswith("type:"):
        wrong = pattern_error(form[len("type:") :])
        return [Problem("partition", "a regular expression after type:", repr(form), wrong)] if wrong else []
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", form) or (job.stages == 1 and form == ""):
        fits = written(form, job.stages) or job.stages < 1
        return [] if fits else [Problem("partition", f"{job.stages - 1} rising layer numbers from 1", repr(form))]
    return [Problem("partition", PARTITION_FORMS, repr(form), nearest(form, ("uniform", "parameters", "profile")))]
