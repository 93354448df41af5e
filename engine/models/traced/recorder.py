"""Records one forward of a module, with torch's modes for functions and for dispatch.

Every function of torch that the module calls is recorded with its arguments, and so it runs again with the same bits
and the same gradients. What a forward does beside that does not happen again: Python code, prints, plain attributes.

Rules: only facts such as shapes and types may leave a tensor that depends on data or weights, so that every microbatch
takes the same path; `engine.models.traced.reads` has what becomes of a value. An ATen op dispatched outside a recorded
call is refused: the function mode did not see it. A submodule that cannot be recorded becomes one operation, which
calls it; a model that cannot is refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.models.layers import Tensors, flatten, unflatten
from engine.models.traced.optional_masks import asking_for_others, only_warns, optional_masks
from engine.models.traced.reads import (
    ValueCheck,
    answering,
    has_numbers,
    has_sizes_by_value,
    is_assertion,
    is_checkable,
    is_silent,
    is_sized_by_argument,
    sizing_args,
)
from engine.models.traced.recording import (
    REGISTER,
    SUBMODULE,
    BufferWrite,
    CodeLine,
    Context,
    HeldTensor,
    LeafCall,
    ModuleCall,
    NamedState,
    TensorSource,
    TorchCall,
    Trace,
    TracedValue,
    UnrecordableError,
    own_line,
    places_of,
    tensors_in,
    way_out,
)

# About how much an operation computes: the measure by which a module is cut into equal pieces, on every machine.

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear"})


def work_of(function: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns about the number of floating point operations: exact for products, else one for each number made."""
    output = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(output, Tensor):
        return 0
    name = function.overloadpacket.__name__
    tensors = [each for each in args if isinstance(each, Tensor)]
    if name in _PRODUCTS:
        left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
        return 2 * output.numel() * left.shape[-1]
    if name.startswith("convolution") or name.startswith("mkldnn_convolution"):
        return 2 * output.numel() * math.prod(tensors[1].shape[1:])
    if "attention" in name:
        return 4 * output.numel() * tensors[1].shape[-2]
    return output.numel()


# Shows the recorder what torch's function mode does not see: every dispatch, and the user's autograd functions.
_alone = threading.Semaphore()  # the patch belongs to the process, where workers may be threads
_apply = torch.autograd.Function.__dict__["apply"]


class DispatchGuard(TorchDispatchMode):
    """Calls `sees` with each operation that torch dispatches, its arguments and its result."""

    def __init__(self, sees: Callable[[Any, tuple[Any, ...], Any], None]):
        super().__init__()
        self._sees = sees

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch._dynamo: more than a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._sees(func, args, result)
        return result


@contextlib.contextmanager
def recorded_functions(is_recording: Callable[[], bool], record: Callable[..., Any]) -> Iterator[None]:
    """Gives calls of own autograd functions in this thread to `record` while `is_recording`."""
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _apply.__get__(None, cls)
        if threading.get_ident() != thread or not is_recording():
            return bound(*args, **kwargs)
        return record(bound, bound, args, kwargs)

    with _alone:
        setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.autograd.Function, "apply", _apply)  # noqa: B010


_FACTS = frozenset(
    """
    shape size dim ndim ndimension dtype device layout numel nelement stride storage_offset is_floating_point is_complex
    is_signed is_contiguous requires_grad is_leaf element_size itemsize nbytes __len__ is_sparse is_quantized is_nested
    is_cuda is_cpu is_meta is_mkldnn is_same_size get_device grad_fn names _version __repr__ __format__ type
    is_inference is_conj is_neg __hash__ _is_view
    """.split()
)
_SIZES = frozenset("shape size numel nelement __len__ stride is_same_size nbytes".split())  # which values can decide
_PARTS = frozenset("__iter__ unbind split chunk tensor_split split_with_sizes hsplit vsplit dsplit".split())
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})  # each operation knows its context
_RETURNED = "return a tensor instead, or put the lines that use the number into a submodule together with that one"
_PLAIN = (numbers.Number, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type)


