"""The rules between the fields of a job; each broken rule becomes a `Problem`."""

from __future__ import annotations

import re

from engine.core.checkpoints.keeping import KEEPING_FORM, keeping_of
from engine.core.config.job import FACTORY, PARTITION_FORMS, Job
from engine.core.config.loss_scaling import scaling_problems
from engine.core.config.metric_names import metric_problems
from engine.core.config.partition import written
from engine.core.config.schedule_choice import check_schedule
from engine.core.config.size import AT_MOST, SIZE_FORM, parse_size, size_problems
from engine.core.config.update_rules import update_problems
from engine.core.duration import DURATION_FORM, parse_duration
from engine.core.errors import Problem, nearest
from engine.core.scalar import MOST_FLOAT, whole_number
from engine.core.schedules.csv_text import is_text
from engine.core.schedules.registry import SCHEDULES
from engine.core.texts import pattern_error

_LEAST_PATIENCE_NS = 100_000_000


def check_job(job: Job, *, nccl_on_cpu: bool = False) -> list[Problem]:
    """Returns a problem for each rule that `job` breaks; the types of its fields must be right already.

    `nccl_on_cpu` is for tests, where a double of NCCL sends between CPUs.
    """
    problems = size_problems(job)
    if not 0 < job.lr <= MOST_FLOAT:
        problems.append(Problem("lr", "a finite float32 number > 0", repr(job.lr)))
    if not 0 <= job.clip_norm <= MOST_FLOAT:
        problems.append(Problem("clip_norm", "a finite float32 number >= 0", repr(job.clip_norm)))
    problems += check_schedule(job.schedule, job.stages, job.stages_per_worker, job.microbatches, job.placement)
    problems += [*_check_blocks(job), *_check_elastic(job), *_check_standby(job), *_check_device(job, nccl_on_cpu)]
    problems += [*update_problems(job), *scaling_problems(job)]
    problems += [*_check_partition(job), *_check_code(job)]
    if job.split.isdecimal() and not whole_number(job.split):
        problems.append(Problem("split", "a whole number >= 1, or names of submodules", repr(job.split)))
    if keeping_of(job.checkpoint_every) is None:
        problems.append(Problem("checkpoint_every", KEEPING_FORM, repr(job.checkpoint_every)))
    problems += [*_check_workers(job), *_check_shards(job), *_check_streams(job), *_check_redundancy(job)]
    if parse_size(job.events_max) is None:
        problems.append(Problem("events_max", SIZE_FORM, repr(job.events_max)))
    problems += [
        Problem(name, f"{DURATION_FORM}, at least 100ms", repr(getattr(job, name)))
        for name in ("hang_after", "silent_after")
        if (parse_duration(getattr(job, name)) or 0) < _LEAST_PATIENCE_NS
    ]
    if job.name and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,39}", job.name):
        problems.append(Problem("name", "up to 40 of a-z 0-9 . _ - (first a letter or digit)", repr(job.name)))
    return problems


def _check_blocks(job: Job) -> list[Problem]:
    if job.blocks <= 1:
        return []
    problems = [Problem("blocks", f"1 with {each}", repr(job.blocks), hint) for each, hint in no_blocks(job)]
    if job.slots > AT_MOST["stages"] >= max(job.stages, job.blocks):
        problems.insert(0, Problem("blocks", "a number with which stages x blocks <= 4096", repr(job.blocks)))
    return problems


def no_blocks(job: Job) -> list[tuple[str, str]]:
    """Returns all that keeps slots from being taken over one by one, each with the reason.

    Such a slot needs a replica of its own, and an order of actions that takes runs of blocks.
    """
    order = "its order of actions is made for one slot per stage"
    known = SCHEDULES.get(job.schedule)
    found = []
    if job.fsdp:
        found.append(("fsdp", "shards lie over whole stages, which keep their owners until one dies"))
    if job.stages_per_worker > 1:
        found.append((f"stages_per_worker {job.stages_per_worker}", order))
    if is_text(job.schedule) or FACTORY.fullmatch(job.schedule):
        found.append(("a schedule of one's own", order))
    elif known is not None and not known.takes_blocks:
        fitting = ", ".join(name for name, each in SCHEDULES.items() if each.takes_blocks)
        found.append((f"schedule {job.schedule}", f"{order}; these take blocks: {fitting}"))
    return found


