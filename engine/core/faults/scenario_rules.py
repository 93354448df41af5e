"""The rules between the parts of a scenario, checked before the run.

Rules: a fault that can never strike is a mistake; it is reported here and not after a useless run. A problem's field is
the place in the file, such as ``faults.0.at.stage``. A part that is invalid by itself is left out of these checks, so
that each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from engine.core.action import COMPUTE_OPS, OP_TABLE, RECEIVE_OPS, SEND_OPS, SHARD_OPS, STAGE_OPS, Action, Op, Program
from engine.core.checkpoint_rules import KeepRule, keeping_of
from engine.core.errors import Problem, nearest
from engine.core.faults.fault import (
    ANY_HOSTS,
    AT_ONCE,
    HARMLESS,
    LOSES_A_HOST,
    LOSES_A_MEMBER,
    MEMBERS,
    OTHER,
    WHOLE_AFTERWARDS,
    WITH_NOTICE,
    After,
    At,
    InStep,
    Kinds,
    OnHosts,
    ends,
    kind_problems,
    number_of,
)
from engine.core.faults.scenario import NOTICES, Every, Expect, FaultSpec, Scenario, Target
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership, holders, initial_program
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import rendezvous, routes_of
from engine.core.program.schedule_csv import is_text
from engine.core.texts import numbered

# The expectations that no run of a scenario can meet, found before the run.
#
# Rule: an expectation is refused only if no run can meet it, whatever happens at which time. So a fault at the end of
# the last step counts for nothing: after the last commit no death keeps a run from its end. A lost state is none where
# a checkpoint may be whole, and the run may go on from it.


_PLACE = "expect.outcome"
NO_TWIN = "a run without the settings of a deterministic one may have other bits each time"


def impossible_expectations(
    expect: Expect, job: Job, faults: Mapping[int, FaultSpec] | None, kinds: Kinds
) -> Iterator[Problem]:
    """Yields the problems of expectations that no run can meet; `faults` is None if some are not valid."""
    if expect.trajectory == "identical" and job.audit != 1:
        hint = "the comparison needs the hashes of every step: set audit: 1 in the job"
        yield Problem("expect.trajectory", "a job that hashes every step", f"audit {job.audit}", hint)
    if expect.trajectory is not None and not job.deterministic:
        yield Problem("deterministic", "true with a comparison with a twin", "false", NO_TWIN)
    if expect.outcome != "recovered" and expect.recovery is not None:
        hint = "a run that stops has no recovery to time"
        yield Problem("expect.recovery", "outcome recovered with it", repr(expect.outcome), hint)
    if expect.outcome == "noticed" and expect.notice is None:
        hint = "the wrong numbers that the run must notice; another error must not pass"
        yield Problem("expect.notice", f"one of {', '.join(NOTICES)} with outcome noticed", "nothing", hint)
    if expect.outcome != "noticed" and expect.notice is not None:
        yield Problem("expect.notice", "outcome noticed with it", repr(expect.outcome))
    is_kept = _keeps_before_the_end(job)
    if expect.outcome == "resumable" and not is_kept:
        hint = f"with checkpoint_every {job.checkpoint_every!r} there is no checkpoint before the end"
        yield Problem(_PLACE, "a job that keeps checkpoints with it", "'resumable'", hint)
    if faults is None:
        return
    sure = _why_kept(job, faults, kinds) or _why_restarts(job, faults, kinds)
    if expect.outcome == "resumable" and is_kept and sure:
        yield Problem(_PLACE, "recovered", "'resumable'", sure)
    if expect.outcome == "recovered" and not (is_kept and job.restarts) and (why := _why_lost(job, faults, kinds)):
        yield Problem(_PLACE, "state-lost", "'recovered'", why)
    if expect.outcome == "state-lost" and (why := _why_kept(job, faults, kinds)):
        yield Problem(_PLACE, "recovered", "'state-lost'", why)
    if (
        expect.outcome == "recovered"
        and expect.recovery is not None
        and all(_is_harmless(each) for each in faults.values())
    ):
        hint = "no fault here loses a worker, so there is no recovery to time"
        yield Problem("expect.recovery", "a fault that ends a worker", "none", hint)
    killed = next((each.id for each in faults.values() if each.do in AT_ONCE), None)
    if expect.culprit == "nobody" and killed is not None:
        hint = f"{killed} kills a worker, and the verdict names it"
        yield Problem("expect.culprit", "exact beside a kill", "'nobody'", hint)


def _is_harmless(spec: FaultSpec) -> bool:
    return spec.do in HARMLESS


def _why_lost(job: Job, faults: Mapping[int, FaultSpec], kinds: Kinds) -> str:
    """Returns why the state of a stage is surely lost; empty if a run may keep it."""
    for spec in faults.values():
        at = spec.trigger
        if not isinstance(at, At) or not ends(spec.do, kinds) or spec.do in WITH_NOTICE or _is_at_the_end(at, job):
            continue
        if all(len(each) == 1 for each in holders(job)):
            alone = len(fresh_ownership(job).workers()) == 1
            state = "shards" if job.fsdp else f"{job.slot_noun}s"
            why = f"with redundancy {job.redundancy} no other worker holds its {state}"
            return f"{spec.id} ends a worker, and {'the job has one worker' if alone else why}"
        if not _comes_first(spec, at, faults, kinds):
            continue
        victims = _victims(spec, at, job)
        for stage, workers in enumerate(holders(job)):
            if workers <= victims:
                named = numbered("worker", sorted(workers), " and ")
                what = f"{'a shard of ' if job.fsdp else ''}{job.slot_noun} {stage % job.slots}"
                return f"{spec.id} ends {named} at once, and no other worker holds {what}"
    return ""


def _why_kept(job: Job, faults: Mapping[int, FaultSpec], kinds: Kinds) -> str:
    """Returns why the state of every stage is surely kept; empty if a run may lose it."""
    if not all(ends(each.do, kinds) or _is_harmless(each) for each in faults.values()):
        return ""
    dead = sum(_most_victims(each) for each in faults.values() if not _is_harmless(each))
    copies = min(len(each) for each in holders(job))
    if dead >= copies:
        return ""
    lost = "no worker is" if not dead else "one worker is" if dead == 1 else f"{dead} workers are"
    return f"{lost} lost, and each {job.slot_noun} is held by {copies}"


def _keeps_before_the_end(job: Job) -> bool:
    """Returns whether the state may be kept after a step that is not the last one."""
    keeping = keeping_of(job.checkpoint_every)
    if keeping is None:
        return False
    is_due = 0 < keeping.every_steps and (keeping.every_steps < job.steps or not job.has_steps)
    return _keeps_by_time(job, keeping) or keeping.in_epochs or is_due


def _keeps_by_time(job: Job, keeping: KeepRule) -> bool:
    """Returns whether steps may be kept by the clock; a scenario takes seconds, so the default's minutes never pass."""
    return keeping.needs_time and job.checkpoint_every != Job().checkpoint_every


