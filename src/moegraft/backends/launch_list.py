"""The launches of a call written down, to be made again for other tensors.

What a layer launches, on which grids and with which numbers, depends on the sizes of the call. All
layers of a model make the same launches in a step, each with tensors of its own, and finding them
out takes the host several times as long as making them. So the second call of a kind is watched:
each launch is written down with where its pointers point, which is into a tensor that the call was
given, or into memory that it took for itself. Later calls of the kind take that memory in few
pieces, put their own addresses in, and launch.

Whatever else happens in a watched call, such as a copy by torch or a pointer to memory that is
neither of the two, makes its kind one that is never written down: those calls go the plain way, as
do captures of CUDA graphs, and calls under torch's modes, which want to see what is allocated.

A list is never changed once it is made, so threads and streams may share it; all memory comes from
torch's allocator on the current stream, as in the plain way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Kinds of calls that one :class:`LaunchLists` knows; with more it begins anew.
MAX_KINDS = 64
#: Bytes that each piece of a call's memory starts on, as torch's allocator has it.
_ALIGNMENT = 512
#: Memory of this size is taken by itself, as in the plain way: what torch's allocator keeps of the
#: one serves the other.
_LARGE = 10 * 2**20
#: What pointers have in common with those of a watched call: kernels are made for it.
_POINTER_BITS = 15
_ALLOCATORS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


class Place(NamedTuple):
    """Where a pointer points: to tensor ``source`` of a call; behind them is its own memory."""

    source: int
    offset: int


class Launch(Protocol):
    """A launch that was written down."""

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        """Launch on a stream, with pointers into the tensors at ``bases``."""


class Unlisted(Exception):
    """A call can't be written down."""


