"""The end of a step at one worker: reductions, log entries, heals, votes and optimizer steps.

Rules: only the optimizer step changes an accumulator. A log entry is complete or absent. A reduction that runs again
after a failure drops the earlier entries of its slots, because some replicas may lack them. The fence does not
interrupt a worker between the commit and its last optimizer step, so all its replicas have one version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from engine.codec.messages import in_messages
from engine.core.action import Action
from engine.core.checks.trajectory import LoadedMarks
from engine.core.job.job import Job, is_due
from engine.core.job.torch_parts import LR_SCHEDULES
from engine.core.job.update_rules import monitored_by
from engine.core.messages import AuditMessage, CommitMessage
from engine.core.ownership import Ownership, Slot
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.compute_times import ComputeTimes
from engine.core.program.dependencies import Routes
from engine.core.value import Kind, Value
from engine.models.data import Data
from engine.runtime.checkpoint.writer import CheckpointWriter
from engine.runtime.process.control import Control
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder
from engine.runtime.stage.gradient_log import (
    LogEntry,
    laid_out,
    losses_of,
    post_entry,
    send_entry,
    take_entry,
    take_step,
    unscaled,
)
from engine.runtime.stage.memory_watch import stage_bytes
from engine.runtime.stage.optimizer import learning_rates
from engine.runtime.stage.replicas import Replicas, hash_rows
from engine.runtime.stage.sharded_stages import ShardedStages
from engine.runtime.stage.stage import Use, later_uses, sum_in_layer_order, uses_of
from engine.runtime.stage.state_transfer import send_state, take_state
from engine.runtime.transport.transfers import ReduceGroup, gather_over_pipelines, mean_over_pipelines
from engine.runtime.transport.transport import (
    AsidePurpose,
    Border,
    ProgramKey,
    ProgramPurpose,
    TensorSpec,
    Transport,
    TransportBackend,
    aside_key,
    program_key,
)
from engine.runtime.worker.failpoints import Failpoints

# The parts of a worker that stay the same for a whole job; training, planning and validation share them.


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The fixed parts of one worker; `starts` has the first layer of each stage, `borders` one border per stage."""

    job: Job
    worker: int
    starts: tuple[int, ...]
    borders: tuple[Border, ...]
    replicas: Replicas
    data: Data
    control: Control
    recorder: Recorder
    board: ProgressBoard
    failpoints: Failpoints
    backend: TransportBackend
    shards: ShardedStages | None = None
    checkpoints: CheckpointWriter | None = None
    has_hosts: bool = False  # the run has several hosts
    outputs: str = ""  # the folder of the outputs of a prediction


_STEPS_OF_SIZES = 2  # of a program; before the first step of all an optimizer has no state


