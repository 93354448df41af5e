"""The engine of bamboo: pipeline-parallel training that survives the death of its workers.

One vocabulary, used in code, YAML, reports and documents. Each word has one meaning.

The work:

job: the description of one training: model, data, shape of the pipelines, redundancy and seed.
resolve: to make the one job that files, variables and flags describe together.
run: one execution of a job, with a folder of its own.
model: the layers that are trained together, with the loss of their outputs.
layer: the smallest part of a model that a cut may separate.
tie: one parameter that stands in several layers.
weight: a parameter of a layer, which the optimizer changes.
stage: a run of consecutive layers.
partition: the cut of the layers into stages.
pipeline: one copy of the whole model, stages 0 to P-1; a job has D of them.
block: a part of a stage that is a slot by itself, in a job with more than one of them in a stage.
slot: (pipeline, stage) or (pipeline, block), the unit that a worker owns.
grid: all slots of a job, with its number of microbatches.
worker: a process that owns slots and computes on them.
rank: the place of a worker among the members of one epoch; in a job of another launcher, a process by its number.
step: one optimizer step of the whole job.
sample: one input of the model with its target.
microbatch: the part of a step's samples that passes through a pipeline at once.
slice: with --slices, a part of a microbatch along the sequence; in programs it takes the place of a microbatch.
op: the kind of an action, such as F, B, SEND_F or COMMIT.
action: one thing that a worker does, (stage, op, microbatch), written ``2F0``.
chore: what a worker does beside its actions: it loads data, audits, copies for a checkpoint, validates.
forward: the computation of a stage's outputs from its inputs.
backward: the computation of a stage's gradients, whole or split into those of inputs and of weights.
residual: the tensors that a forward keeps for its backward.
activation-checkpoint: a residual of the inputs alone, from which the forward is computed again.
stash: the residuals that a worker keeps at one time.
gradient: the derivative of the loss by a tensor.
accumulator: the sum of a slot's gradients over the microbatches of a step.
loss: the training loss, and never anything that is gone.
buffer: a tensor of a layer that training changes without a gradient, such as a running mean.
optimizer: the rule that changes weights by gradients, with its state.
validation: the evaluation of the model on samples that are not trained on.
prediction: a pass of forwards over samples; the outputs of the last stage are kept, and merged in order.
early-stop: the end of training because validations no longer improve.
evaluation-set: a set of samples, with a name, that a validation measures loss and metrics on.
program: for each worker, its list of actions for one step.
schedule: the rule that makes a program.
bubble: the part of a step's time in which a worker has nothing to compute.
placement: the rule that gives stages to the workers of a pipeline.
overlap: two compute actions that a schedule wants run at the same time.
transfer: a tensor list on its way from one worker to another.
border: the tensors between two neighbouring stages, as shapes and types.
backend: what carries tensors between workers: direct (links), or NCCL between GPUs.
nccl: the library of NVIDIA that sends between GPUs.
communicator: the group of GPUs in which NCCL sends, one for each epoch.
plane: the links over which the transfers of an epoch go.
shard: the part of each tensor of a stage that the replicas of one slot keep, where the pipelines share the stage.
unshard: to gather the tensors of a sharded stage before they are used.
trajectory: the hashes of weights, optimizer state and loss, one row per (step, layer).

Survival:

owner: the worker that trains a slot.
ownership: the owner and the shadows of every slot.
replica: a whole copy of a slot's weights and optimizer state, at its owner or at a shadow.
checkpoint: the state of a job at a step boundary, in files from which training can go on.
manifest: the file that names the parts of a checkpoint, and is written last.
shadow: a worker that keeps a replica of a slot without owning it.
redundancy: the rule that decides which replicas exist and how much work is done ahead for them.
heal: to make the replica of a new shadow whole, by a copy of state or of accumulators.
stream: the accumulators of an owner on their way to its shadows, in the middle of a step.
log: the gradients of a step at the shadows, from which they take the same optimizer step.
vote: the word of a replica that it holds all that a step needs; those of a worker are one message.
ballot: the votes for one step, which commits when all of them are there.
commit: the moment from which no failure can undo a step.
member: a worker that belongs to the current epoch.
membership: the members, and the owners of all slots.
epoch: the number of the current membership.
notice: the announcement that a worker, or the whole job, is going to end.
hand-over: the move of slots to other workers with whole replicas, at a step boundary or, for a short notice, inside.
failure: the sign of a fault that the system sees.
verdict: the decision which workers are out with an epoch, each with a cause.
heir: the worker that owns a slot after a verdict or a hand-over.
detect: the phase from a failure to the first process that knows of it.
agree: the phase from the first sign of a failure to the verdict.
fence: the end of all that workers do in an old epoch; later words of that epoch count for nothing.
regroup: the phase in which the links that a new epoch needs are made, and NCCL's communicator.
inventory: the list of all that a worker holds of the open step.
plan: the program that finishes the open step after an epoch, made by every member alike.
replay: the part of a plan that computes again results that are gone.
recovery: the time from a failure to the first commit after it.
phase: one part of a recovery, or the state of a job in the membership protocol.
merged: the time from the end of the pause to the commit, in which the heir works for two.
exposure: the time in which some slot has no replica but its owner's, so that one more loss could end the run.
pause: the time of a recovery in which nothing new is computed.
stall: the time between the commits around a failure, less a usual step.
rendezvous: the keys that the members of an epoch tell each other to form a group.

Processes:

launcher: the process of the command line, which starts a run; another launcher, such as torchrun, starts other jobs.
external: of a job that another launcher starts, and bamboo only strikes and watches.
agent: the part of the launcher that starts, watches and ends the workers of its host.
coordinator: the part of the agent that decides on membership.
standby: a waiting worker that was started with the run.
waiting: said of a worker that has code and data, and no slot, rank or vote; an epoch makes it a member.
cramped: said of a waiting worker whose memory does not suffice for one slot; it waits on.
joiner: a waiting worker that becomes a member without a failure, at a step boundary.
next group: the members of a coming epoch and their communicator, formed while training continues.
lease: the right to be the coordinator, which expires unless it is renewed.
store: the key-value store with transactions that keeps the decisions of the coordinator.
etcd: the server that serves as the store.
deadly: said of a host whose loss would lose the state of a slot.
host: one machine.
gpu: a device of a host, with memory of its own, on which the layers of a worker may compute.
fork: to start a process as a copy of the fork server, which has torch loaded.
message: one packet between agent and worker.
bundle: messages between hosts that travel as one, over the stream between two hosts.
heartbeat: the message that tells the agent the place of a worker in its program.
event: one input of the membership protocol.
record: one line of a run's ``events.jsonl``.
recorder: the writer of records.

Tests of survival:

fault: a harm that is injected on purpose.
strike: to carry out a fault.
victim: the worker that a fault strikes.
kill: the fault that ends a worker by SIGKILL.
scenario: a job, its faults and the expectations of its run, as a YAML file.
expectation: a statement of a scenario about its run.
check: the judgement of one expectation.
case: one run of a scenario, with its checks.
matrix: a scenario with axes, which stands for many cells.
cell: one scenario of a matrix.
evidence: the records, hashes and losses of a run and of its twin, from which its verdict is computed.
twin: the same job without faults, whose trajectory a run must equal.
"""


def __getattr__(name: str) -> object:
    """Returns `train`, `dry_run` or `TrainingRun`, which `bamboo` has too; imported at the first use."""
    if name in ("train", "dry_run", "TrainingRun"):
        import importlib

        return getattr(importlib.import_module(f"{__name__}.api.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