def _why_restarts(job: Job, faults: Mapping[int, FaultSpec], kinds: Kinds) -> str:
    """Returns why a run surely goes on from a checkpoint by itself; empty if its restarts may be used up."""
    lost = sum(_most_victims(each) for each in faults.values() if ends(each.do, kinds))
    if lost > job.restarts or any(not ends(each.do, kinds) and not _is_harmless(each) for each in faults.values()):
        return ""
    return f"{lost} workers are lost at most, and the run restarts by itself {job.restarts} times: set restarts: 0"


def _most_victims(spec: FaultSpec) -> int:
    return spec.target.count * (spec.trigger.count if isinstance(spec.trigger, Every) else 1)


def _is_at_the_end(at: At, job: Job) -> bool:
    return at.step == job.steps - 1 and at.action.op in STAGE_OPS


def _comes_first(spec: FaultSpec, at: At, faults: Mapping[int, FaultSpec], kinds: Kinds) -> bool:
    """Returns whether no other fault that ends a worker can strike before this one."""
    others = [each.trigger for each in faults.values() if each is not spec and not _is_harmless(each)]
    return all(
        (isinstance(trigger, At) and trigger.step > at.step)
        or (isinstance(trigger, After) and trigger.fault == spec.id)
        for trigger in others
    )