class StepEnd:
    """The reduced gradients and log entries of one worker in the open step."""

    def __init__(self, context: WorkerContext):
        self.context = context
        self.worker = context.worker
        self.replicas = context.replicas
        self.commit = CommitMessage(-1, 1.0, "step")  # of the step whose optimizers run
        self._rate_of, self._monitored = learning_rates(context.job), monitored_by(asdict(context.job))
        self._tells_rate = not self._monitored and context.job.lr_schedule not in LR_SCHEDULES
        self.logged: dict[Slot, LogEntry] = {}
        self._reduced: dict[Slot, LogEntry] = {}
        self._tied: dict[tuple[int, Use], Tensor] = {}  # received gradients, by pipeline and use
        self._votes: dict[Slot, SlotVote] = {}  # until the last replica here is ready
        self._heals_ns: dict[Slot, int] = {}  # of replicas that were healed in the open step
        self._posted: set[Slot] | None = None  # log entries whose receives were posted ahead
        self._uses = uses_of(context.replicas.model.ties, context.starts)

    def enter(self, plane: Transport, ownership: Ownership, routes: Routes) -> None:
        """Sets the plane, the ownership and the routes of the next program, in which all transfers run again."""
        self._plane = plane
        self._ownership = ownership
        self._routes = routes
        self._reduced, self._tied, self._votes, self._heals_ns = {}, {}, {}, {}
        self._elsewhere = sorted(self._tied_elsewhere(), key=_by_stage)
        self._coming = sorted((stage, pipeline) for kind, pipeline, stage, _ in routes.sources if kind is Kind.LOGGED)
        self._posted = None
        self._num_posted = 0
        self.bytes_healed = 0
        self._tells_sizes = _STEPS_OF_SIZES

    def clear(self) -> None:
        """Drops the reduced gradients and log entries of the open step."""
        self.logged, self._reduced, self._tied, self._votes = {}, {}, {}, {}
        self._posted = None
        self._num_posted = 0

    def entries(self) -> Iterator[tuple[Slot, LogEntry]]:
        """Yields the means and the log entries of the open step."""
        yield from self._reduced.items()
        yield from self.logged.items()

    def _targets(self, kind: Kind, slot: Slot) -> tuple[int, ...]:
        return self._routes.targets.get(Value(kind, *slot), ())

    def _source(self, kind: Kind, slot: Slot) -> int:
        return self._routes.sources[Value(kind, *slot)]

    def _key(self, purpose: ProgramPurpose, slot: Slot, index: int = 0) -> ProgramKey:
        return program_key(self._ownership.grid, purpose, *slot, index)

    def _owns(self, slot: Slot) -> bool:
        return self._ownership.owner(*slot) == self.worker

    def heal(self, action: Action, step: int) -> None:
        """Runs a HEAL: the owner sends the state of a slot to its new shadows, a new shadow fills its replica."""
        slot = (action.pipeline, action.stage)
        key = aside_key(self._ownership.grid, AsidePurpose.HEAL, *slot)
        if self._owns(slot):
            before = self._plane.bytes_sent
            send_state(self._plane.aside, self._targets(Kind.STATE, slot), key, self.replicas.stages[slot])
            self.bytes_healed += self._plane.bytes_sent - before
        else:
            self.replicas.await_heal(slot)
            self._heals_ns[slot] = take_state(
                self._plane.aside, self._source(Kind.STATE, slot), key, self.replicas.stages[slot]
            )
            self.replicas.healed(slot)
            self.tell_new(slot, step - 1)

    def tell_new(self, slot: Slot, after: int) -> None:
        """Sends the hashes of a new replica after a step: the one host that knows those of its owner may be lost."""
        job = self.context.job
        if self.context.has_hosts and after >= 0 and is_due(job.audit, after, False):
            for rows in in_messages(list(hash_rows(self.replicas.stages[slot], self.replicas.device))):
                self.context.control.send(AuditMessage(after, slot[0], rows))

    def reduce(self, action: Action, step: int) -> None:
        """Reduces a stage over the pipelines, for all slots of it owned here; sends the gradients of tied uses."""
        self._post_tied(below=action.stage)
        group = ReduceGroup(self._plane.in_order, self._ownership, self.worker, action.stage)
        owned = {each: self.replicas.stages[each, action.stage] for each in group.pipelines(self.worker)}
        losses = {pipeline: losses_of(replica) for pipeline, replica in owned.items()}
        endings = gather_over_pipelines(
            group, {pipeline: (*replica.copy_buffers(), *losses[pipeline]) for pipeline, replica in owned.items()}
        )
        means = mean_over_pipelines(
            group,
            {
                pipeline: [each for named in replica.gradients().values() for each in named.values()]
                for pipeline, replica in owned.items()
            },
        )
        num_losses = len(losses[action.pipeline])
        num_buffers = len(endings[0]) - num_losses
        entry = LogEntry(
            laid_out(owned[action.pipeline], means),
            tuple(ending[:num_buffers] for ending in endings),
            tuple(ending[num_buffers:] for ending in endings) if num_losses else (),
        )
        for pipeline in owned:
            self._reduced[pipeline, action.stage] = entry
            self.logged.pop((pipeline, action.stage), None)
            self._send_tied((pipeline, action.stage))

    def _send_tied(self, slot: Slot) -> None:
        """Sends the gradients of the tied parameters of a slot to the owners of the other uses."""
        pipeline, stage = slot
        for uses in self._uses:
            takers = {self._ownership.owner(pipeline, use.stage) for use in uses}
            for use in uses:
                if use.stage == stage:
                    for target in self._targets(Kind.REDUCED, slot):
                        if target in takers:
                            gradient = self._reduced[slot].gradients[use.layer][use.name]
                            self._plane.in_order.send(target, self._tie_key(pipeline, use), (gradient,))

    def _tied_elsewhere(self) -> Iterator[tuple[int, Use]]:
        """Yields the uses, with their pipelines, whose gradients come from other workers in the program."""
        for pipeline in range(self._ownership.grid.pipelines):
            for uses in self._uses:
                if any(self._owns((pipeline, use.stage)) for use in uses):
                    for use in uses:
                        if Value(Kind.REDUCED, pipeline, use.stage) in self._routes.sources:
                            yield pipeline, use

    def _post_tied(self, below: int) -> None:
        """Posts the receives of tied uses in stages below: a worker sends them when it has reduced their stage."""
        for pipeline, use in self._elsewhere[self._num_posted :]:
            if use.stage >= below:
                break
            self._num_posted += 1
            mine = next(each for each in self._uses[use.tie] if self._owns((pipeline, each.stage)))
            like = self.replicas.stages[pipeline, mine.stage].weights[mine.layer][mine.name]
            source = self._source(Kind.REDUCED, (pipeline, use.stage))
            self._plane.in_order.post(source, self._tie_key(pipeline, use), (TensorSpec.of(like).as_gradient(),))

    def _tie_key(self, pipeline: int, use: Use) -> ProgramKey:
        index = sum(len(uses) for uses in self._uses[: use.tie]) + use.order
        return self._key(ProgramPurpose.TIE, (pipeline, use.stage), index)

    def log(self, action: Action, step: int) -> None:
        """Runs a LOG: the owner completes the entry of a slot and sends it to the shadows; a shadow receives it."""
        self._post_tied(below=self._ownership.grid.stages)
        slot = (action.pipeline, action.stage)
        key = self._key(ProgramPurpose.LOG, slot)
        if not self._owns(slot):
            posted = self._post_logs()
            source, replica = self._source(Kind.LOGGED, slot), self.replicas.stages[slot]
            self.logged[slot] = take_entry(self._plane.in_order, source, key, replica, slot in posted)
            return
        entry = self.logged.get(slot) or self._with_tied_sums(slot)
        send_entry(self._plane.in_order, self._targets(Kind.LOGGED, slot), key, entry)
        self.logged[slot] = entry

    def _post_logs(self) -> Collection[Slot]:
        """Posts the receives of the entries that owners send, in their order, up to one of several messages.

        The entries then arrive together. It takes time, so it follows the last entry that is sent: others may wait for
        that.
        """
        if self._posted is None:
            self._posted = set()
            for stage, pipeline in self._coming:
                slot = (pipeline, stage)
                self._posted.add(slot)
                source, key = self._source(Kind.LOGGED, slot), self._key(ProgramPurpose.LOG, slot)
                if not post_entry(self._plane.in_order, source, key, self.replicas.stages[slot]):
                    break
        return self._posted

    def _with_tied_sums(self, slot: Slot) -> LogEntry:
        pipeline, stage = slot
        entry = self._reduced[slot]
        gradients = {layer: dict(named) for layer, named in entry.gradients.items()}
        for uses in self._uses:
            mine = [use for use in uses if use.stage == stage]
            if mine:
                total = sum_in_layer_order([self._gradient_of(pipeline, use) for use in uses])
                for use in mine:
                    gradients[use.layer][use.name] = total
        scale = self.replicas.stages[slot].loss_scale
        return replace(entry, gradients=gradients if scale == 1.0 else unscaled(gradients, scale))

    def _gradient_of(self, pipeline: int, use: Use) -> Tensor:
        """Returns the reduced gradient of one use of a tied parameter; receives it if another worker owns the use."""
        slot = (pipeline, use.stage)
        if self._owns(slot):
            return self._reduced[slot].gradients[use.layer][use.name]
        if (pipeline, use) not in self._tied:
            source, key = self._source(Kind.REDUCED, slot), self._tie_key(pipeline, use)
            (self._tied[pipeline, use],) = self._plane.in_order.take(source, key)
        return self._tied[pipeline, use]

    def vote(self, action: Action, step: int, loaded: LoadedMarks, times: ComputeTimes) -> None:
        """Votes for the commit: this replica has its log entry, and has `loaded` microbatches with these marks.

        The owner adds the gradient norms, the loss and the times. The last replica here sends the votes of all.
        """
        slot = (action.pipeline, action.stage)
        entry, microbatches, marks = self.logged[slot], tuple(loaded), tuple(loaded.values())
        vote = SlotVote(*slot, loaded=microbatches, marks=marks, heal_ns=self._heals_ns.pop(slot, 0))
        if self._owns(slot):
            with self.replicas.device.waiting():
                norms = dict(entry.norms(later_uses(self.replicas.model.ties)))
                loss = entry.loss(action.pipeline)
            sizes = tuple(stage_bytes(self.replicas.stages[slot])) if self._tells_sizes else ()
            vote = replace(vote, layers=tuple(norms), squared_norms=tuple(norms.values()), loss=loss)
            lr = self._rate_of(step) if self._tells_rate and loss is not None else None
            vote = replace(vote, took_ns=times.of(slot), sizes=sizes, lr=lr, passed_ns=times.passed(slot))
        self._votes[slot] = vote
        if len(self._votes) == len(self._ownership.held_by(self.worker)):
            for votes in in_messages(self._votes.values()):
                self.context.control.send(VoteMessage(self.context.control.accepted, step, votes))
            self._tells_sizes = max(0, self._tells_sizes - 1)

    def take_step(self, action: Action, step: int) -> None:
        """Takes the optimizer step of one replica from its log entry."""
        slot = (action.pipeline, action.stage)
        commit, lr = self.commit, self.commit.lr
        if lr < 0:
            figure = (commit.monitored[0] if commit.monitored else None,) if self._monitored else ()
            lr = self._rate_of(step, *figure)
        take_step(self.replicas.stages[slot], self.logged[slot], lr, commit.clip_factor)


def _by_stage(awaited: tuple[int, Use]) -> tuple[int, int, int, int]:
    """Returns the place of a use, with its pipeline, in the order in which the owner of its stage sends."""
    pipeline, use = awaited
    return use.stage, pipeline, use.tie, use.order
