"""A GPU that is none: its tensors lie in host memory with a mark, and everything that a GPU would refuse is refused.

Each thread that starts under the double has two modes of torch. One sees calls from Python: it gives marked tensors the
device ``cuda:0``, and is the only way between host and device (`to`, `cpu`, `copy_`). The other sees each operation
inside of torch, those of autograd and optimizers too: an operation on marked tensors gives marked ones, and one that
mixes both raises, as CUDA does; a number (no dimension) of the host may go along. Draws on marked tensors come from a
generator of the device, which must have been seeded. The arithmetic is the host's, so a job has the bits of the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

PLACE = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_aten = torch.ops.aten
_MAY_MIX = {
    _aten.copy_.default,
    _aten._foreach_copy_.default,
    _aten._copy_from.default,
}


_DEVICE, _IS_CUDA, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_OF_TENSORS = (_DEVICE, _IS_CUDA, _IS_CPU, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.numpy, Tensor.__array__)


class MixedDevicesError(RuntimeError):
    """An operation on tensors of the host and of the device."""


class FakeGpu:
    """The marks of the device's memory, its generator, and the numbers of copies between host and device."""

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}  # a weak reference keeps its address from another storage
        self._lock = threading.Lock()
        self.generator = torch.Generator()
        self.copies: Counter[str] = Counter()
        self.opened_in: set[str] = set()

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies on the device."""
        with torch._C.DisableTorchFunction(), self._lock:
            return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._marked

    def mark(self, tensor: Tensor) -> Tensor:
        """Lays the memory of a tensor on the device."""
        with torch._C.DisableTorchFunction(), self._lock:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._marked[reference.cdata] = reference
            if len(self._marked) % 512 == 0:
                for address in [key for key, each in self._marked.items() if each.expired()]:
                    del self._marked[address]
        return tensor

    def unmark(self, tensor: Tensor) -> Tensor:
        """Lays the memory of a tensor on the host."""
        with torch._C.DisableTorchFunction(), self._lock:
            self._marked.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def moved(self, tensor: Tensor, to: torch.device) -> Tensor:
        """Returns a copy on the other side; the tensor itself if it is there."""
        if self.holds(tensor) == (to.type == "cuda"):
            return tensor
        self.copies["to device" if to.type == "cuda" else "to host"] += 1
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            copy = torch.clone(tensor)
        return self.mark(copy) if to.type == "cuda" else self.unmark(copy)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Lets a thread see the device."""
        with _Calls(self), _Operations(self):
            yield


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    found = kwargs.get("device")
    for each in () if found is not None else args:
        if isinstance(each, torch.device) or (isinstance(each, str) and each.partition(":")[0] in ("cpu", "cuda")):
            found = each
    return None if found is None else torch.device(found)


class _Calls(TorchFunctionMode):
    """Sees the calls from Python."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and func in _OF_TENSORS:
            return self._of_tensor(func, first, args[1:], kwargs)
        to = _device_of((), kwargs)
        if kwargs.pop("pin_memory", False) and to is not None and to.type == "cuda":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if to is None or to.type != "cuda":
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator is not gpu.generator:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        kwargs["device"] = _HOST
        return gpu.mark(func(*args, **kwargs))

    def _of_tensor(self, func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_there = self._gpu.holds(tensor)
        if func == _DEVICE:
            return PLACE if is_there else _HOST
        if func in (_IS_CUDA, _IS_CPU):
            return is_there == (func == _IS_CUDA)
        if func is Tensor.to:
            return self._to(tensor, args, kwargs)
        if func in (Tensor.cpu, Tensor.cuda):
            return self._gpu.moved(tensor, _HOST if func is Tensor.cpu else PLACE)
        if is_there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy; copy it to the host first")
        return func(tensor, *args, **kwargs)

    def _to(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        gpu, to = self._gpu, _device_of(args, kwargs)
        if args and isinstance(args[0], Tensor):
            to, args = (PLACE if gpu.holds(args[0]) else _HOST), (args[0].dtype, *args[1:])
        rest = [each for each in args if not isinstance(each, (torch.device, str))]
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        moved = tensor if to is None else gpu.moved(tensor, to)
        kwargs.pop("non_blocking", None)
        return moved.to(*rest, **kwargs) if rest or kwargs else moved


class _Operations(TorchDispatchMode):
    """Sees the operations inside of torch."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = [each for each in flat if isinstance(each, Tensor)]
        there = [gpu.holds(each) for each in tensors]
        if func is _aten.set_.source_Storage_storage_offset:
            with torch._C.DisableTorchFunction():
                of_storage = flat[1]._cdata in gpu._marked
            if there[0] != of_storage:
                raise MixedDevicesError(f"{func}: a tensor of the one device is set to a storage of the other")
        hosts = [each for each, is_there in zip(tensors, there, strict=True) if not is_there and each.dim()]
        if any(there) and hosts and func not in _MAY_MIX:
            raise MixedDevicesError(
                f"{func}: expected all tensors on cuda:0, found {[list(e.shape) for e in hosts]} on cpu"
            )
        if any(there) and func in _MAY_MIX and hosts:
            gpu.copies["to device" if there[0] else "to host"] += 1
        with self._drawing(func, any(there)):
            out = func(*args, **kwargs)
        before = {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}
        place = gpu.mark if any(there) else gpu.unmark  # the storage of a new tensor may have an old address
        for each in tree_flatten(out)[0]:
            is_new = isinstance(each, Tensor) and each.layout is torch.strided
            if is_new and each.untyped_storage()._cdata not in before:
                place(each)
        return out

    @contextlib.contextmanager
    def _drawing(self, func: Any, is_there: bool) -> Iterator[None]:
        """Lets an operation on the device draw from the generator of the device."""
        if not (is_there and torch.Tag.nondeterministic_seeded in func.tags):
            yield
            return
        of_host = torch.default_generator.get_state()
        torch.default_generator.set_state(self._gpu.generator.get_state())
        yield
        self._gpu.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(of_host)


@contextlib.contextmanager
def fake_gpu(num_gpus: int = 1) -> Iterator[FakeGpu]:
    """Gives this process GPUs with one memory; threads that start in the block see it, and so does this one."""
    gpu, run = FakeGpu(), threading.Thread.run

    def run_with_modes(thread: threading.Thread) -> None:
        with gpu.modes():
            run(thread)

    def opened(place: torch.device) -> None:
        gpu.opened_in.add(threading.current_thread().name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", run_with_modes)
        patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        patch.setattr(torch.cuda, "set_device", opened)
        patch.setattr(torch.cuda, "synchronize", lambda place=None: None)
        patch.setattr(torch.cuda, "default_generators", (gpu.generator,) * num_gpus)
        patch.setattr(torch, "use_deterministic_algorithms", lambda *given, **options: None)
        with gpu.modes():
            yield gpu