def _victims(spec: FaultSpec, at: At, job: Job) -> frozenset[int]:
    """Returns the workers that a fault strikes if it is the first; none if they are drawn or depend on the run."""
    target, ownership = spec.target, fresh_ownership(job)
    if target.worker is not None:
        return frozenset({target.worker})
    if target.role is not None:
        return frozenset()
    if target.count == job.slots * job.pipelines:
        return frozenset(ownership.workers())
    pipeline, stage = at.action.pipeline, at.action.stage
    if target.pipeline is not None and target.stage is not None:
        pipeline, stage = target.pipeline, target.stage
    count = target.count if target.adjacent else 1
    return frozenset(ownership.owner(pipeline, (stage + each) % job.slots) for each in range(count))


_MOST_LISTED = 8
# Ops whose presence in a slot depends on the owners of its neighbours, and on the replay of a recovery.
_OF_OTHER_PLANS = COMPUTE_OPS | SEND_OPS | RECEIVE_OPS
# The reason why a stage lacks an op before any failure.
_HALVES = f"this schedule has whole backwards: {Op.B} instead of {Op.I} and {Op.W}"
_UNDISTURBED = {
    Op.W: _HALVES,
    Op.I: _HALVES,
    Op.B: f"this schedule has halves of backwards: {Op.I} and {Op.W} instead of {Op.B}",
    Op.REDO_F: "only a recovery runs a forward again: add a fault that ends a worker in that step",
}


def check_scenario(scenario: Scenario, kinds: Kinds) -> list[Problem]:
    """Returns the problems of a scenario with a valid job; `kinds` are the known ones, by name."""
    planned = PlannedFaults(scenario.job, dict(enumerate(scenario.faults)), whole=True)
    return check_faults(planned, scenario.expect, kinds)


@dataclass(frozen=True, slots=True)
class PlannedFaults:
    """The valid parts of a scenario: its job or None, and its faults by number; `whole` if all parts are valid.

    If it is not whole, a missing fault may be one that could not be read. The program of the job may be unknown.
    """

    job: Job | None
    faults: Mapping[int, FaultSpec]
    whole: bool


def check_faults(planned: PlannedFaults, expect: Expect, kinds: Kinds, on: OnHosts = ANY_HOSTS) -> list[Problem]:
    """Returns a problem for each rule between these parts of a scenario that is broken, to run `on` hosts."""
    of_hosts = {number: each for number, each in planned.faults.items() if isinstance(each.trigger, InStep)}
    problems = [*_place(planned.faults, of_hosts, on), *_ids(planned.faults), *_moments(planned.faults)]
    for number, each in of_hosts.items():
        problems += _of_a_host(f"faults.{number}", each, on, planned.job)
    problems += _together(of_hosts, on)
    workers = {number: each for number, each in planned.faults.items() if number not in of_hosts}
    planned = replace(planned, faults=workers, whole=planned.whole and not of_hosts)
    for number, spec in planned.faults.items():
        if isinstance(spec.trigger, After):
            problems += _after(f"faults.{number}.after", spec, spec.trigger, planned)
    if planned.job is None:
        return problems
    for number, spec in planned.faults.items():
        impossible = never_striking(planned, planned.job, spec, kinds)
        problems += [replace(each, field=f"faults.{number}.{each.field}") for each in impossible]
    whole = planned.whole and planned.job.has_program and planned.job.has_steps and not problems
    problems += impossible_expectations(expect, planned.job, planned.faults if whole else None, kinds)
    return problems


def never_striking(planned: PlannedFaults, job: Job, spec: FaultSpec, kinds: Kinds) -> list[Problem]:
    """Returns the problems for which a fault can never strike; a field is a place in the fault: ``at.stage``."""
    problems = [*_target("target", spec, job)]
    problems += kind_problems(kinds[spec.do], spec.parameters, job) if spec.do in kinds else ()
    peer = spec.parameters.get("peer")
    problems += _peer(peer, planned, job, spec) if isinstance(peer, int) else ()
    if not isinstance(spec.trigger, At):
        return problems
    at = spec.trigger
    return (_limits("at", at, job) or _never_coming(at, planned, job, kinds)) + problems


