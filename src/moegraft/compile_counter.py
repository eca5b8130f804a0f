"""Count Triton compilations, so that a test can show that warm code compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compilations:
    """What was compiled inside a :func:`count_compilations` block.

    Attributes:
        kernels: one entry per compiled variant, ``module.function``; a variant that Triton found
            in its cache on disk counts too, for it had to be loaded.

    Example: a kernel that ran with two block sizes for the first time gives two entries.
    """

    kernels: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many."""
        return len(self.kernels)


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count what Triton compiles in the block, in every thread; nothing where Triton is missing.

    A hook that was set before keeps being called.
    """
    found = Compilations()
    try:
        from triton import knobs
    except ImportError:
        yield found
        return
    outer = knobs.runtime.jit_post_compile_hook

    def count(**kwargs: Any) -> bool | None:
        function = kwargs["fn"]
        found.kernels.append(f"{function.module}.{function.name}")
        if outer is None:
            return None
        said: bool | None = outer(**kwargs)
        return said

    knobs.runtime.jit_post_compile_hook = count
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = outer
