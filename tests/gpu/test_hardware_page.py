"""The page of a GPU has its date, hardware, versions and every figure."""

from __future__ import annotations

from datetime import date

from tests.gpu.hardware_page import Figure, page


def test_the_page_has_each_fact_and_each_figure() -> None:
    facts = {"gpus": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "torch_cuda": "13.0", "driver": "580.65"}
    figures = [Figure("gpt, twice", "trajectory 0003 both times", 12.34), Figure("one kill", "the same", 5.0)]
    name, text = page(date(2026, 11, 23), facts, figures)
    assert name == "2026-11-23-nvidia-h100-80gb-hbm3.md"
    for part in (
        "| driver | 580.65 |",
        "| gpt, twice | trajectory 0003 both times | 12.3 |",
        "| one kill | the same | 5.0 |",
    ):
        assert part in text
    assert len(text.splitlines()) == 15