class Watch(TorchDispatchMode):
    """Writes down the launches of this thread while it is entered.

    Args:
        inputs: the tensors of the call.

    Attributes:
        refusal: why the call can't be written down; None = it can so far.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.refusal: str | None = None
        self._inputs = inputs
        self._bases = {tensor.data_ptr(): i for i, tensor in enumerate(inputs)}
        self._spans = [_span(tensor) for tensor in inputs]
        # Of own memory the tensor, kept so that no address is used twice, and its place.
        self._own: list[tuple[torch.Tensor, Place]] = []
        self._memory = [0]
        self._launches: list[Launch] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keep what is allocated; anything but views of it is the end."""
        found = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            self._keep(found)
        elif not func.is_view:
            self.refuse(f"{func} runs besides the launches")
        return found

    def _keep(self, tensor: torch.Tensor) -> None:
        if self.refusal is None:
            size, inputs = tensor.untyped_storage().nbytes(), len(self._inputs)
            if size >= _LARGE:
                self._own.append((tensor, Place(inputs + len(self._memory), 0)))
                self._memory.append(size)
            else:
                self._own.append((tensor, Place(inputs, self._memory[0])))
                self._memory[0] += -(-size // _ALIGNMENT) * _ALIGNMENT

    def refuse(self, why: str) -> None:
        """Write nothing down, and keep no memory longer than the call does."""
        self.refusal = self.refusal or why
        self._own.clear()
        self._launches.clear()

    def add(self, make: Callable[[Watch], Launch]) -> None:
        """Write a launch down that :func:`watching` found itself in; ``make`` may refuse."""
        if self.refusal is None:
            try:
                self._launches.append(make(self))
            except Unlisted as error:
                self.refuse(str(error))

    def place(self, address: int) -> Place:
        """Return where an address is.

        Raises:
            Unlisted: in no tensor of the call and not in its memory, or perhaps in several.
        """
        if address in self._bases:
            return Place(self._bases[address], 0)
        for tensor, (source, offset) in self._own:
            start = tensor.data_ptr()
            if start <= address < start + tensor.untyped_storage().nbytes():
                return Place(source, offset + address - start)
        found = [i for i, (start, end) in enumerate(self._spans) if start <= address < end]
        if len(found) != 1:
            raise Unlisted(f"a pointer is in {len(found)} of the call's tensors")
        return Place(found[0], address - self._spans[found[0]][0])

    def finished(self) -> LaunchList | None:
        """Return the list; None when the call can't be written down."""
        if self.refusal is not None:
            return None
        return LaunchList(tuple(self._launches), tuple(self._memory) if any(self._memory) else ())


class LaunchList:
    """What one kind of calls launches.

    Args:
        launches: in order.
        memory: bytes of the pieces that a call takes for itself.
    """

    def __init__(self, launches: tuple[Launch, ...], memory: tuple[int, ...]) -> None:
        self._launches, self._memory = launches, memory

    def __call__(self, bases: list[int], device: torch.device, stream: int) -> None:
        """Make the launches for tensors at ``bases``."""
        own = [torch.empty(size, dtype=torch.uint8, device=device) for size in self._memory]
        bases = bases + [tensor.data_ptr() for tensor in own]
        for launch in self._launches:
            launch(bases, stream)


class _Mark(Enum):
    """What is known of a kind of calls without a list."""

    UNKNOWN, SEEN, REFUSED = range(3)


_UNKNOWN, _SEEN, _REFUSED = _Mark


class LaunchLists:
    """The lists of one function, by what its launches depend on.

    Attributes:
        refusals: why kinds of calls are not written down, for people.
    """

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self._lists: dict[Hashable, LaunchList | _Mark] = {}

    def run(self, kind: Hashable, inputs: Sequence[torch.Tensor], plain: Callable[[], Any]) -> None:
        """Do what ``plain()`` does, which is: launch kernels, on ``inputs`` and memory of its own.

        Args:
            kind: all that decides what is launched, but for addresses.
            inputs: every tensor that a kernel reads or writes and the call did not make, all of
                one GPU; the first may not be empty. Where one begins inside of another, kernels may
                not be given that place of the other: it is taken for the one's.
            plain: the plain way; what it returns is dropped.
        """
        if in_mode() or not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
            plain()
            return
        device = torch.cuda.current_device()
        stream: int = torch._C._cuda_getCurrentRawStream(device)
        self.run_on((kind, device), stream, inputs, plain)

    def run_on(
        self,
        kind: Hashable,
        stream: int,
        inputs: Sequence[torch.Tensor],
        plain: Callable[[], Any],
    ) -> None:
        """Do what :meth:`run` does, on a stream, whatever the tensors' device and torch's modes."""
        bases = [tensor.data_ptr() for tensor in inputs]
        if len(set(bases)) != len(bases):  # which of two tensors a pointer means can't be told
            plain()
            return
        key = (kind, tuple([base & _POINTER_BITS for base in bases]))
        found = self._lists.get(key, _UNKNOWN)
        if isinstance(found, LaunchList):
            found(bases, inputs[0].device, stream)
        elif found is _SEEN:
            self._watch(key, inputs, plain)
        else:
            if found is _UNKNOWN:
                if len(self._lists) >= MAX_KINDS:
                    self._lists.clear()
                self._lists[key] = _SEEN
            plain()

    def _watch(
        self, key: Hashable, inputs: Sequence[torch.Tensor], plain: Callable[[], Any]
    ) -> None:
        watch = Watch(inputs)
        outer, _thread.watch = watching(), watch
        try:
            with watch:
                plain()
        finally:
            _thread.watch = outer
        if outer is not None:
            outer.refuse("a list is made inside of it")
        found = watch.finished()
        if found is None:
            self.refusals.append(str(watch.refusal))
        self._lists[key] = _REFUSED if found is None else found


class _Thread(threading.local):
    watch: Watch | None = None


_thread = _Thread()


def watching() -> Watch | None:
    """Return what writes this thread's launches down; None = nothing does."""
    return _thread.watch


def refuse(why: str) -> None:
    """Have the call that is being watched, if one is, never written down."""
    if _thread.watch is not None:
        _thread.watch.refuse(why)


def in_mode() -> bool:
    """True under one of torch's modes, which may want to see what a call does."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of that behind its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return start, start + (last + 1) * tensor.element_size()
