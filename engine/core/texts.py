"""Texts for readers: nouns in the singular or plural, patterns, and text from elsewhere for a terminal.

Rule: no character of a text from elsewhere moves the cursor, changes colours, hides text or turns its direction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")  # CSI, OSC, other escapes
_DOUBTFUL = re.compile(r"[^ -~\n\t]")
_FIRST_SPACE, _ENDS = "\xa0", "\u2028\u2029"  # spaces of Unicode, but not its ends of lines and paragraphs
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
TRUST_FLAG = "--trust-code"  # the user's word that files may name code


def pattern_error(pattern: str) -> str:
    """Returns why a text is not a regular expression; empty if it is one."""
    try:
        re.compile(pattern)
    except RecursionError:
        return "its parentheses are too deep"
    except (re.error, OverflowError, FutureWarning) as error:  # the last where warnings are errors
        return str(error)
    return ""


def counted(number: float, noun: str, nouns: str = "") -> str:
    """Returns a number with its noun, such as ``1 stage`` or ``4 stages``."""
    figure = f"{number:.0f}" if number % 1 == 0 else f"{number:g}"
    return f"{figure} {noun if number == 1 else nouns or f'{noun}s'}"


def numbered(noun: str, numbers: Collection[object], between: str = ", ") -> str:
    """Returns things by their numbers, such as ``worker 1`` or ``workers 1, 2``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {between.join(map(str, numbers))}"


def places_text(noun: str, places: Iterable[int], stages: int, num_places: int) -> str:
    """Returns slots by their places, such as ``blocks 0, 1``, or ``block 0 of pipeline 0 and block 2 of pipeline 1``.

    `stages` are those of a pipeline, and `num_places` the slots of all pipelines.
    """
    lines: dict[int, list[int]] = {}
    for place in sorted(places):
        lines.setdefault(place // stages, []).append(place % stages)
    return " and ".join(
        numbered(noun, line) + (f" of pipeline {pipeline}" if num_places > stages else "")
        for pipeline, line in lines.items()
    )


def spans(numbers: Iterable[int]) -> list[str]:
    """Returns numbers in their order, three or more consecutive ones as one text, such as ``0-3``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes with four digits, such as ``27.13 MB`` or ``12.3 kB``."""
    return f"{num_bytes / 1e6:.4g} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.4g} kB"


def exit_text(code: int) -> str:
    """Returns how a process has ended, such as ``was killed (SIGKILL)``; `code` is negative for a signal."""
    return f"was killed ({_SIGNALS.get(-code, f'signal {-code}')})" if code < 0 else f"exited with code {code}"


def sentence(text: str) -> str:
    """Returns a text as a sentence: with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def not_kept_words(step: int | None, why: str) -> str:
    """Returns in words that no checkpoint was kept after that of a step; empty without a reason."""
    after = "" if step is None else f" after that of step {step}"
    return f"no checkpoint{after} was kept: {why}" if why else ""


def flags(name: str, values: Iterable[str]) -> list[str]:
    """Returns the words of a command that give an option once for each value."""
    return [word for each in values for word in (name, each)]


def trust_words(needs_trust: object) -> list[str]:
    """Returns the words of a command for files that name code of the user's, if the command needs them."""
    return [TRUST_FLAG] if needs_trust else []


def printable(text: str) -> str:
    """Returns a text without escape sequences, and with ``?`` for each control character but tab and newline."""
    return text if text.isprintable() else _DOUBTFUL.sub(_harmless, _SEQUENCES.sub("", text))


def _harmless(match: re.Match[str]) -> str:
    character = match.group()
    is_space = character.isspace() and character >= _FIRST_SPACE and character not in _ENDS
    return character if is_space or character.isprintable() else "?"
