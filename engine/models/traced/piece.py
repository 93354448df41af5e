"""One piece of a module: a layer with its own parameters and buffers, under the names that they have in the module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from engine.models.layers import Tensors
from engine.models.traced.recording import NamedState
from engine.models.traced.source_text import PieceProgram
from engine.models.user_code import RAISED

Holders = tuple[tuple[str, str], ...]  # kind (parameters, buffers, module) and path of each


class Piece(nn.Module):
    """Runs one program in training and another one in evaluation."""

    def __init__(
        self,
        whole: nn.Module,
        places: Iterable[NamedState],
        leaves: Iterable[str],
        training: tuple[PieceProgram, Holders],
        evaluation: tuple[PieceProgram, Holders],
    ):
        super().__init__()
        for path in leaves:
            _make(self, path.rpartition(".")[0]).add_module(path.rpartition(".")[2], whole.get_submodule(path))
        for place in places:
            owner, holder = whole.get_submodule(place.holder), _make(self, place.holder)
            if holder is owner:
                continue  # it belongs to a leaf
            if place.is_buffer:
                persistent = place.key not in owner._non_persistent_buffers_set
                holder.register_buffer(place.key, owner._buffers[place.key], persistent)
            else:
                holder.register_parameter(place.key, owner._parameters[place.key])
        self._programs = (training[0], evaluation[0])
        # Dicts, in which other tensors may take the place of these.
        self._held = tuple(
            tuple(self._found(kind, path) for kind, path in holders) for _, holders in (training, evaluation)
        )

    def forward(self, *inputs: Tensor) -> Tensors:
        """Runs the operations of the piece; an exception shows the user's line."""
        mode = 0 if self.training else 1
        try:
            return self._programs[mode].run(self._held[mode], *inputs)
        except RAISED as error:
            raise self._programs[mode].blamed(error) from None

    def _found(self, kind: str, path: str) -> object:
        module = self.get_submodule(path)
        return module if kind == "module" else vars(module)[f"_{kind}"]


def _make(root: nn.Module, path: str) -> nn.Module:
    """Returns the submodule at a path, made of empty modules where there is none."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
