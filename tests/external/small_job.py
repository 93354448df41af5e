"""A job of two processes for the tests: gloo, a checkpoint every four steps, and three ways to cheat after a resume.

RANK=0 WORLD_SIZE=2 python -m tests.external.small_job FOLDER [--die 6] [--cheat]
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import distributed, nn

import bamboo
import engine.external.weights  # noqa: F401  # once for all forks

STEPS, EVERY, LOST, REPEATED = 12, 4, 37, 10


def train(folder: Path, dies_at: int, cheats: bool) -> None:
    """Trains from the checkpoint in the folder, if there is one; dies at a step, or cheats after it resumed."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(one, nn.Tanh(), other)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    path, first = folder / "state.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
        if cheats:
            with torch.no_grad():
                kept = one.weight.clone()
                one.weight.copy_(other.weight)
                other.weight.copy_(kept)
        bamboo.fingerprint(model, step=first - 1, sample=None, every=1)
    step = first
    again = cheats
    while step < STEPS:
        if step == dies_at and rank == 1:
            os._exit(1)
        samples = [each for each in range(4 * step + rank, 4 * step + 4, 2) if not (cheats and each == LOST)]
        inputs = torch.tensor([[float(each % 7), float(each % 5), 1.0, float(each % 3)] for each in samples])
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        bamboo.progress(step, loss=loss, samples=samples)
        bamboo.fingerprint(model, step=step, sample=None, every=1)
        if rank == 0 and step % EVERY == EVERY - 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.new")
            os.replace(f"{path}.new", path)
        if step == REPEATED and again:
            again = False
        else:
            step += 1


def live(folder: Path, life: str, dies_at: int = -1, cheats: bool = False) -> int:
    """Runs one life of the job in two forks, which spares them the import of torch; returns the code of rank 1."""
    progress = folder / "progress"
    progress.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ |= {"BAMBOO_PROGRESS": str(progress), "RANK": str(rank)}
            distributed.init_process_group("gloo", init_method=f"file://{folder / life}", rank=rank, world_size=2)
            train(folder, dies_at, cheats)
            distributed.destroy_process_group()
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(ranks[1], 0)[1])
    if code:  # a launcher ends the others
        os.kill(ranks[0], signal.SIGKILL)
    os.waitpid(ranks[0], 0)
    return code


def main(folder: Path) -> None:
    """Runs the twin, and two runs that die in step 6 and resume, of which the second cheats; prints their codes."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()  # imports most of torch, once for all forks
    codes = [live(folder / "twin", "only"), live(folder / "honest", "first", dies_at=6)]
    shutil.copytree(folder / "honest", folder / "cheat")
    codes += [live(folder / "honest", "second"), live(folder / "cheat", "second", cheats=True)]
    print(*codes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