def _peer(peer: int, planned: PlannedFaults, job: Job, spec: FaultSpec) -> Iterator[Problem]:
    """Yields the problem of the other end of a link, if no link of the victim leads there."""
    victim = _sole_victim(planned, job, spec)
    if peer >= job.num_workers:
        yield _beyond("peer", "worker", peer, job.num_workers, job)
        return
    if peer == victim:
        yield Problem("peer", f"another worker than {peer}, the victim", str(peer), "no link leads to itself")
        return
    is_alone = len(planned.faults) == 1 and not job.elastic
    if is_alone and (partners := _partners(victim, job)) and peer not in partners:
        expected = f"a worker that exchanges tensors with worker {victim}: {', '.join(map(str, partners))}"
        yield Problem("peer", expected, str(peer), "no frame would meet the fault")


def _partners(worker: int | None, job: Job) -> list[int]:
    """Returns the workers with which a worker exchanges tensors in a run without failures; none if it is not known."""
    if worker is None or worker >= job.num_workers or not job.has_program:
        return []
    program, ownership = initial_program(job)
    routes = routes_of(worker, program, ownership)
    met = (peer for action in program[worker] for peer, _ in rendezvous(action, worker, ownership))
    return sorted({*chain.from_iterable(routes.targets.values()), *routes.sources.values(), *met} - {worker})


def _sole_victim(planned: PlannedFaults, job: Job, spec: FaultSpec) -> int | None:
    """Returns the worker that a fault strikes, where that is known before the run; None otherwise."""
    if spec.target.worker is not None:
        return spec.target.worker
    at = spec.trigger
    if spec.target != Target() or not isinstance(at, At) or len(planned.faults) > 1 or not job.has_program:
        return None
    if _limits("at", at, job):
        return None
    return initial_program(job)[1].owner(at.action.pipeline, at.action.stage)


def _never_coming(at: At, planned: PlannedFaults, job: Job, kinds: Kinds) -> list[Problem]:
    """Returns the problem of a moment whose action can never come; without a program none is known."""
    if not job.has_program:
        return []
    own = own_actions(*initial_program(job), (at.action.pipeline, at.action.stage))
    return _action("at", at.action, own, job, _Failures(at, planned, kinds))


def _ids(faults: Mapping[int, FaultSpec]) -> Iterator[Problem]:
    numbers: dict[str, int] = {}
    for number, spec in faults.items():
        trigger = spec.trigger
        many = range(1, trigger.count + 1) if isinstance(trigger, Every) else ()
        for name in (spec.id, *(f"{spec.id}-{each}" for each in many)):
            if name in numbers:
                hint = f"faults.{numbers[name]} has it" if numbers[name] != number else ""
                yield Problem(f"faults.{number}.id", "an id of its own", repr(name), hint)
            numbers.setdefault(name, number)


def _moments(faults: Mapping[int, FaultSpec]) -> Iterator[Problem]:
    numbers: dict[At, int] = {}
    for number, spec in faults.items():
        if isinstance(spec.trigger, At):
            if spec.trigger in numbers:
                hint = "one fault may have several victims: target {count: 2}"
                expected = f"another moment than faults.{numbers[spec.trigger]}"
                yield Problem(f"faults.{number}.at", expected, str(spec.trigger), hint)
            numbers.setdefault(spec.trigger, number)


def own_actions(program: Program, ownership: Ownership, slot: Slot) -> tuple[Action, ...]:
    """Returns the actions of a slot at its owner, in order; none if there is no such slot."""
    if slot not in ownership.grid.slots():
        return ()
    return tuple(each for each in program[ownership.owner(*slot)] if (each.pipeline, each.stage) == slot)


