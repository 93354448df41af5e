"""From a module to its text, cell by cell: train, kill, stop, resume, export, load in plain torch.

Editors open a file with such cells as a notebook; `python gpt_story.py` runs all of it.
"""

# %% A job: the module as it is, a text, four worker processes
import sys
import time

import torch
from gpt import GPT

import bamboo

STEPS = int(sys.argv[1]) if sys.argv[1:] else 400
JOB = {
    "model": GPT,
    "data": "sonnets.txt",
    "data_args": {"sequence": 64},
    "stages": 4,
    "microbatches": 4,
    "microbatch_size": 8,
    "steps": STEPS,
    "lr": 3e-3,
    "param_groups": "bias|norm: weight_decay=0",
}
print(bamboo.dry_run(stages=4, microbatches=4))  # who does which action when

# %% Train, and kill a worker while it computes
run = bamboo.train(**JOB, checkpoint_every=max(STEPS // 8, 1), logger="csv")
case = run.kill(2)
print(case["verdict"], [each["stall_ms"] for each in case["recoveries"]])

# %% Stop at half way, as Ctrl-C does: the open step is finished, and kept
while run.result is None and run.status().committed < STEPS // 2:
    time.sleep(0.05)
stopped = run.stop()
print(stopped.outcome, run.status().committed)

# %% Go on, in two stages instead of four: the same bits as without any of this
again = bamboo.resume(run, stages=2)
result = again.wait()
print(result.outcome, result.loss, result.trajectory)

# %% Look at it: pandas frames, as of `bamboo report --table`
print(again.table("steps")[["step", "loss"]].tail(3))

# %% Export, and load the file in plain torch
torch.save(again.weights(), "story.pt")
model = GPT()
model.load_state_dict(torch.load("story.pt", weights_only=True))
print(model.eval().generate("Shall I", 200))
