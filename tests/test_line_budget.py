"""The product fits the budget of its floors; its sum grows only with a written reason. `pytest -s` shows the lines."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.house_rules import Module
from tests.test_house import MODULES

BUDGET = tomllib.loads(Path(__file__).with_name("line_budget.toml").read_text(encoding="utf-8"))


def floor(module: Module) -> str:
    """Returns the floor of a module: the two first names of a room of the engine, or the package."""
    first, *names = module.name.split(".")
    is_nested = first == "engine" and (len(names) > 1 or (bool(names) and module.is_package))
    return f"{first}.{names[0]}" if is_nested else first


def overspent(lines: Mapping[str, int], budget: Mapping[str, Any]) -> list[str]:
    """Returns the floors with more lines than they may have, and what is wrong with the sums."""
    allowed: Mapping[str, int] = budget["floors"]
    problems = [f"{name}: {lines[name]} lines, {allowed.get(name, 0)} allowed" for name in lines]
    problems = [text for text, name in zip(problems, lines, strict=True) if lines[name] > allowed.get(name, 0)]
    problems += [f"{name}: no such floor" for name in allowed if name not in lines]
    sums: Sequence[Mapping[str, Any]] = budget["sums"]
    problems += [
        f"{new['date']}: the sum grows without a reason"
        for old, new in pairwise(sums)
        if new["lines"] > old["lines"] and not new["reason"].strip()
    ]
    if sum(allowed.values()) > sums[-1]["lines"]:
        problems.append(f"the floors may have {sum(allowed.values())} lines, the product {sums[-1]['lines']}")
    return problems


def test_product_fits_its_budget() -> None:
    lines = Counter[str]()
    for module in MODULES:
        lines[floor(module)] += len(module.text.splitlines())
    for name, allowed in BUDGET["floors"].items():
        print(f"{name:<20} {lines[name]:>7,} of {allowed:>7,}")
    print(f"{'sum':<20} {lines.total():>7,} of {BUDGET['sums'][-1]['lines']:>7,}")
    assert overspent(lines, BUDGET) == []


def test_budget_can_be_overspent() -> None:
    budget = {"floors": {"a": 10, "b": 5}, "sums": [{"date": "1", "lines": 15, "reason": ""}]}
    assert overspent({"a": 10, "b": 5}, budget) == []
    assert overspent({"a": 11, "b": 5}, budget) == ["a: 11 lines, 10 allowed"]
    assert overspent({"a": 1, "b": 1, "c": 1}, budget) == ["c: 1 lines, 0 allowed"]
    assert overspent({"a": 1}, budget) == ["b: no such floor"]
    more = {"date": "2", "lines": 16, "reason": " "}
    assert overspent({"a": 1, "b": 1}, budget | {"sums": [*budget["sums"], more]}) == [
        "2: the sum grows without a reason"
    ]
    assert overspent({"a": 1, "b": 1}, budget | {"sums": [*budget["sums"], more | {"reason": "x"}]}) == []
    few = {"date": "2", "lines": 14, "reason": ""}
    assert len(overspent({"a": 1, "b": 1}, budget | {"sums": [*budget["sums"], few]})) == 1
