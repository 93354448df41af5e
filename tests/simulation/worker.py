"""The driver of the shipped worker in virtual time: it carries out each output with hashes in place of tensors.

Rules: the main thread takes a message when it waits, and one that interrupts also between two actions. The planner
thread, the thread that forms a group, and the control thread work beside it. A fault may strike before and after each
output, and a stopped process carries out the rest when it wakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from engine.core import messages
from engine.core.checkpoint_rules import KeptMessage
from engine.core.manifest import Part
from engine.core.message_kinds import ToWorker
from engine.core.messages import NextGroupMessage
from engine.core.ownership import Ownership, Slot
from engine.core.program.inventory import (
    InventoryMessage,
    PlanMessage,
    PlannedMessage,
    PrepareMessage,
    PreparePartMessage,
)
from engine.core.program.planner import EpochPlan
from engine.core.protocol import worker_inputs as inputs
from engine.core.protocol import worker_state as outputs
from engine.core.protocol.state import LEAST_QUIET_NS
from engine.core.protocol.worker_inputs import Inbox, arrived, taken
from engine.core.protocol.worker_machine import step
from engine.core.protocol.worker_state import Mode, WorkerState
from tests.simulation.actions import take_arrived
from tests.simulation.case import PREDICTED, Violation
from tests.simulation.compiled import Compiled
from tests.simulation.joining import Joining
from tests.simulation.plans import followed, next_program, planned, read, shares_of
from tests.simulation.replica import adopted, inventory_of, tell_hashes

if TYPE_CHECKING:
    from tests.simulation.world import World

Answer = inputs.Input | None


class Worker(Joining):
    """One worker; `work` is the output whose answer is due."""

    def __init__(self, world: World, number: int):
        super().__init__(world, number)
        self.state = WorkerState()
        self.mail = Inbox()
        self.answers: list[inputs.Input] = []  # of other threads, for the main thread
        self.work: outputs.Output | None = None
        self.entered = 0  # the epoch of its program
        self.holds = ""
        self.ready: Compiled | None = None
        self.thinks_until = 0  # in the planner thread
        self.next_step: tuple[int, Any] = (0, None)  # when it is planned, and what makes it
        self.copied_at = 0  # its last share of a checkpoint
        self.writes = 0  # shares that are not on disk
        self.attempts: dict[int, inputs.GroupKey] = {}  # to form groups of coming epochs, by number of the group
        self.is_reporting = False  # that all is done, once all is on disk

    @property
    def epoch(self) -> int:
        """The epoch that it has entered."""
        return self.state.epoch

    def heartbeat(self) -> messages.HeartbeatMessage:
        """Returns the answer to a ping; without news, it has the numbers of transfers in the group of this epoch."""
        at = (self.epoch, self.step, self.moments, self.busy)
        quiet_ns = self.world.now - self.woken_ns
        if not self.world.links.counts or self.busy or quiet_ns < LEAST_QUIET_NS or self.entered != self.epoch:
            return messages.HeartbeatMessage(*at)
        awaited, counts = self.awaited(), []
        for peer in self.state.members:
            posted = [key for key, source in awaited.items() if source == peer]
            taken = self.taken[peer]
            received = taken + sum(key in self.inbox for key in posted)
            counts.append((peer, self.sent[peer], taken + len(posted), received))
        return messages.HeartbeatMessage(*at, quiet_ns, tuple(counts))

    def has_planned(self, epoch: int) -> bool:
        """Whether it has made the plan of an epoch."""
        return self.state.plan is not None and self.state.plan.document.epoch == epoch

    # Messages

    def told(self, message: ToWorker) -> None:
        """Takes a message in, in the control thread."""
        if self.puts_off(self.told, message):
            return
        if isinstance(message, PrepareMessage | PreparePartMessage | NextGroupMessage):
            self.feed(inputs.ProtocolMessage(message))
            return
        if isinstance(message, messages.PartitionMessage | messages.BordersMessage):
            self.joins(message)
            return
        self.mail = arrived(self.mail, message)
        self.hurry()

    def hurry(self) -> None:
        """Wakes the main thread, which may take a moment."""
        self.has_news = True
        if not self.busy:
            lag = self.world.lag()
            if lag:
                self.world.push(lag, self.wake)
            else:
                self.wake()

    def attends(self) -> bool:
        """Gives the machine what it waits for, or what interrupts it; returns whether there was something."""
        mail = self.mail
        if self.work is not None:
            if not mail.is_urgent or not isinstance(self.work, _INTERRUPTIBLE):
                return False
            self.runs = False
            if isinstance(self.work, outputs.Validate):
                self.world.turns.add("validation is interrupted")
        elif not mail.waiting or ((self.answers or self.state.awaits_group) and not mail.is_urgent):
            if not self.answers:
                return False
            self.feed(self.answers.pop(0))
            return True
        message, self.mail = taken(mail)
        self.answer(inputs.ProtocolMessage(message))
        return True

    def answer(self, given: inputs.Input) -> None:
        """Gives the machine the answer to its work."""
        self.work = None
        self.has_news = True
        self.feed(given)

    def feed(self, given: inputs.Input) -> None:
        """Gives the machine an input, and carries out its outputs."""
        self.state, found = step(self.state, given)
        self.carry_out(found)

    def carry_out(self, found: tuple[outputs.Output, ...]) -> None:
        """Carries out outputs in order."""
        if self.puts_off(self.carry_out, found):
            return
        for place, output in enumerate(found):
            given = _DO[type(output)](self, output)
            if not self.alive:
                return
            if given is not None:
                self.answer(given)
                return
            if self.paused:
                self.overdue.insert(0, (self.carry_out, (found[place + 1 :],)))
                return

    def later(self, delay: int, what: Callable[..., None], *words: Any) -> None:
        """Keeps the main thread busy for a time."""
        self.busy = True
        self.world.push(delay, self.ends, what, *words)

    def ends(self, what: Callable[..., None], *words: Any) -> None:
        """Ends what kept the main thread busy."""
        if not self.puts_off(self.ends, what, *words):
            self.busy = False
            what(*words)
            self.wake()

    def program_ended(self) -> None:
        """Tells the machine that the program has run."""
        self.answer(inputs.ProgramEnded())

    def transfer_failed(self, peer: int | None) -> None:
        """Tells the machine of a failed transfer in its program."""
        if isinstance(self.work, outputs.Run):
            self.runs = False
            self.world.turns.add("transfer fails")
            self.answer(inputs.TransferFailed("a transfer failed", peer))

    # Outputs

    def say(self, output: outputs.SendMessage) -> Answer:
        """Sends a message."""
        point = _SAID.get(type(output.message))
        self.world.say(self.number, output.message)
        if point:
            self.come_to(point)
        return None

    def mark(self, output: outputs.MarkPhase) -> Answer:
        """Comes to a phase of a recovery."""
        self.come_to(output.phase)
        return None

    def count(self, output: outputs.CountHeld) -> Answer:
        """Lists what it holds."""
        take_arrived(self)
        if self.leaves:
            self.away = set()  # to send them it takes all back
        self.holds = inventory_of(self, offers=self.leaves)
        if self.number not in self.world.members:
            self.world.turns.add("waiting worker becomes a member")
        self.world.judge.inventoried(self, self.holds)
        return inputs.InventoryCounted(self.holds, self.ownership.grid.places(read(self.holds).whole))

    @property
    def leaves(self) -> bool:
        """Whether it leaves, with time to send residuals."""
        message = self.state.message
        return message is not None and dict(message.left_ms).get(self.number, 0) > 0

    def begin_at(self, output: outputs.BeginAt) -> Answer:
        """Goes on to this step."""
        if self.replicas:
            raise Violation(f"worker {self.number} skips step {self.step}, and holds {[*self.replicas]}")
        self.step = output.step
        self.values, self.lasting, self.away = {}, set(), set()
        return None

    def leave_group(self, output: outputs.LeaveGroup) -> Answer:
        """Leaves its group; its peers may see a broken link before they know of the epoch."""
        if self.world.spread:
            self.world.links.break_all(self)
        return None

    def form_group(self, output: outputs.FormGroup) -> Answer:
        """Joins the group of an epoch."""
        group = _number_of(output.epoch.epoch)
        self.join(group)
        self.world.links.join(self, group, _listed(output.epoch.members))
        return None

    def form_next(self, output: outputs.FormNextGroup) -> Answer:
        """Forms the group of a coming epoch in a thread."""
        told = output.order
        group = _number_of(told.epoch, told.number)
        self.attempts[group] = inputs.GroupKey(told.epoch, told.number)
        self.world.links.join(self, group, told.members)
        self.come_to("form next")
        return None

    def leave_next(self, output: outputs.LeaveNextGroups) -> Answer:
        """Gives up groups of coming epochs."""
        for key in output.keys:
            group = _number_of(*key)
            self.attempts.pop(group, None)
            if self.next_groups.pop(group, None) is not None:
                self.world.links.break_all(self, (group,))
            self.world.turns.add("next group is given up")
        return None

    def enter_group(self, output: outputs.EnterNextGroup) -> Answer:
        """Enters the group that was formed meanwhile."""
        if self.runs:
            raise Violation(f"worker {self.number} leaves its group inside a program")
        self.world.turns.add("next group is entered")
        group = _number_of(*output.key)
        del self.attempts[group]
        self.enter_next(group)
        self.come_to("enter next")
        return None

    def forms(self, group: int) -> bool:
        """Whether it forms a group."""
        return group == self.group or group in self.attempts

    def formed(self, group: int, failed_with: int | None) -> None:
        """Tells the main thread that its group is formed, or is not because of a peer."""
        if self.puts_off(self.formed, group, failed_with):
            return
        if (key := self.attempts.get(group)) is not None:
            if failed_with is None:
                self.next_groups[group] = set()
            else:
                self.world.turns.add("next group cannot be formed")
            self.feed(inputs.NextGroupFormed(key, "" if failed_with is None else "no group"))
            self.come_to("formed next")
            return
        if group != self.group:
            return
        self.is_formed = failed_with is None or group == 0
        if group == 0:
            self.formed_first()
        elif failed_with is None:
            self.answers.append(inputs.GroupFormed(group // _MOST_ATTEMPTS))
            self.hurry()
        else:
            self.world.turns.add("group cannot be formed")
            failure = inputs.TransferFailed("no group", failed_with)
            self.answers.append(inputs.GroupFormed(group // _MOST_ATTEMPTS, failure))
            self.hurry()

    def joined(self) -> None:
        """Tells the machine that this worker has joined."""
        waits = self.number not in self.world.members
        how = {"waits": waits, "joins": self.world.is_eager(self.number)}
        self.feed(
            inputs.StagesBuilt(self.number, self.ownership, self.case.validate_every, bool(self.case.hosts), **how)
        )
        if waits:
            self.come_to("waiting")

    def make_plan(self, output: outputs.MakePlan) -> Answer:
        """Makes a plan, which takes a while."""
        if self.holds != inventory_of(self, offers=self.leaves):
            raise Violation(f"worker {self.number} has changed after its inventory")
        self.come_to("plan")
        if self.alive:
            self.work = output
            self.later(self.world.planning(), self.plan_made, output.document)
        return None

    def plan_made(self, told: PlanMessage) -> None:
        """Has made the plan."""
        self.answer(inputs.PlanMade(self.plan_of(told)))

    def plan_of(self, told: PlanMessage) -> EpochPlan:
        """Returns the plan of a document, or of its part of one."""
        how = self.ownership.grid, self.case.schedule, told
        whole = self.world.plans[told.epoch, told.digest] if told.digest else planned(*how)
        return followed(*how, whole, self.number) if told.digest else whole.plan

    def prepare_plan(self, output: outputs.PreparePlan) -> Answer:
        """Makes a plan in the planner thread."""
        self.world.push(self.planned_at() - self.world.now, self.prepared, output.order)
        return None

    def planned_at(self) -> int:
        """Returns when the planner thread ends a task, which it begins after all earlier ones."""
        self.thinks_until = max(self.thinks_until, self.world.now) + self.world.planning()
        return self.thinks_until

    def prepared(self, told: PrepareMessage) -> None:
        """Has made a plan in the planner thread."""
        if not self.puts_off(self.prepared, told):
            made = self.plan_of(told.plan)
            if not made.plan.lost_stages:
                self.feed(inputs.PlanPrepared(told.number, made))

    def load_plan(self, output: outputs.LoadPlan) -> Answer:
        """Makes its share of the plan ready."""
        told = output.plan.document
        how = self.ownership.grid, self.case.schedule, told
        made = self.world.plans[told.epoch, told.digest] if told.digest else planned(*how)
        self.ready = made.shares.get(self.number, Compiled((), ()))
        return None

    def plan_next_step(self, output: outputs.PlanNextStep) -> Answer:
        """Plans the next step in the planner thread."""
        case = self.case
        how = (output.schedule or case.schedule, output.ownership, case.redundancy, case.level, case.log_every)
        those = (output.members, output.leaving, output.wanted, output.hosts, case.copy_time)
        self.next_step = (self.planned_at(), partial(next_program, *how, *those))  # made if such a step comes
        return None

    def take_next_step(self, output: outputs.TakeNextStep) -> Answer:
        """Waits for the plan of the next step."""
        self.work = output
        at, make = self.next_step
        ownership, is_healing, shares = make()
        self.ready = shares.get(self.number, Compiled((), ()))
        made = inputs.NextStepMade(ownership, is_healing)
        if at <= self.world.now:
            return made
        self.later(at - self.world.now, self.answer, made)
        return None

    def enters(self, output: outputs.Enter) -> Answer:
        """Enters the program that is ready, or that of a whole step."""
        share, self.ready, self.ownership = self.ready, None, output.ownership
        if output.schedule:
            self.world.turns.add("another schedule is in use")
        if share is None:
            share = whole_step(self.world, output.ownership, output.schedule)[self.number]
        self.enter(share)
        self.entered = self.epoch
        self.world.judge.enters(self)
        return None

    def run(self, output: outputs.Run) -> Answer:
        """Runs its program."""
        self.work = output
        self.begin_program()
        self.come_to("go")
        return None

    def take_steps(self, output: outputs.TakeStep | outputs.CatchUp) -> Answer:
        """Takes the step."""
        if self.copied_at > self.world.now:
            self.work = output
            self.later(self.copied_at - self.world.now, self.takes_copied, output)
            return None
        slots: Sequence[Slot] = self.steps
        if isinstance(output, outputs.CatchUp):
            self.world.turns.add("worker catches up")
            slots = [slot for slot, replica in self.replicas.items() if replica.logged is not None]
        elif self.runs:
            raise Violation(f"step {output.commit.step} is committed before worker {self.number} has voted")
        if output.commit.step != self.step:
            raise Violation(f"worker {self.number} in step {self.step} takes the commit of step {output.commit.step}")
        self.come_to("commit")
        if self.alive:
            self.take_step(output.commit.clip_factor, slots)
            self.come_to("stepped")
        return inputs.StepTaken(output.commit)

    def takes_copied(self, output: outputs.TakeStep | outputs.CatchUp) -> None:
        """Takes the step that has waited for the copy of a checkpoint."""
        if (given := self.take_steps(output)) is not None and self.alive:
            self.answer(given)

    def keep(self, output: outputs.Keep) -> Answer:
        """Copies and writes replicas as of the boundary before the open step."""
        for share in output.shares:
            self.world.judge.kept(self, output.step, share.slot)
        self.copied_at = max(self.copied_at, self.world.now + self.world.lag())
        self.writes += 1
        self.world.push(self.copied_at - self.world.now + self.world.planning(), self.written, output)
        return None

    def written(self, output: outputs.Keep) -> None:
        """Tells that its share is on disk, and that it is done if it has waited for that."""
        if self.puts_off(self.written, output):
            return
        self.writes -= 1
        for share in output.shares:
            part = Part(share.slot[1], share.shard, share.shards, "", 0, "")
            self.world.say(self.number, KeptMessage(output.step, part, 0, 0, 0))
        if self.is_reporting and not self.writes and self.state.mode is Mode.DONE:
            self.reports()

    def adopt(self, output: outputs.Adopt) -> Answer:
        """Builds replicas from those of other pipelines."""
        adopted(self, output.slots)
        return None

    def drop(self, output: outputs.Drop) -> Answer:
        """Drops replicas."""
        for slot in [each for each in self.replicas if each not in output.kept]:
            del self.replicas[slot]
        return None

    def release_sends(self, output: outputs.ReleaseSends) -> Answer:
        """Releases what it has sent; that fails if something was lost."""
        lost, self.lost = self.lost, set()
        return inputs.TransferFailed("a send failed", min(lost)) if lost else None

    def validate(self, output: outputs.Validate) -> Answer:
        """Runs a validation pass."""
        self.work = output
        self.world.push(self.world.cost(0), self.validated, output)
        return None

    def validated(self, output: outputs.Validate) -> None:
        """Has run its part of the pass, unless it was interrupted."""
        if self.puts_off(self.validated, output) or self.work is not output:
            return
        if self.case.predicts and not self.come_to("pass"):
            return
        owners = output.ownership.owners[: self.case.stages]  # pipeline 0 runs the pass
        ended = self.world.passes.setdefault((self.epoch, output.step), set())
        ended.add(self.number)
        if lost := self.broken.intersection(owners) if self.number in owners else ():
            self.answer(inputs.TransferFailed("a transfer failed", min(lost)))
        elif (is_last := owners[-1] == self.number) and not ended.issuperset(owners):
            return  # it waits for the others
        else:
            if not is_last and ended.issuperset(owners):
                last = self.world.workers[owners[-1]]
                if isinstance(last.work, outputs.Validate):
                    self.world.push(self.world.delay(), last.validated, last.work)
            self.world.turns.update({PREDICTED} if is_last and self.case.predicts else ())
            self.answer(inputs.PassEnded(_FIGURES if is_last else None))
        if not self.case.predicts or self.come_to("end of pass"):
            self.wake()

    def finishes(self, output: outputs.ReportDone) -> Answer:
        """Says that all is done, once its checkpoints are on disk."""
        self.is_reporting = True
        if not self.writes:
            self.reports()
        return None

    def reports(self) -> None:
        """Says that all is done."""
        self.is_reporting = False
        self.world.say(self.number, messages.FinishedMessage(self.state.epoch, (), 0, ()))

    def ends_process(self, output: outputs.End) -> Answer:
        """Ends the process."""
        self.world.end(self, output.code)
        return None

    def audit(self, output: outputs.Audit) -> Answer:
        """Sends the hashes of its replicas, in a run on several hosts; a stage counts as a layer."""
        for slot in output.slots:
            if slot in self.replicas:
                tell_hashes(self, slot)
        return None

    def nothing(self, output: outputs.Output) -> Answer:
        """Does nothing: no transfer is under way at the end."""
        return None


def whole_step(world: World, ownership: Ownership, schedule: str = "") -> dict[int, Compiled]:
    """Returns every worker's share of the program of a whole step."""
    case = world.case
    how = (schedule or case.schedule, ownership, case.redundancy, frozenset[tuple[int, Slot]]())
    return shares_of(*how, case.log_every, case.copy_time)


