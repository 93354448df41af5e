"""A GPU that is none: its tensors lie in host memory with a mark, and everything that a GPU would refuse is refused.

Each thread that starts under the double has two modes of torch. One sees calls from Python: it gives marked tensors the
device ``cuda:0``, and is the only way between host and device (`to`, `cpu`, `copy_`). The other sees each operation
inside of torch, those of autograd and optimizers too: an operation on marked tensors gives marked ones, and one that
mixes both raises, as CUDA does; a number (no dimension) of the host may go along. Draws on marked tensors come from a
generator of the device, which must have been seeded. The arithmetic is the host's, so a job has the bits of the host.
`tests.doubles.fake_streams` sees each use of memory by a stream, and of pinned memory by the host, and finds races.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.doubles.fake_memory import FakeMemory
from tests.doubles.fake_streams import FakeStream, FakeStreams

PLACE = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_aten = torch.ops.aten
_MAY_MIX = {
    _aten.copy_.default,
    _aten._foreach_copy_.default,
    _aten._copy_from.default,
}


_DEVICE, _IS_CUDA, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_OF_TENSORS = (
    *(_DEVICE, _IS_CUDA, _IS_CPU, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.numpy, Tensor.__array__),
    *(Tensor.tolist, Tensor.is_pinned, Tensor.pin_memory),
)
_MANY = 512
COPIES = "copies to the host"  # the name of a thread


class MixedDevicesError(RuntimeError):
    """An operation on tensors of the host and of the device."""


class FakeGpu:
    """The marks of the device's memory, its generator, and the numbers of copies between host and device."""

    def __init__(self, counts_memory: bool = False) -> None:
        self._marked: dict[int, StorageWeakRef] = {}  # a weak reference keeps its address from another storage
        self._num_marks = 0
        self._pinned: dict[int, StorageWeakRef] = {}
        self.rooms_made: Counter[int] = Counter()  # allocations of pinned memory by size; torch keeps what is free
        self._size: dict[int, int] = {}  # of pinned memory
        self.streams = FakeStreams()
        self.memory = FakeMemory()
        self.counts_memory = counts_memory
        self._lock = self.streams.lock
        self.generator = torch.Generator()
        self.copies: Counter[str] = Counter()
        self.opened_in: set[str] = set()

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies on the device."""
        with torch._C.DisableTorchFunction(), self._lock:
            return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._marked

    def mark(self, tensor: Tensor) -> Tensor:
        """Lays the memory of a new tensor on the device."""
        with torch._C.DisableTorchFunction(), self._lock:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._num_marks += 1
            for address in list(self._marked if self._num_marks % _MANY == 0 else self.streams.used_elsewhere):
                if self._marked[address].expired():
                    del self._marked[address]
                    self.streams.freed(address)
            self.streams.allocated(reference.cdata)
            self._marked[reference.cdata] = reference
            if self.counts_memory:
                num_bytes = tensor.untyped_storage().nbytes()
                self.memory.allocated(self.streams.maker[self.streams.present], reference, num_bytes)
        return tensor

    def unmark(self, tensor: Tensor) -> Tensor:
        """Lays the memory of a new tensor on the host."""
        with torch._C.DisableTorchFunction(), self._lock:
            address = tensor.untyped_storage()._cdata
            self._marked.pop(address, None)
            self._pinned.pop(address, None)
            self.streams.forget(address)
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Lays the memory of a new tensor into pinned memory of the host."""
        with torch._C.DisableTorchFunction(), self._lock:
            reference = StorageWeakRef(tensor.untyped_storage())
            size = 1 << max(0, tensor.untyped_storage().nbytes() - 1).bit_length()
            free = [key for key, each in self._pinned.items() if each.expired() and self._size[key] == size]
            if free:
                del self._pinned[free[0]]
                self.streams.forget(free[0])  # torch waits for the copies from memory that it keeps
            else:
                self.rooms_made[size] += 1
            self._pinned[reference.cdata] = reference
            self._size[reference.cdata] = size
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies in pinned memory of the host."""
        with torch._C.DisableTorchFunction(), self._lock:
            return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._pinned

    def is_pinned_or_there(self, tensor: Tensor) -> bool:
        """Returns whether a copy of a tensor to the other side, or from there, may be asynchronous."""
        return self.holds(tensor) or self.is_pinned(tensor)

    def moved(self, tensor: Tensor, to: torch.device, *, is_async: bool = False) -> Tensor:
        """Returns a copy on the other side; the tensor itself if it is there."""
        if self.holds(tensor) == (to.type == "cuda"):
            return tensor
        there = to.type == "cuda"
        self.copies["to device" if there else "to host"] += 1
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            copy = torch.clone(tensor)
        copy = self.mark(copy) if there else self.unmark(copy)
        self.copied(copy, tensor, is_async=is_async and self.is_pinned(tensor))
        return copy

    def copied(self, to: Tensor, source: Tensor, *, is_async: bool) -> None:
        """Counts a copy between host and device as an operation; the host waits for one that is not asynchronous."""
        read, written = memories([source]), memories([to])
        with self._lock:
            self.streams.operation(read, written, "a copy")
        if not is_async:
            self.streams.await_present("copy")

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Lets a thread see the device."""
        with _Calls(self), _Operations(self):
            yield


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the numbers of the memory of tensors."""
    with torch._C.DisableTorchFunction():
        return {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}


def _record(tensor: Tensor, gpu: FakeGpu, stream: FakeStream) -> None:
    with gpu.streams.lock:
        for memory in memories([tensor]):
            gpu.streams.record(memory, stream)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    found = kwargs.get("device")
    for each in () if found is not None else args:
        if isinstance(each, torch.device) or (isinstance(each, str) and each.partition(":")[0] in ("cpu", "cuda")):
            found = each
    return None if found is None else torch.device(found)


def _autocast(of_torch: Any, kind: str, **options: Any) -> Any:
    """Returns the block of the host, with the casts of the host: the arithmetic is the host's."""
    return of_torch("cpu" if kind == "cuda" else kind, **options)


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
        is_pinned = kwargs.pop("pin_memory", False)
        if is_pinned and to is not None and to.type == "cuda":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if to is None or to.type != "cuda":
            made = func(*args, **kwargs)
            return gpu.pin(made) if is_pinned else made
        generator = kwargs.get("generator")
        if generator is not None and generator is not gpu.generator:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        kwargs["device"] = _HOST
        made = gpu.mark(func(*args, **kwargs))
        if "empty" not in func.__name__:
            with gpu.streams.lock:
                gpu.streams.operation((), memories([made]), func.__name__)
        return made

    def _of_tensor(self, func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gpu, is_there = self._gpu, self._gpu.holds(tensor)
        if func in (_IS_CUDA, _IS_CPU):
            return is_there == (func == _IS_CUDA)
        if is_there and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; copy it to the host first")
        answers: dict[Any, Callable[[], Any]] = {
            _DEVICE: lambda: PLACE if is_there else _HOST,
            Tensor.to: lambda: self._to(tensor, args, kwargs),
            Tensor.is_pinned: lambda: gpu.is_pinned(tensor),
            Tensor.pin_memory: lambda: gpu.pin(torch.clone(tensor)),
            Tensor.tolist: lambda: func(gpu.moved(tensor, _HOST)),
            Tensor.cpu: lambda: gpu.moved(tensor, _HOST),
            Tensor.cuda: lambda: gpu.moved(tensor, PLACE),
        }
        return answers[func]() if func in answers else func(tensor, *args, **kwargs)

    def _to(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        gpu, to = self._gpu, _device_of(args, kwargs)
        if args and isinstance(args[0], Tensor):
            to, args = (PLACE if gpu.holds(args[0]) else _HOST), (args[0].dtype, *args[1:])
        rest = [each for each in args if not isinstance(each, (torch.device, str))]
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        is_async = bool(kwargs.pop("non_blocking", False))
        moved = tensor if to is None else gpu.moved(tensor, to, is_async=is_async)
        return moved.to(*rest, **kwargs) if rest or kwargs else moved


class _Operations(TorchDispatchMode):
    """Sees the operations inside of torch."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch imports its compiler at the first operation, which takes seconds."""
        return False

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
        self._used(func, args, kwargs, any(there), bool(hosts))
        with self._drawing(func, any(there)):
            out = func(*args, **kwargs)
        before = {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}
        place = gpu.mark if any(there) else gpu.unmark  # the storage of a new tensor may have an old address
        for each in tree_flatten(out)[0]:
            is_new = isinstance(each, Tensor) and each.layout is torch.strided
            if is_new and each.untyped_storage()._cdata not in before:
                place(each)
                if any(there):
                    with gpu.streams.lock:
                        gpu.streams.operation((), memories([each]), str(func))
        return out

    def _used(self, func: Any, args: Any, kwargs: Any, is_there: bool, mixes: bool) -> None:
        """Tells the streams what memory an operation reads and writes; new memory comes later."""
        if func.is_view:
            return
        streams = self._gpu.streams
        reads, writes = set[int](), set[int]()
        for at, argument in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found = memories(each for each in tree_flatten(value)[0] if isinstance(each, Tensor))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).update(found)
        with streams.lock:
            if is_there:
                streams.operation(reads - writes, writes, str(func))
            else:
                streams.host_uses(reads - writes, writes, str(func))
        if func is _aten._local_scalar_dense.default and is_there:
            streams.await_present("value")
        elif is_there and mixes and func in _MAY_MIX:
            is_async = len(args) > 2 and args[2] and all(map(self._gpu.is_pinned_or_there, args[:2]))
            if not is_async:
                streams.await_present("copy")

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
def fake_gpu(num_gpus: int = 1, *, counts_memory: bool = False) -> Iterator[FakeGpu]:
    """Gives this process GPUs with one memory; threads that start in the block see it, and so does this one.

    The bytes of each worker are counted only with `counts_memory`, as it takes time; else they are 0. The block ends
    when the threads that copy have opened the double: one that is late would look for a real GPU.
    """
    gpu, run = FakeGpu(counts_memory), threading.Thread.run
    copying, has_opened = list[threading.Thread](), set[threading.Thread]()

    def run_with_modes(thread: threading.Thread) -> None:
        with gpu.modes():
            run(thread)

    start = threading.Thread.start

    def start_noted(thread: threading.Thread) -> None:
        if thread.name == COPIES:
            copying.append(thread)
        start(thread)

    def opened(place: torch.device) -> None:
        gpu.streams.enter()
        has_opened.add(threading.current_thread())

    def name_of(place: torch.device) -> str:
        gpu.opened_in.add(threading.current_thread().name)
        return "the double of a GPU"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", run_with_modes)
        patch.setattr(threading.Thread, "start", start_noted)
        patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        patch.setattr(torch.cuda, "set_device", opened)
        patch.setattr(torch.cuda, "get_device_name", name_of)
        gpu.streams.patch(patch)
        gpu.memory.patch(patch)
        patch.setattr(torch, "autocast", partial(_autocast, torch.autocast))
        patch.setattr(Tensor, "record_stream", partialmethod(_record, gpu))  # torch takes no stream but its own
        patch.setattr(torch.cuda, "default_generators", (gpu.generator,) * num_gpus)
        with gpu.modes():
            yield gpu
        until_s = time.monotonic() + 10
        while any(each.is_alive() for each in {*copying} - has_opened) and time.monotonic() < until_s:
            time.sleep(0.001)
