"""Launches of Triton's kernels as :mod:`moegraft.backends.launch_list` writes them down.

Triton works out at each launch which of its compiled kernels fits the arguments. A list keeps the
one that it found, and launches it by the way that Triton offers for kernels that are compiled
already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moegraft.backends.launch_list import Launch, Unlisted, Watch, watching

_CONSTANTS = (bool, int, float, str, type(None))


class KernelLaunch:
    """A launch of one of Triton's kernels.

    Args:
        compiled: what Triton made of it, with ``compiled[grid](*arguments, stream=stream)``.
        grid: three numbers.
        arguments: all of the kernel's, constants too.
        watch: tells where tensors are.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], watch: Watch
    ) -> None:
        self._run = compiled[(*grid, 1, 1)[:3]]
        self._arguments = list(arguments)
        places = []
        for i, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                if value.data_ptr():
                    places.append((i, *watch.place(value.data_ptr())))
                self._arguments[i] = 0
            elif not isinstance(value, _CONSTANTS):
                raise Unlisted(f"an argument is a {type(value).__name__}")
        self._places = tuple(places)

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        """Launch it again."""
        arguments = self._arguments.copy()
        for i, source, offset in self._places:
            arguments[i] = bases[source] + offset
        self._run(*arguments, stream=stream)


class _Watched:
    """A kernel of Triton's whose launch is written down."""

    def __init__(self, kernel: Any, watch: Watch) -> None:
        self._kernel, self._watch = kernel, watch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            compiled = self._kernel[grid](*args, **kwargs)
            self._watch.add(
                lambda watch: written_down(self._kernel, compiled, grid, args, kwargs, watch)
            )
            return compiled

        return launch


def written_down(
    kernel: Any,
    compiled: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    watch: Watch,
) -> Launch:
    """Return the launch ``kernel[grid](*args, **kwargs)``, which ran ``compiled``, to make again.

    Raises:
        Unlisted: an argument is neither a number, a name nor one of the call's tensors.
    """
    own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **own)
    bound.apply_defaults()
    return KernelLaunch(compiled, grid, tuple(bound.arguments.values()), watch)


def listed(kernel: Any) -> Any:
    """Return a kernel of Triton's as ``listed(kernel)[grid](...)`` launches it.

    That is itself, unless the call is being watched.
    """
    watch = watching()
    return kernel if watch is None else _Watched(kernel, watch)
