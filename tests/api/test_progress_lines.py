"""The lines of a job's own report: whole in threads and forks, nothing outside of bamboo, never the end of the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bamboo
from engine.external.weights import fingerprint_of


def _rows(folder: Path) -> dict[str, list[dict[str, object]]]:
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_outside_of_bamboo_nothing_happens_and_nothing_is_imported() -> None:
    code = "import sys, bamboo; bamboo.progress(1, loss='x'); bamboo.fingerprint(None, step=0); "
    code += "print(sorted({'torch', 'engine'} & {*sys.modules}))"
    environment = {name: value for name, value in os.environ.items() if name != "BAMBOO_PROGRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"


def test_lines_are_whole_in_threads_and_after_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_PROGRESS", str(tmp_path))
    monkeypatch.setenv("RANK", "3")

    def report(first: int) -> None:
        for step in range(first, first + 50):
            bamboo.progress(step, loss=torch.tensor(0.5), samples=torch.arange(1000))  # type: ignore[arg-type]

    threads = [threading.Thread(target=report, args=(first,)) for first in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if not child:
        report(200)
        os._exit(0)
    os.waitpid(child, 0)
    rows = _rows(tmp_path)
    assert {name: sorted(row["step"] for row in of) for name, of in rows.items()} == {  # type: ignore[type-var]
        f"3-{os.getpid()}.jsonl": [*range(200)],
        f"3-{child}.jsonl": [*range(200, 250)],
    }
    last = rows[f"3-{child}.jsonl"][-1]
    assert {key: value for key, value in last.items() if key not in ("t_ns", "samples")} == {
        **{"pid": child, "rank": 3, "step": 249, "loss": 0.5}
    }
    assert last["samples"] == [*range(1000)]


def test_a_line_that_cannot_be_written_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAMBOO_PROGRESS", str(tmp_path / "gone"))
    bamboo.progress(7)
    assert capsys.readouterr().err.startswith("bamboo: step 7 is not reported: [Errno 2]")


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 40)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _changed(sample: int | None, change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> list[str]:
    model, optimizer = _trained()
    before = fingerprint_of(model, optimizer, sample)
    with torch.no_grad():
        change(model, optimizer)
    after = fingerprint_of(model, optimizer, sample)
    assert [*before] == [*after]
    return [name for name in before if before[name] != after[name]]


@pytest.mark.parametrize("sample", [None, 16])
def test_a_fingerprint_names_the_tensor_that_changed(sample: int | None) -> None:
    assert _changed(sample, lambda model, optimizer: None) == []
    assert _changed(sample, lambda model, _: model[2].weight.add_(1)) == ["2.weight"]  # type: ignore[index]
    assert _changed(sample, lambda model, _: model[1].running_var.add_(1)) == ["1.running_var"]  # type: ignore[index]

    def lower(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()

    assert _changed(sample, lower) == ["optimizer exp_avg of 0.weight", "optimizer group 0"]


def test_one_element_counts_if_all_are_hashed() -> None:
    assert _changed(None, lambda model, _: model[0].weight[7, 8].add_(1)) == ["0.weight"]  # type: ignore[index]


def test_equal_tensors_have_one_hash_whatever_their_memory_looks_like() -> None:
    one = torch.arange(600.0).reshape(20, 30)
    for sample in (None, 16):
        made = fingerprint_of({"a": one, "b": one.T.contiguous().T, "c": one.T, "d": one.bfloat16()}, None, sample)
        assert made["a"] == made["b"] and len({*made.values()}) == 3


def test_steps_are_hashed_every_so_often_and_what_that_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_PROGRESS", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    model, optimizer = _trained()
    begin = time.perf_counter()
    for step in range(200):
        bamboo.fingerprint(model, optimizer, step=step)
    per_step, begin = (time.perf_counter() - begin) / 200, time.perf_counter()
    for step in range(200):
        bamboo.progress(step, loss=0.5)
    print(f"\na fingerprint: {per_step * 1e6:.0f} us of a step; progress: {(time.perf_counter() - begin) * 5e3:.0f} us")
    pid = os.getpid()
    assert [row["step"] for row in _rows(tmp_path)[f"{pid}-{pid}.fingerprints.jsonl"]] == [*range(0, 200, 20)]