def _limits(place: str, at: At, job: Job) -> list[Problem]:
    action = at.action
    limits = {"step": (at.step, job.steps)} if job.has_steps else {}
    limits |= {"pipeline": (action.pipeline, job.pipelines), "stage": (action.stage, job.slots)}
    if action.op not in STAGE_OPS:
        limits["microbatch"] = (action.microbatch, job.program_microbatches)
    return [
        _beyond(f"{place}.{name}", name, value, limit, job)
        for name, (value, limit) in limits.items()
        if not 0 <= value < limit
    ]


def a_worker(job: Job) -> str:
    """Returns the numbers that a worker of a job can have, in words."""
    return f"a worker from 0 to {job.num_workers - 1}"


def _beyond(place: str, name: str, value: int, limit: int, job: Job) -> Problem:
    noun, has = (job.slot_noun, job.cut) if name == "stage" and job.blocks > 1 else (name, limit)
    waits = name == "worker" and limit <= value < limit + job.standby
    hint = f"worker {value} waits at first: name a {job.slot_noun} of its own" if waits else f"the job has {has}"
    return Problem(place, f"a {noun} from 0 to {limit - 1}", str(value), hint)


def changes_by(at: At) -> int:
    """Returns the last step that may run the usual program after a kill; at the end of a step, others begin another."""
    return at.step + (at.action.op in STAGE_OPS)


@dataclass(frozen=True, slots=True)
class _Failures:
    """The faults other than the one `at` a moment: they may end a worker before it."""

    at: At
    planned: PlannedFaults
    kinds: Kinds

    def before(self, step: int) -> bool:
        """Returns whether one may strike before this step; a fault that could not be read may strike at any time."""
        triggers = [each.trigger for each in self.planned.faults.values() if ends(each.do, self.kinds)]
        others = [each for each in triggers if each != self.at]
        return not self.planned.whole or any(not isinstance(each, At) or each.step < step for each in others)

    def surely_before(self, step: int) -> bool:
        """Returns whether a worker is lost, and its recovery over, before this step begins."""
        return any(changes_by(each) < step for each in self._kills())

    def recovered_in(self, step: int) -> bool:
        """Returns whether a recovery may finish this step."""
        kills = self._kills()
        triggers = [each.trigger for each in self.planned.faults.values() if ends(each.do, self.kinds)]
        if all(each in (self.at, *kills) for each in triggers):
            return not self.planned.whole or any(each.step <= step <= changes_by(each) for each in kills)
        return self.before(step + 1)  # kinds other than a kill end their victim at an unknown time

    def _kills(self) -> list[At]:
        """Returns the moments of the other faults that end a worker at once."""
        triggers = [each.trigger for each in self.planned.faults.values() if each.do in AT_ONCE]
        return [each for each in triggers if isinstance(each, At) and each != self.at]


def _action(place: str, action: Action, own: Collection[Action], job: Job, failures: _Failures) -> list[Problem]:
    """Returns the problem of an action that can never come; `own` are its slot's actions before any failure."""
    op, step = action.op, failures.at.step
    if op is Op.CHECKPOINT:
        return _checkpoint(f"{place}.step", job, step)
    if op is Op.HEAL:
        return _heal(f"{place}.action", job, step, can_follow=failures.before(step))
    if failures.at.is_half and failures.surely_before(step):
        return [Problem(f"{place}.action", "an action of a step after a failure", repr(op.value), WHOLE_AFTERWARDS)]
    why = _why_never(op, action.stage, job)
    can_come = failures.recovered_in(step) if op is Op.REDO_F else failures.before(step + 1)
    if action in own or (not why and op in _OF_OTHER_PLANS and can_come):
        return []
    if numbers := sorted(each.microbatch for each in own if each.op is op):
        listed = ", ".join(map(str, numbers[:_MOST_LISTED])) + ", ..." * (len(numbers) > _MOST_LISTED)
        return [Problem(f"{place}.microbatch", f"a microbatch with {op}: {listed}", str(action.microbatch), why)]
    name = "a schedule of one's own" if is_text(job.schedule) else f"schedule {job.schedule}"
    hint = why or _UNDISTURBED.get(op) or f"it has {', '.join(dict.fromkeys(each.op.value for each in own))}"
    return [
        Problem(f"{place}.action", f"an action of {job.slot_noun} {action.stage} with {name}", repr(op.value), hint)
    ]


