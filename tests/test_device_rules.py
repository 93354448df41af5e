"""Tensors have a place: each constructor says its device, and CUDA begins in one room of a worker only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device_rules import against_reasons, cuda_elsewhere, placeless
from tests.house_rules import Module, parse

ROOT = Path(__file__).resolve().parent.parent
# path, or a folder with / -> why what is made there lies on the host. The list may only shrink.
ON_THE_HOST = {
    "engine/models/data.py": "microbatches are made on the host; the loader puts them on the device",
    "engine/models/datasets.py": "microbatches are made on the host; the loader puts them on the device",
    "engine/models/data_sources.py": "microbatches are made on the host; the loader puts them on the device",
    "engine/models/networks.py": "layers are built on the host, with the same bits for each device, then moved",
    "engine/models/transformer.py": "layers are built on the host, as those of the other networks",
    "engine/models/traced/recorded.py": "forwards are recorded on the host",
    "engine/models/traced/source_text.py": "a piece is written for the device of its job, and has autocast of its own",
}
CUDA: dict[str, str] = {}


def modules() -> list[Module]:
    return [
        parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for folder in ("engine/runtime", "engine/models")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_whoever_makes_a_tensor_says_where() -> None:
    assert against_reasons(placeless(modules()), ON_THE_HOST) == []


def test_one_room_speaks_to_cuda() -> None:
    assert against_reasons(cuda_elsewhere(modules()), CUDA) == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("x = torch.empty(3)", 1),
        ("x = torch.zeros(3, dtype=torch.uint8)", 1),
        ("x = torch.Generator()", 1),
        ("with torch.autocast('cpu', dtype=d): pass", 1),
        ("x = torch.empty(3, device=device)", 0),
        ("x = torch.tensor([1], **options)", 0),
        ("x = torch.empty_like(y)", 0),
        ("x = y.new_zeros(3)", 0),
    ],
)
def test_a_planted_constructor_is_found(line: str, count: int) -> None:
    planted = [parse("engine/runtime/stage/planted.py", f"import torch\n{line}\n")]
    assert len(against_reasons(placeless(planted), {})) == count
    assert against_reasons(placeless(planted), {"engine/runtime/stage/": "why"}) == (
        [] if count else ["engine/runtime/stage/: a reason that is no longer needed"]
    )


def test_planted_cuda_is_found() -> None:
    planted = [parse("engine/runtime/stage/planted.py", "import torch\ntorch.cuda.synchronize()\n")]
    assert len(against_reasons(cuda_elsewhere(planted), {})) == 1


FORKED = """
import importlib, os, torch

def refuse(*given, **options):
    raise SystemExit("CUDA")

for name in [each for each in dir(torch._C) if each.startswith("_cuda")]:
    setattr(torch._C, name, refuse)
torch.cuda._lazy_init = torch.cuda.device_count = torch.cuda.is_available = refuse
from engine.core.job.hugging_face import MODEL
from engine.core.job.job import Job
from engine.core.job.update_rules import preloads
from engine.runtime.process.forkserver import PRELOAD
for module in (*PRELOAD, *preloads(Job(optimizer="adam", lr_schedule="onecycle", model=MODEL))):
    importlib.import_module(module)
assert len(os.listdir("/proc/self/task")) == 1, "a fork copies no other thread"
assert not torch.cuda.is_initialized()
print("not called so far")
torch.cuda.init()
"""


def test_the_fork_server_imports_torch_and_never_calls_cuda() -> None:
    """A context that the server had would not survive the fork; a planted call at the end shows that one is seen."""
    code = [sys.executable, "-c", FORKED]
    ended = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "not called so far\n", "CUDA\n")