class CallRecorder(TorchFunctionMode):
    """Records the forward of `module`; submodules at the paths in `leaves` are called as a whole.

    A value that one of the lines in `checked` reads is recorded as a check of that value. If microbatches are variable
    in their sizes, a size is such a value too.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Tensors,
        targets: Tensors,
        leaves: frozenset[str],
        checked: frozenset[CodeLine] = frozenset(),
        *,
        is_variable: bool = False,
    ):
        super().__init__()
        self.trace = Trace(base=_context())
        self._module, self._leaves, self._checked = module, leaves, checked
        self._names: dict[int, list[NamedState]] = {}  # by id of a parameter or buffer
        self._values: dict[int, TracedValue] = {}  # by id of any other tensor
        self._memories: dict[int, int] = {}  # by address of the storage object
        self._alive: list[Any] = []  # keeps ids and addresses unique
        self._of_data: set[TensorSource] = set()  # values that depend on data, weights or random numbers
        self._path: list[str] = []
        self._sized_by_values: set[TracedValue] = set()  # whose sizes depend on data, as those of nonzero
        self._draws, self._work, self._sizes, self._is_reading = False, 0, False, False  # of the running operation
        self._has_read = False  # the submodule that is called as a whole has taken a value out of a tensor
        self._is_inside = False
        for place, tensor in places_of(module):
            self._names.setdefault(id(tensor), []).append(place)
            self.trace.memory[place] = self._memory(tensor)
        self.trace.inputs = tuple(self._made(each, is_of_data=True) for each in inputs)
        self.trace.targets = tuple(self._made(each, is_of_data=True) for each in targets)
        if is_variable:
            self._sized_by_values |= {*self.trace.inputs, *self.trace.targets}

    def run(self, call: Callable[[nn.Module], Any]) -> Any:
        """Runs `call` with the module and returns its result. Raises UnrecordableError."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorded_functions(self._is_recording, self.record))
            stack.enter_context(answering(self._answer))
            stack.enter_context(optional_masks(self))
            for path, module in self._module.named_modules():
                stack.callback(module.register_forward_pre_hook(functools.partial(self._enter, path)).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
                if path in self._leaves:
                    stack.callback(vars(module).pop, "forward")
                    vars(module)["forward"] = functools.partial(self._call_leaf, path, module.forward)
            stack.enter_context(DispatchGuard(self.sees))
            stack.enter_context(self)
            return call(self._module)

    def source(self, tensor: Tensor) -> TensorSource:
        """Returns where a tensor comes from; of a tied one, the name in the running submodule if it has one."""
        if places := self._names.get(id(tensor)):
            return next((each for each in places if self._path and each.holder == self._path[-1]), places[0])
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        if tensor.requires_grad:
            words = "a tensor with gradients that is not a parameter of the module"
            raise self.refusal(words, "register it as a parameter")
        self._alive.append(tensor)
        return HeldTensor(tensor)

    def refusal(self, words: str, hint: str) -> UnrecordableError:
        """Returns the error about the line of the user's code that is running."""
        return UnrecordableError(words, hint, own_line(), self._path[-1] if self._path else "")

    def sees(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Takes notice of an operation below the recorded functions."""
        if not self._is_inside and function is torch.ops.aten.lift_fresh.default:
            raise self.refusal("it makes a tensor of an array", REGISTER)
        if not self._is_inside:
            raise self.refusal(f"{function} runs where torch shows no function to a TorchFunctionMode", SUBMODULE)
        self._draws |= torch.Tag.nondeterministic_seeded in function.tags
        self._sizes |= has_sizes_by_value(function, args)
        self._is_reading |= function is torch.ops.aten._local_scalar_dense.default
        self._work += work_of(function, args, result)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Records a call of torch, and makes it."""
        kwargs = dict(kwargs or {})
        if self._is_inside or _name(func) in _MODES:
            result = func(*args, **kwargs)
            if result is not None and _name(func) not in _FACTS:
                self._has_read |= not any(True for _ in tensors_in(result))
            return result
        if func is Tensor.__iter__:
            self._refuse_parts(func, args, "iterates over")
            with self:
                return iter(args[0].unbind(0))
        return self.record(func, func, args, kwargs)

    def record(self, target: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `run`, and records the call as one of `target`."""
        before = [(each, each._version) for each in tensors_in((args, kwargs))]
        operation = TorchCall(
            target, self._plain(args, target), self._plain(kwargs, target), None, CodeLine(), _context()
        )
        self._is_inside, self._draws, self._work = True, False, 0
        self._sizes = self._is_reading = self._has_read = False
        try:
            result = run(*args, **kwargs)
        finally:
            self._is_inside = False
        if result is NotImplemented:
            return result
        written = [each for each, version in before if each._version != version]
        if not written and not any(True for _ in tensors_in(result)) and not is_silent(target):
            return self._leaves_torch(target, operation, result)
        for source in map(self.source, written):
            if isinstance(source, HeldTensor):
                raise self.refusal("it overwrites a tensor that is not a buffer", "register it as a buffer")
            if isinstance(source, NamedState) and not source.is_buffer:
                words = f"it overwrites the parameter {source.name!r}"
                raise self.refusal(words, "only the optimizer changes a parameter")
        operation.written = frozenset(self._memory(each) for each in written)
        operation.draws, operation.work, operation.line = self._draws, self._work, own_line()
        if isinstance(target, LeafCall):
            operation.leaf_places = tuple(
                place for place, _ in places_of(self._module) if place.name.startswith(f"{target.path}.")
            )
        is_of_data = self._draws or any(self._depends(each) for each in operation.sources())
        if isinstance(result, (tuple, list)) and not self._sizes:
            self._refuse_parts(target, args, "cuts")
        operation.results = self._results(result, is_of_data)
        if self._has_new_sizes(_name(target), args, kwargs) or any(
            map(self._is_sized, sizing_args(_name(target), args))
        ):
            self._sized_by_values |= {each for each in operation.values() if self.trace.shapes[each][1]}
        if is_of_data:
            self._of_data |= {self._values[id(each)] for each in written if id(each) in self._values}
        self.trace.operations.append(operation)
        return result

    def _is_recording(self) -> bool:
        return not self._is_inside

    def note_buffers(self, before: Mapping[str, Tensor]) -> None:
        """Records buffers that the forward has given another tensor."""
        for place, tensor in places_of(self._module):
            if place.is_buffer and before.get(place.name) is not tensor:
                source = self.source(tensor)
                write = BufferWrite(place)
                self.trace.operations.append(TorchCall(write, (source,), {}, None, CodeLine(), self.trace.base))

    def _leaves_torch(self, target: Any, operation: TorchCall, result: Any) -> Any:
        """Returns the result of a call without tensors, which must be a fact about tensors or depend on none."""
        name, line = _name(target), own_line()
        is_size = name in _SIZES and any(source in self._sized_by_values for source in operation.sources())
        if name in _FACTS and not is_size:
            return result
        if result is not None and not any(self._depends(each) for each in operation.sources()):
            return result
        if result is None:
            raise self.refusal(f"{name} changes a tensor unseen", SUBMODULE)
        is_checked = line in self._checked or is_assertion()
        if is_checkable(result) and is_checked:
            self.trace.operations.append(replace(operation, function=ValueCheck(target, result, line), line=line))
            return result
        error = self.refusal(f"{name} gives Python a value", way_out(name, line))
        error.is_checkable = is_checkable(result)
        raise error

    def _refuse_parts(self, target: Any, args: tuple[Any, ...], does: str) -> None:
        """Raises the error about a tensor of unknown size whose parts become several tensors."""
        if any(map(self._is_sized, args)) and _name(target) in _PARTS:
            raise self.refusal(f"{_name(target)} {does} a tensor whose size depends on values", SUBMODULE)

    def _has_new_sizes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether values decide the sizes of what the operation has made."""
        return self._sizes or (self._is_reading and is_sized_by_argument(name, args, kwargs))

    def _is_sized(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and self._values.get(id(tensor)) in self._sized_by_values

    def memory(self, tensor: Tensor) -> int | None:
        """Returns the number of the memory in which a tensor of this forward lies; None for another tensor."""
        return self.trace.memory.get(self._values[id(tensor)]) if id(tensor) in self._values else None

    def _answer(self, tensor: Tensor) -> bool:
        if not self.is_traced(tensor):
            return False
        line = own_line(asking_for_others())
        self.trace.asking += [] if only_warns(line) else [line]
        return True

    def is_traced(self, tensor: Tensor) -> bool:
        """Returns whether a tensor depends on data or weights, and an operation on it would be recorded."""
        if self._is_inside or not self._is_known(tensor):
            return False
        return id(tensor) in self._names or self._values[id(tensor)] in self._of_data

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._names or id(tensor) in self._values

    def _depends(self, source: TensorSource) -> bool:
        return isinstance(source, NamedState) or source in self._of_data

    def _made(self, tensor: Tensor, is_of_data: bool) -> TracedValue:
        value = self._values[id(tensor)] = TracedValue(len(self._values))
        self._alive.append(tensor)
        self.trace.shapes[value] = (tensor.dtype, tensor.shape)
        self.trace.memory[value] = self._memory(tensor)
        if is_of_data:  # last: the calls above are recorded too, and may not depend on data
            self._of_data.add(value)
        return value

    def _memory(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            return -id(tensor)
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return self._memories.setdefault(storage._cdata, len(self._memories))

    def _results(self, result: Any, is_of_data: bool) -> Any:
        if isinstance(result, Tensor):
            # An operation in place returns its argument.
            return None if self._is_known(result) else self._made(result, is_of_data)
        if isinstance(result, (tuple, list)):
            return tuple(self._results(each, is_of_data) for each in result)
        if result is None:
            return None
        raise self.refusal(f"it returns a {type(result).__name__} beside tensors", SUBMODULE)

    def _plain(self, value: Any, target: Any) -> Any:
        """Returns an argument with sources in place of tensors; refuses types that may hide tensors or code."""
        if isinstance(value, Tensor):
            return self.source(value)
        if value is None or value is Ellipsis or isinstance(value, (*_PLAIN, Enum)):
            return value
        if isinstance(value, tuple):
            return tuple(self._plain(each, target) for each in value)
        if type(value) is list:
            return [self._plain(each, target) for each in value]
        if isinstance(value, dict):
            return {key: self._plain(each, target) for key, each in value.items()}
        if type(value) is slice:
            return slice(*(self._plain(each, target) for each in (value.start, value.stop, value.step)))
        if target in (torch.tensor, torch.as_tensor, torch.asarray):
            raise self.refusal(f"it makes a tensor of a {type(value).__name__}", REGISTER)
        raise self.refusal(f"{_name(target)} is called with a {type(value).__name__}", SUBMODULE)

    def _call_leaf(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records a call of a whole submodule; its result has the form that the submodule gave it."""
        if self._is_inside:
            return forward(*args, **kwargs)
        whole: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Tensors:
            result = forward(*args, **kwargs)
            form, tensors = flatten(result)
            if (self._has_read or self._sizes) and has_numbers(form):
                raise self.refusal(f"{path} returns a number that it reads from a tensor", _RETURNED)
            # It may return a tensor that it was called with, and another one in the next microbatch.
            own = tuple(each.view_as(each) if self._is_known(each) else each for each in tensors)
            whole.append(unflatten(form, own) if any(map(self._is_known, tensors)) else result)
            return own

        self.record(LeafCall(path), run, args, kwargs)
        return whole[0]

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        if not self._is_inside:
            self._path.append(path)
            count = sum(call.path == path for call in self.trace.calls)
            number = len(self.trace.operations)
            self.trace.calls.append(ModuleCall(path, count, type(module).__name__, number, -1))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._is_inside and self._path:
            path = self._path.pop()
            index = max(at for at, call in enumerate(self.trace.calls) if call.path == path and call.last < 0)
            call = self.trace.calls[index]
            self.trace.calls[index] = ModuleCall(path, call.count, call.kind, call.first, len(self.trace.operations))


def _context() -> Context:
    return Context(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


def _name(function: Any) -> str:
    """Returns the name of a function or a property for messages."""
    name = getattr(function, "__name__", type(function).__name__)
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name
