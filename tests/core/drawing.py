"""Programs as they are drawn in tests: one worker a line, one action a word."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.action import Action, Program, parse_action


def drawn(lists: Iterable[Iterable[Action]]) -> str:
    """Returns lists of actions as a drawing."""
    return "\n".join(" ".join(str(action) for action in actions) for actions in lists)


def drawn_program(program: Program) -> str:
    """Returns a program as a drawing in which each line names its worker."""
    return "\n".join(f"{worker}: {' '.join(map(str, program[worker]))}".rstrip() for worker in sorted(program))


def program_of(drawing: str) -> Program:
    """Returns the program that a drawing with named workers shows."""
    lines = [line.strip().partition(":") for line in drawing.strip().splitlines()]
    return {int(worker): tuple(parse_action(word) for word in words.split()) for worker, _, words in lines}


def plain(drawing: str) -> str:
    """Returns a drawing without the indentation and the blank lines at its ends that a test's source gives it."""
    return "\n".join(" ".join(line.split()) for line in drawing.strip().splitlines())
