"""Attention masks of transformers that only a microbatch with padding has.

For a microbatch without padding, transformers makes no mask, and its attention calls other kernels, whose bits can
differ: keys and values of fewer heads are not repeated there. A record has one way for both. So the mask is always
made, each microbatch decides about it by the function of transformers, and each attention leaves the mask out where the
decision says so.

Rule: nothing here imports transformers. A version without these functions is recorded as other code is.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.models.traced.recording import CodeLine

_PACKAGE = "transformers"
_DECISIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_FILES = ("masking_utils.py", "integrations/sdpa_attention.py")
_READ = ("softcap", "output_attentions")  # by the attention, out of its other arguments
_FACTS = ("num_key_value_groups", "is_causal", "training")


class MaskRecorder(Protocol):
    """What is needed of a recorder of calls."""

    def is_traced(self, tensor: Tensor) -> bool:
        """Returns whether a tensor depends on data or weights, and an operation on it would be recorded."""

    def memory(self, tensor: Tensor) -> int | None:
        """Returns the number of the memory in which a tensor of this forward lies; None for another tensor."""

    def record(self, target: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `run`, and records the call as one of `target`."""


class MaskDecision:
    """The function of an operation that decides whether a microbatch needs no mask: a bool tensor []."""

    def __init__(self, ignores: Callable[..., Any]):
        self._ignores = ignores

    @property
    def is_of_transformers(self) -> bool:
        """Whether the decision is that of transformers itself, which depends on its arguments alone."""
        return _is_of_transformers(self._ignores)

    @property
    def content(self) -> tuple[object, ...]:
        """What it consists of: the same for decisions that cannot differ."""
        return MaskDecision, self._ignores

    def __call__(self, padding: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the decision of transformers about the padding of a microbatch."""
        return torch.tensor(bool(self._ignores(padding, *args, **kwargs)), device=padding.device)


class OptionalMaskAttention:
    """The function of an operation that calls an attention, with its mask or without."""

    def __init__(self, attend: Callable[..., Any], module: nn.Module):
        self._attend = attend
        self._facts = SimpleNamespace(**{name: getattr(module, name) for name in _FACTS if hasattr(module, name)})

    @property
    def is_of_transformers(self) -> bool:
        """Whether the attention is that of transformers itself, which depends on its arguments alone."""
        return _is_of_transformers(self._attend)

    @property
    def content(self) -> tuple[object, ...]:
        """What it consists of: the same for attentions that cannot differ."""
        return OptionalMaskAttention, self._attend, repr(self._facts)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, ignores: Tensor, **kwargs: Any) -> Any:
        """Returns what the attention returns; `ignores` is the decision about the mask."""
        return self._attend(self._facts, query, key, value, None if ignores.item() else mask, **kwargs)


def _is_of_transformers(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename in _places(_FILES)


def asking_for_others() -> set[str]:
    """Returns the files of transformers that ask whether a tensor is a tracer's for the code that calls them."""
    return _places(["utils/import_utils.py"])


def only_warns(line: CodeLine) -> bool:
    """Returns whether a line is in the function of transformers that warns of padding, and does nothing else."""
    return line.function == "warn_if_padding_and_no_attention_mask" and line.file in _places(["modeling_utils.py"])


def _places(names: Iterable[str]) -> set[str]:
    folder = Path(getattr(sys.modules.get(_PACKAGE), "__file__", None) or "").parent
    return {str(folder / name) for name in names}


@contextlib.contextmanager
def optional_masks(recorder: MaskRecorder) -> Iterator[None]:
    """Lets a recorder see masks, decisions about them and attention of transformers, if that is loaded."""
    masking, models = (sys.modules.get(f"{_PACKAGE}.{name}") for name in ("masking_utils", "modeling_utils"))
    masks = getattr(getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None), "_global_mapping", {})
    attentions = getattr(getattr(models, "ALL_ATTENTION_FUNCTIONS", None), "_global_mapping", {})
    if "sdpa" not in masks or "sdpa" not in attentions or not all(hasattr(masking, name) for name in _DECISIONS):
        yield
        return
    watch = _SeenMasks(recorder)
    before = {name: getattr(masking, name) for name in _DECISIONS}, masks["sdpa"], attentions["sdpa"]
    try:
        for name, ignores in before[0].items():
            setattr(masking, name, watch.deciding(ignores))
        masks["sdpa"], attentions["sdpa"] = watch.making(before[1]), watch.attending(before[2])
        yield
    finally:
        for name, ignores in before[0].items():
            setattr(masking, name, ignores)
        masks["sdpa"], attentions["sdpa"] = before[1:]


class _SeenMasks:
    """The masks of one forward, each with the decision about it."""

    def __init__(self, recorder: MaskRecorder):
        self._recorder = recorder
        self._decision: Tensor | None = None  # about the mask that is being made
        self._decisions: dict[int | None, Tensor] = {}  # by the memory of the mask

    def deciding(self, ignores: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that has the mask made, and records the decision whether it is needed."""

        def decide(padding: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            if padding is None or not self._recorder.is_traced(padding):
                return ignores(padding, *args, **kwargs)
            decision = MaskDecision(ignores)
            self._decision = self._recorder.record(decision, decision, (padding, *args), kwargs)
            return False

        return decide

    def making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes a mask, and keeps the decision about it."""

        def made(*args: Any, **kwargs: Any) -> Any:
            self._decision = None
            mask = make(*args, **kwargs)
            if self._decision is not None and isinstance(mask, Tensor):
                self._decisions[self._recorder.memory(mask)] = self._decision
            return mask

        return made

    def attending(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an attention that is recorded as one operation if its mask may be left out."""
        names = {*inspect.signature(attend).parameters, *_READ}

        def attended(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
        ) -> Any:
            mask = attention_mask
            is_traced = isinstance(mask, Tensor) and self._recorder.is_traced(mask)
            decision = self._decisions.get(self._recorder.memory(mask)) if is_traced else None
            if decision is None:
                return attend(module, query, key, value, mask, **kwargs)
            call = OptionalMaskAttention(attend, module)
            named = {name: value for name, value in kwargs.items() if name in names}
            return self._recorder.record(call, call, (query, key, value, mask, decision), named)

        return attended
