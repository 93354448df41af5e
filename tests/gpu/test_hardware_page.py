"""The page of a GPU has its date, hardware, versions and every figure."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from tests.gpu.conftest import WrittenFigures
from tests.gpu.hardware_page import Figure, figure_of, page


def test_the_page_has_each_fact_and_each_figure() -> None:
    facts = {"gpus": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "torch_cuda": "13.0", "driver": "580.65"}
    figures = [Figure("gpt, twice", "trajectory 0003 both times", 12.34), Figure("one kill", "the same", 5.0)]
    name, text = page(date(2026, 11, 23), facts, figures)
    assert name == "2026-11-23-nvidia-h100-80gb-hbm3-test.md"
    for part in (
        "| driver | 580.65 |",
        "| gpt, twice | trajectory 0003 both times | 12.3 |",
        "| one kill | the same | 5.0 |",
    ):
        assert part in text
    assert len(text.splitlines()) == 15


def test_a_row_of_a_benchmark_says_its_figures_its_goal_and_its_verdict() -> None:
    row = {
        "case": "lazy",
        "metric": "step s",
        "ours": 1.02,
        "peer": 1.0,
        "ratio": 1.02,
        "goal": 1.02,
        "met": None,
        "n": 9,
    }
    assert figure_of(row) == Figure("lazy: step s", "1.02 beside 1 in 9 rounds: 1.02, goal 1.02: inconclusive", 0.0)
    assert figure_of(row | {"met": True}).found.endswith("goal 1.02: yes")
    assert figure_of(row | {"goal": None}).found == "1.02 beside 1 in 9 rounds: 1.02"
    name, text = page(date(2026, 11, 23), {"gpus": "A"}, [figure_of(row)], "make bench-gpu")
    assert name == "2026-11-23-a-bench.md" and "Written by `make bench-gpu`." in text


def test_the_page_is_written_with_each_figure(tmp_path: Path) -> None:
    """A session that is killed at its limit kept nothing: the page was written at its end."""
    figures = WrittenFigures(tmp_path)
    figures.append(Figure("gpt, twice", "trajectory 0003 both times", 12.34))
    (name,) = tmp_path.iterdir()
    assert "| gpt, twice |" in name.read_text()
    figures.append(Figure("one kill", "the same", 5.0))
    assert [each for each in ("gpt, twice", "one kill") if f"| {each} |" not in name.read_text()] == []