def _number_of(epoch: int, attempt: int = 0) -> int:
    return epoch * _MOST_ATTEMPTS + attempt


_listed = lru_cache(maxsize=8)(tuple[int, ...])  # all workers of an epoch are told the same members
_MOST_ATTEMPTS = 1000
_FIGURES = (messages.Evaluation("all", 1, 1.0, {}),)  # of every validation
_INTERRUPTIBLE = outputs.Run | outputs.Validate
_SAID = {InventoryMessage: "inventoried", PlannedMessage: "planned"}
_DO: dict[type[outputs.Output], Callable[[Worker, Any], Answer]] = {
    outputs.SendMessage: Worker.say,
    outputs.MarkPhase: Worker.mark,
    outputs.BeginAt: Worker.begin_at,
    outputs.CountHeld: Worker.count,
    outputs.LeaveGroup: Worker.leave_group,
    outputs.CloseGroup: Worker.nothing,
    outputs.FormGroup: Worker.form_group,
    outputs.FormNextGroup: Worker.form_next,
    outputs.LeaveNextGroups: Worker.leave_next,
    outputs.EnterNextGroup: Worker.enter_group,
    outputs.MakePlan: Worker.make_plan,
    outputs.PreparePlan: Worker.prepare_plan,
    outputs.LoadPlan: Worker.load_plan,
    outputs.PlanNextStep: Worker.plan_next_step,
    outputs.TakeNextStep: Worker.take_next_step,
    outputs.Enter: Worker.enters,
    outputs.Run: Worker.run,
    outputs.TakeStep: Worker.take_steps,
    outputs.CatchUp: Worker.take_steps,
    outputs.Adopt: Worker.adopt,
    outputs.Drop: Worker.drop,
    outputs.Audit: Worker.audit,
    outputs.Keep: Worker.keep,
    outputs.ReleaseSends: Worker.release_sends,
    outputs.Validate: Worker.validate,
    outputs.ReportDone: Worker.finishes,
    outputs.End: Worker.ends_process,
}