def _why_never(op: Op, stage: int, job: Job) -> str:
    """Returns the reason why a stage lacks this op, for some microbatches or all, also after failures."""
    other = stage + OP_TABLE[op].peer
    if other < 0:
        return f"the first {job.slot_noun} has no {job.slot_noun} before it: no {op}"
    if other == job.slots:
        return f"the last {job.slot_noun} has no {job.slot_noun} after it: no {op}"
    if op is Op.STREAM:
        return f"log_every is {job.log_every}, and after the last backward the log is sent"
    if op in SHARD_OPS and not job.fsdp:
        return f"without fsdp there is no {op}"
    return ""


def _checkpoint(place: str, job: Job, step: int) -> list[Problem]:
    """A stage is written for a checkpoint behind the steps that the job keeps; those by time are not known before."""
    keeping = keeping_of(job.checkpoint_every)
    is_last = step == job.steps - 1 or not job.has_steps
    if keeping is None or _keeps_by_time(job, keeping) or keeping.in_epochs or keeping.is_kept(step, is_last):
        return []
    return [Problem(place, "a step that is kept", str(step), f"checkpoint_every is {job.checkpoint_every!r}")]


def _heal(place: str, job: Job, step: int, *, can_follow: bool) -> list[Problem]:
    """A slot is healed in the first step after one in which a worker was lost, if the job has shadows."""
    if job.redundancy == "none":
        return [Problem(place, "an action that this job has", "'HEAL'", "with redundancy none there are no shadows")]
    if can_follow:
        return []
    hint = f"a shadow is healed only after a failure: add a fault that ends a worker before step {step}"
    return [Problem(place, "an action of a step after a failure", "'HEAL'", hint)]


def _after(place: str, spec: FaultSpec, after: After, planned: PlannedFaults) -> list[Problem]:
    by_id = {each.id: each for each in planned.faults.values()}
    if after.fault not in by_id:
        if not planned.whole:
            return []
        ids = [each for each in by_id if each != spec.id]
        hint = nearest(after.fault, ids) or (f"there is {', '.join(ids)}" if ids else "there is no other fault")
        return [Problem(f"{place}.fault", "the id of another fault", repr(after.fault), hint)]
    if isinstance(by_id[after.fault].trigger, Every):
        hint = "the faults of `every` are drawn before the run: write the first fault with `at`"
        return [Problem(f"{place}.fault", "a fault with `at` or `after`", repr(after.fault), hint)]
    chain = [spec.id]
    trigger: object = after
    while isinstance(trigger, After) and trigger.fault in by_id:
        chain.append(trigger.fault)
        if trigger.fault == spec.id:
            return [Problem(f"{place}.fault", "a fault that does not wait for this one", " -> ".join(chain))]
        if len(chain) > len(by_id) + 1:
            break  # a cycle of other faults, which is reported at those
        trigger = by_id[trigger.fault].trigger
    return []


def _target(place: str, spec: FaultSpec, job: Job) -> Iterator[Problem]:
    target, trigger = spec.target, spec.trigger
    for name, value, limit in (
        ("pipeline", target.pipeline, job.pipelines),
        ("stage", target.stage, job.slots),
        ("worker", target.worker, job.num_workers),
    ):
        if value is not None and not 0 <= value < limit:
            yield _beyond(f"{place}.{name}", name, value, limit, job)
    if (target.pipeline is None) != (target.stage is None):
        name = "pipeline" if target.pipeline is None else "stage"
        yield Problem(place, "both pipeline and stage", f"no {name}", f"add {name}: 0")
    named = _named(target)
    if len(named) > 1:
        yield Problem(place, "one of a slot, a worker and a role", " and ".join(named))
    one_only = target.worker is not None or target.role not in (None, "random")
    if isinstance(trigger, Every) and one_only:
        yield Problem(place, "role random or a slot with `every`", " and ".join(named), "a worker dies but once")
    if target.role == "recoverer" and isinstance(trigger, At):
        hint = "it recovers from a fault: use `after`"
        yield Problem(f"{place}.role", "random, shadow or neighbour with `at`", "'recoverer'", hint)
    yield from _count(place, spec, job, one_only=one_only)


