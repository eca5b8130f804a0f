"""Linears that read the same x, such as q, k and v: their adapters in one launch.

The first sibling that is called with an x computes the base products of all of them, each with
its own weight, and one group call adds all deltas. The others hand out what is kept for them when
they are called with that very tensor, once. Anything else goes its own way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from moegraft.errors import MoegraftError
from moegraft.hosts.transformers.linear import hook_linear
from moegraft.hosts.transformers.row_vectors import RowVectors
from moegraft.hosts.transformers.state import StepState
from moegraft.linear import LinearLora, LinearLoraGroup
from moegraft.types import TokenSlots

#: Children of one module that its forward gives the same tensor.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def find_siblings(linears: Mapping[str, nn.Module]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of linears that read the same x.

    Args:
        linears: path -> module of every linear that adapters attach to.

    Only plain ``nn.Linear`` modules count, with a forward of their own class and one input size.
    """
    parents = {path.rpartition(".")[0] for path in linears}
    for parent in sorted(parents):
        for names in SIBLINGS:
            found, sizes = [], set()
            for name in names:
                path = f"{parent}.{name}" if parent else name
                module = linears.get(path)
                if _is_plain(module):
                    found.append(path)
                    sizes.add(module.in_features)
            if len(found) > 1 and len(sizes) == 1:
                yield tuple(found)


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and "forward" not in module.__dict__


class _Kept:
    """What is kept for the siblings of one group that were not called yet; None = taken."""

    def __init__(
        self, x: torch.Tensor, slots: TokenSlots, outputs: list[torch.Tensor | None]
    ) -> None:
        self.x = x
        self.slots = slots
        self.outputs = outputs
        self.version = _version(x)


class SiblingGroup:
    """Siblings whose forwards share their work.

    Siblings that turn out to get different tensors are served one by one from then on.

    Args:
        modules: the linears.
        loras: their adapters.
        state: the slots of the running forward.
        vectors: what their adapters have besides factors; None = nothing.

    Raises:
        MoegraftError: the adapters can't be grouped.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        loras: Sequence[LinearLora],
        state: StepState,
        vectors: Sequence[RowVectors] | None = None,
    ) -> None:
        self._vectors = tuple(vectors or ())
        self._modules = tuple(modules)
        self._loras = tuple(loras)
        self._group = LinearLoraGroup(loras)
        self._state = state
        self._thread = threading.local()
        self.shares = True
        for i, module in enumerate(self._modules):
            module.__dict__["forward"] = _SiblingForward(self, i)

    def remove(self) -> None:
        """Take the shadowing forwards off the modules."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def end_forward(self, whole: bool) -> None:
        """Drop what is kept for siblings that were not called; ``whole`` = no error was why."""
        if getattr(self._thread, "kept", None) is not None:
            self._thread.kept = None
            if whole:
                self.shares = False

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return sibling ``index``'s output for x ``[.., in]``, its adapters' deltas added."""
        slots = self._state.slots_of(x)
        if slots is None or not slots.live:
            return self._base(index, x)
        kept: _Kept | None = getattr(self._thread, "kept", None)
        if kept is not None:
            found = self._take(kept, index, x, slots)
            if found is not None:
                return found
        # All are asked: each lets the stream wait for its own factors.
        if not any([lora.has_delta(slots) for lora in self._loras]):
            return self._base(index, x)
        return self._all(index, x, slots) if self.shares else self._one(index, x, slots)

    def _all(self, index: int, x: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        """Compute all siblings' outputs; return one, keep the others."""
        outputs = [self._base(i, x) for i in range(len(self._loras))]
        rows = [output.reshape(-1, output.shape[-1]) for output in outputs]
        for vectors, row in zip(self._vectors, rows, strict=False):
            vectors.apply(row, slots)
        self._group.add_to(rows, x.reshape(-1, x.shape[-1]), slots)
        done: list[torch.Tensor | None] = [
            row.view(output.shape) for row, output in zip(rows, outputs, strict=True)
        ]
        mine, done[index] = done[index], None
        self._thread.kept = _Kept(x, slots, done)
        assert mine is not None
        return mine

    def _one(self, index: int, x: torch.Tensor, slots: TokenSlots) -> torch.Tensor:
        output = self._base(index, x)
        rows = output.reshape(-1, output.shape[-1])
        if self._loras[index].has_delta(slots):
            if self._vectors:
                self._vectors[index].apply(rows, slots)
            self._loras[index].add_to(rows, x.reshape(-1, x.shape[-1]), slots)
        return rows.view(output.shape)

    def _take(
        self, kept: _Kept, index: int, x: torch.Tensor, slots: TokenSlots
    ) -> torch.Tensor | None:
        """Return the kept output when it is for exactly this call, once."""
        found = kept.outputs[index]
        if (
            found is None
            or x is not kept.x
            or slots is not kept.slots
            or _version(x) != kept.version
        ):
            self._thread.kept = None
            self.shares = False
            return None
        kept.outputs[index] = None
        if all(output is None for output in kept.outputs):
            self._thread.kept = None
        return found

    def _base(self, index: int, x: torch.Tensor) -> torch.Tensor:
        module: Any = self._modules[index]
        return F.linear(x, module.weight, module.bias)


class _SiblingForward:
    """What shadows a sibling's forward."""

    def __init__(self, group: SiblingGroup, index: int) -> None:
        self._group = group
        self._index = index

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._group.run(self._index, input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy would go on with the weights of the original.
        raise MoegraftError(
            "A part of an attached model can't be copied or pickled: detach() first."
        )


def _version(x: torch.Tensor) -> int:
    """Goes up when x is changed in place; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


def install_linears(
    model: nn.Module,
    linears: Mapping[str, LinearLora],
    state: StepState,
    fuse: bool,
    vectors: Mapping[str, RowVectors] | None = None,
) -> list[Any]:
    """Serve adapters on linears.

    Args:
        model: the model they belong to.
        linears: path -> adapters.
        state: the slots of the running forward.
        fuse: serve siblings in one launch.
        vectors: path -> what its adapters have besides factors, of all linears; None = nothing.

    Returns:
        Handles; ``remove()`` of each takes everything off again.
    """
    modules = {path: model.get_submodule(path) for path in linears}
    handles: list[Any] = []
    grouped: set[str] = set()
    groups: list[SiblingGroup] = []
    for paths in find_siblings(modules) if fuse else ():
        members = [modules[path] for path in paths]
        theirs = [vectors[path] for path in paths] if vectors else None
        groups.append(SiblingGroup(members, [linears[path] for path in paths], state, theirs))
        grouped.update(paths)

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        for group in groups:
            group.end_forward(whole=output is not None)

    if groups:
        handles += [*groups, model.register_forward_hook(end_forward, always_call=True)]
    for path, lora in linears.items():
        if path not in grouped:
            handles += hook_linear(modules[path], lora, state, (vectors or {}).get(path))
    return handles
