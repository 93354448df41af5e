"""The engine of bamboo: pipeline-parallel training that survives the death of its workers.

One vocabulary, used in code, YAML, reports and documents, each word with one meaning:

stage: a run of consecutive layers. pipeline: one copy of the whole model, stages 0..P-1; there are D of them.
slot: (pipeline, stage), the unit that a worker owns. worker: a process with a device. rank: a worker's number
inside one epoch's process group, nothing more. action: one thing a worker does, (stage, op, microbatch), written
``2F0``. program: worker -> list of actions for one step. schedule: the rule that makes a program. step: one
optimizer step. epoch: the number of the current membership. owner of a slot: the worker that trains it.
fault: what is injected; failure: what the system sees; loss: the training loss, only. trajectory: the hashes of
weights, optimizer state and loss, one row per (step, layer). residual: what a forward keeps for its backward.
"""
