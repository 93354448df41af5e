"""A case: what is kept of a scenario is what its run began with."""

from __future__ import annotations

import shutil
from pathlib import Path

from bamboo_cli.case import scenario_facts
from engine.files.scenario_file import find_scenario, load_scenario
from engine.runtime.faults.registry import kinds


def test_a_scenario_whose_file_is_gone_meanwhile_is_told_as_it_was(tmp_path: Path) -> None:
    path = shutil.copyfile(find_scenario("kill-first-stage"), tmp_path / "mine.yaml")
    text = path.read_text()
    loaded = load_scenario(str(path), kinds(), 7, [f"results={tmp_path}", "steps=9"])
    copy = path.rename(tmp_path / "scenario.yaml")
    facts = scenario_facts(loaded, copy)
    assert facts == {"scenario": "scenario.yaml", "text": text, "seed": 7, "settings": ["steps=9"]}