def _check_standby(job: Job) -> list[Problem]:
    """A joiner takes over blocks, or stages that are as small."""
    if job.standby < 1:
        return []
    return [Problem("standby", f"0 with {each}", repr(job.standby), hint) for each, hint in no_blocks(job)]


def _check_elastic(job: Job) -> list[Problem]:
    """The policy gives each worker one run of neighbouring slots: it would take two stages of a worker apart."""
    if not job.elastic:
        return []
    return [Problem("elastic", f"false with {each}", "true", hint) for each, hint in no_blocks(job)]


def _check_device(job: Job, nccl_on_cpu: bool) -> list[Problem]:
    problems = []
    if job.device == "cuda" and job.fsdp:
        hint = "shards have been put together on CPUs only"
        problems.append(Problem("fsdp", "0 with device cuda", repr(job.fsdp), hint))
    if job.device == "cpu" and job.backend == "nccl" and not nccl_on_cpu:
        hint = "NCCL sends between GPUs; --device cuda computes on them"
        problems.append(Problem("backend", "auto or direct with device cpu", "'nccl'", hint))
    if job.device == "cpu" and job.retain == "cpu":
        hint = "what the CPU computes lies on the host already"
        problems.append(Problem("retain", "device with device cpu", "'cpu'", hint))
    return problems


def _check_code(job: Job) -> list[Problem]:
    problems = metric_problems(job)
    if job.collate and not FACTORY.fullmatch(job.collate):
        problems.append(Problem("collate", "package.module:function", repr(job.collate)))
    return problems


def _check_shards(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.fsdp and job.pipelines == 1:
        expected, hint = "0 with one pipeline", "shards lie over the pipelines: give --pipelines 2 or more"
    elif job.fsdp and job.redundancy not in ("none", "lazy"):
        expected = f"0 with redundancy {job.redundancy}"
        hint = "the shadow of a shard holds that shard, and runs no forwards: give --redundancy lazy or none"
    elif job.fsdp > job.stages_per_worker >= 1:
        expected = f"a whole number <= {job.stages_per_worker}"
        hint = f"a worker has {job.stages_per_worker} of the stages (stages_per_worker)"
    return [Problem("fsdp", expected, repr(job.fsdp), hint)] if expected else []


def _check_workers(job: Job) -> list[Problem]:
    if job.workers > max(1, job.most_workers):
        hint = "stages / stages_per_worker x pipelines; a worker has at least one stage of one pipeline"
        return [Problem("workers", f"a whole number <= {job.most_workers}", repr(job.workers), hint)]
    if job.workers and job.fsdp:
        hint = "the owners of a stage hold its shards, one in each pipeline"
        return [Problem("workers", "0 with fsdp", repr(job.workers), hint)]
    return []


def _check_streams(job: Job) -> list[Problem]:
    expected = hint = ""
    if job.log_every and job.redundancy not in ("lazy", "eager"):
        expected = "0 without shadows"
        hint = f"with redundancy {job.redundancy} there is no shadow to send to: give --redundancy lazy or eager"
    elif job.log_every >= job.microbatches >= 1:
        expected = f"a whole number <= {job.microbatches - 1}"
        hint = f"of {job.microbatches} microbatches; after the last, the log of the whole step is sent"
    return [Problem("log_every", expected, repr(job.log_every), hint)] if expected else []


def _check_redundancy(job: Job) -> list[Problem]:
    """A shadow is another worker than the owner; only a job of one worker may ask for a shadow and have none."""
    if job.redundancy == "reroute" and job.pipelines == 1:
        hint = "the next pipeline takes over: give --pipelines 2 or more"
        return [Problem("redundancy", "none, lazy or eager with one pipeline", "'reroute'", hint)]
    num_workers = job.num_workers
    most = max(1, num_workers - 1)
    if job.redundancy in ("lazy", "eager") and job.redundancy_level > most:
        expected = f"a whole number <= {most}"
        hint = f"{num_workers} workers, and a shadow is another one than the owner"
        return [Problem("redundancy_level", expected, repr(job.redundancy_level), hint)]
    return []


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