def _count(place: str, spec: FaultSpec, job: Job, *, one_only: bool) -> Iterator[Problem]:
    target = spec.target
    most = job.slots if target.adjacent else job.slots * job.pipelines
    if target.count > most:
        where = f"{job.slot_noun}s in a pipeline" if target.adjacent else "slots"
        yield Problem(f"{place}.count", f"a whole number <= {most}", str(target.count), f"there are {most} {where}")
    if target.count == 1 and target.adjacent is not None:
        yield Problem(f"{place}.adjacent", "a count of 2 or more with it", "count 1")
    first_is_known = isinstance(spec.trigger, (At, Every)) or _named(target)
    if target.count > 1 and (one_only or not first_is_known):
        yield Problem(f"{place}.count", "1 with a worker or such a role", str(target.count), "name a slot, or random")


def _named(target: Target) -> list[str]:
    words = ["a slot"] if target.pipeline is not None or target.stage is not None else []
    words += ["a worker"] if target.worker is not None else []
    return words + ([f"role {target.role}"] if target.role is not None else [])


# Faults of hosts. One that surely ends the run, because etcd loses its majority or no host is left, is refused.


def _place(faults: Mapping[int, FaultSpec], of_hosts: Mapping[int, FaultSpec], on: OnHosts) -> Iterator[Problem]:
    """Yields the problem of faults that this place cannot have: hosts are struck on a bed, where nothing else is."""
    if of_hosts and on.number == 0:
        hint = "hosts to break are made by: bamboo inject SCENARIO --hosts 3"
        yield Problem("faults", "no faults of hosts in a run on one host", "some", hint)
    if len(faults) > len(of_hosts) and (of_hosts or on.number):
        hint = "on several hosts a worker is struck from outside: do: kill-worker"
        yield Problem("faults", "no other faults with hosts to break", "some", hint)


def _of_a_host(place: str, spec: FaultSpec, on: OnHosts, job: Job | None) -> Iterator[Problem]:
    step = spec.trigger.step if isinstance(spec.trigger, InStep) else 0
    target = spec.target
    if job is not None and (step < 1 or (job.has_steps and step >= job.steps)):
        last = job.steps - 1 if job.has_steps else "the last"
        hint = "" if step else "a run that loses a host before its first commit may not continue"
        yield Problem(f"{place}.at.step", f"a step from 1 to {last}", str(step), hint)
    if on.number and target.host and (number := number_of(target.host)) is not None and number >= on.number:
        yield Problem(f"{place}.target.host", f"a host from h0 to h{on.number - 1}", repr(target.host))
    if target.worker is not None and job is not None and target.worker >= job.num_workers:
        yield Problem(f"{place}.target.worker", a_worker(job), str(target.worker))


def _together(faults: Mapping[int, FaultSpec], on: OnHosts) -> Iterator[Problem]:
    """Yields the problems of faults of which each alone would leave enough hosts and members."""
    named: dict[str, int] = {}
    lost = members = 0
    for number, fault in faults.items():
        place, host = f"faults.{number}", fault.target.host or OTHER
        if (host_number := number_of(host)) is not None:
            if host in named:
                yield Problem(
                    f"{place}.target.host", "another host", repr(host), f"faults.{named[host]} strikes it already"
                )
            named.setdefault(host, number)
        lost += fault.do in LOSES_A_HOST
        if on.number and fault.do in LOSES_A_HOST and lost == on.number:
            yield Problem(f"{place}.do", "a host that is left", repr(fault.do), f"there are {on.number}")
        members += (is_member := fault.do in LOSES_A_MEMBER and (host_number is None or host_number < MEMBERS))
        if is_member and members == 2:
            hint = f"etcd has {MEMBERS} members, on h0 to h{MEMBERS - 1}: strike h{MEMBERS}, or an agent"
            yield Problem(f"{place}.do", "a second fault that leaves etcd its majority", repr(fault.do), hint)
