"""Memory that shows when it was read before it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALLOCATORS = frozenset(
    (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    )
)


class _Poison(TorchFunctionMode):
    """Fills what the allocators of :data:`_ALLOCATORS` return."""

    def __init__(self, integers: bool) -> None:
        super().__init__()
        self._integers = integers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            if result.is_floating_point():
                result.fill_(float("nan"))
            elif self._integers and result.dtype != torch.bool and not result.is_complex():
                result.fill_(torch.iinfo(result.dtype).min)
        return result


@contextmanager
def poisoned_empty(integers: bool = False) -> Iterator[None]:
    """Make ``torch.empty`` and its kin return NaN in this thread, on every device.

    Args:
        integers: also fill integer tensors, with their most negative value. On a GPU such an index
            faults the whole process, so it is off by default.

    Example: ``with poisoned_empty(): out = layer(x, ids, weights, slots)``.
    """
    with _Poison(integers):
        yield
