"""Scenarios from what real failures left behind: each value has its line, and what no line says is a question."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import NothingMatchedError, StorageError
from engine.core.faults.fault import At
from engine.external.learn import learn
from engine.files.jobs.scenario_file import load_scenario
from engine.files.strict_yaml import read_text
from engine.runtime.faults.registry import kinds
from tests.report.made_up import MadeUpRun, make_run

_TORCHRUN = """\
[rank1]: step 41 loss 0.25
[rank0]: step 41 loss 0.25
W1127 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 812 closing signal SIGTERM
E1127 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 813) of binary: p
step 42 loss 0.24
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_12:00:00
  rank      : 9 (local_rank: 1)
  exitcode  : -9 (pid: 813)
"""


def _learned(tmp_path: Path, **files: str | bytes) -> tuple[dict[str, Any], str, int]:
    """Returns the faults of the scenario that is learned from some files, its text, and its number of questions."""
    paths = []
    for name, content in files.items():
        paths.append(tmp_path / name.replace("__", "/"))
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
    learned = learn(paths)
    document = read_text(learned.text, "learned")
    assert not document.problems, document.problems
    value: Any = document.value
    (fault,) = value["faults"]
    return {**fault, "launcher": value.get("launcher")}, learned.text, learned.questions


def test_a_log_of_torchrun_gives_the_moment_the_rank_and_the_kind_with_their_lines(tmp_path: Path) -> None:
    fault, text, questions = _learned(tmp_path, log=_TORCHRUN)
    assert fault == {**{"id": "first", "at": {"step": 42}, "target": {"rank": 9}, "do": "kill", "launcher": "torchrun"}}
    assert questions == 0
    assert "# log:5: step 42 loss 0.24\n" in text
    assert "# log:11: rank : 9 (local_rank: 1) exitcode : -9 (pid: 813)\n" in text


@pytest.mark.parametrize(
    ("line", "rank", "do", "questions"),
    [
        ("failed (exitcode: -15) local_rank: 1 (pid: 813)", 1, "terminate", 2),
        ("srun: error: node7: task 3: Killed", 3, "kill", 1),
        ("srun: error: node7: tasks 3-5: Exited with exit code 1", 3, "kill", 2),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T1:00:00 DUE TO PREEMPTION ***",
            "?",
            "terminate",
            2,
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "?", "kill", 2),
        ("3m  Warning  OOMKilled  pod/train-worker-2  Container was killed", 2, "kill", 3),
        ("3m  Normal  Preempted  by scheduler", "?", "terminate", 3),
    ],
)
def test_words_of_launchers_and_schedulers(tmp_path: Path, line: str, rank: int | str, do: str, questions: int) -> None:
    fault, text, count = _learned(tmp_path, log=f"epoch 1\n{line}\n")
    assert (fault["target"], fault["do"], count) == ({"rank": rank}, do, questions)
    assert fault["at"] == {"step": "?"} and "# question: after which step? No line says it." in text
    assert f"# log:2: {' '.join(line.split())}\n" in text


def test_events_of_kubernetes_as_json(tmp_path: Path) -> None:
    items = [
        {"reason": "Scheduled", "involvedObject": {"name": "train-worker-0"}},
        {"reason": "Evicted", "involvedObject": {"name": "train-worker-4"}, "message": "low on\nmemory"},
    ]
    fault, text, questions = _learned(tmp_path, **{"events.json": json.dumps({"kind": "List", "items": items})})
    assert (fault["target"], fault["do"], questions) == ({"rank": 4}, "terminate", 3)
    assert "# events.json: Evicted train-worker-4: low on memory\n" in text


def test_the_step_may_be_in_another_file(tmp_path: Path) -> None:
    files = {"1-7.jsonl": '{"t_ns":5,"rank":1,"step":30}\n{"t_ns":9,"rank":1,"step":31}\n', "log": "task 1\n"}
    fault, text, _ = _learned(tmp_path, **files, err="srun: error: n: task 1: Killed\n")
    assert fault["at"] == {"step": 31} and '# 1-7.jsonl:2: {"t_ns":9,"rank":1,"step":31}\n' in text


def test_an_error_file_of_torchelastic_names_the_exception(tmp_path: Path) -> None:
    message = {"message": {"message": "RuntimeError: a\n  do: stop", "extraInfo": {"timestamp": "1"}}}
    fault, text, questions = _learned(tmp_path, **{"3__error.json": json.dumps(message)})
    assert (fault["target"], fault["do"], questions) == ({"rank": 3}, "kill", 2)
    assert "# error.json: RuntimeError: a do: stop\n" in text


@pytest.mark.parametrize("is_pickled", [True, False])
def test_dumps_of_the_flight_recorder_show_the_rank_that_is_late(tmp_path: Path, is_pickled: bool) -> None:
    files = {}
    for rank, last in ((0, 7), (1, 5), (2, 7)):
        entries = [{"collective_seq_id": number, "frames": [{"name": "all_reduce"}]} for number in range(last + 1)]
        dump = {"version": "2.10", "pg_config": {}, "entries": entries}
        files[f"nccl_trace_rank_{rank}"] = pickle.dumps(dump, 2) if is_pickled else json.dumps(dump).encode()
    fault, text, questions = _learned(tmp_path, **files)
    assert (fault["target"], fault["do"], questions) == ({"rank": 1}, "stop", 2)
    assert "# nccl_trace_rank_1: rank 1 has issued 5 collectives, another one 7\n" in text


def test_a_dump_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(print, 2))
    with pytest.raises(NothingMatchedError):
        learn([path])
    path.write_bytes(b"\x80\x02}q\x00")
    with pytest.raises(StorageError, match=r"ends too early|no pickled data"):
        learn([path])


def test_records_of_bamboo_give_a_scenario_that_it_accepts(tmp_path: Path) -> None:
    run = make_run(tmp_path, MadeUpRun(dead=((4, 2),)).events())
    path = tmp_path / "again.yaml"
    result = CliRunner().invoke(app, ["learn", str(run / "events.jsonl"), "--output", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"scenario": path.read_text(), "questions": 0}
    (fault,) = load_scenario(str(path), kinds()).scenario.faults
    assert isinstance(fault.trigger, At)
    assert (fault.do, fault.trigger.step, fault.trigger.action.stage) == ("kill", 4, 2)


@pytest.mark.parametrize(
    "content",
    ['{"items": [1, {"reason": 2, "involvedObject": 3}]}', '{"entries": [1, {"collective_seq_id": "x"}]}', "[" * 9999],
)
def test_nonsense_is_no_failure(tmp_path: Path, content: str) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(NothingMatchedError):
        learn([tmp_path / "log"])


def test_logs_without_a_failure_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("step 1\n")
    with pytest.raises(NothingMatchedError, match="no line shows a failure"):
        learn([path])
    with pytest.raises(StorageError, match="cannot read"):
        learn([tmp_path / "none"])


def test_events_of_a_job_of_another_launcher_name_its_log(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event":"RankBegan","at_ns":1,"rank":0,"pid":2,"chain":""}\n')
    with pytest.raises(NothingMatchedError, match=r"name its logs/command\.log"):
        learn([tmp_path / "events.jsonl"])


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(StorageError, match="it is not a regular file"):
        learn([tmp_path / "log"])
