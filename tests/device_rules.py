"""Rules for the places of tensors: who makes one says where, and one room speaks to CUDA; pure, as `house_rules`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from tests.house_rules import Module, dotted

_CONSTRUCTORS = frozenset(
    """
    arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm
    scalar_tensor sparse_coo_tensor tensor zeros Generator
    """.split()
)
_MODES = frozenset({"autocast"})  # of one device: the device's own block
DEVICE_ROOM = "engine/runtime/device/"


def placeless(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yields (path, place) of each call that makes a tensor, a generator or a mode without saying on which device."""
    for module in modules:
        if module.path.startswith(DEVICE_ROOM):
            continue
        for node in module.nodes:
            if not isinstance(node, ast.Call) or not (name := dotted(node.func)).startswith("torch."):
                continue
            last = name.removeprefix("torch.").removeprefix("amp.")
            keywords = {each.arg for each in node.keywords}
            if last in _MODES or (last in _CONSTRUCTORS and not keywords & {"device", None}):
                yield module.path, f"{module.path}:{node.lineno}: {name} without a device"


def cuda_elsewhere(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yields (path, place) of each use of CUDA outside of the room of devices."""
    for module in modules:
        if module.path.startswith(DEVICE_ROOM):
            continue
        for node in module.nodes:
            if not isinstance(node, ast.Attribute):
                continue
            if dotted(node) in ("torch.cuda", "torch.backends.cuda") or (node.attr == "cuda" and not dotted(node)):
                yield module.path, f"{module.path}:{node.lineno}: CUDA outside of {DEVICE_ROOM}"


def against_reasons(found: Iterable[tuple[str, str]], reasons: Mapping[str, str]) -> list[str]:
    """Returns the places that no reason covers, and the reasons that cover nothing; a folder's reason ends with /."""
    used: set[str] = set()
    wrong = []
    for path, place in found:
        covering = [each for each in reasons if path == each or (each.endswith("/") and path.startswith(each))]
        used.update(covering)
        if not covering:
            wrong.append(place)
    return wrong + [f"{each}: a reason that is no longer needed" for each in reasons if each not in used]
