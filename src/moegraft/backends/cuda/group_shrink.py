"""``group_shrink`` of ``source/group_shrink.cu``: its specialisations and arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

from moegraft.backends.cuda.products import base_options

#: K steps in flight.
STAGES = 6


@dataclass(frozen=True)
class ShrinkSpec:
    """One specialisation; the macros of the source, in lower case.

    Attributes:
        block_m: rows of a block at most, a multiple of 16, at most 192.
        stages: K steps in flight.
        gather: x ``[T, K]`` by token, not ``[rows, K]``.
        sides: projections that are computed together.
        top_k: choices per token.
    """

    name: ClassVar[str] = "group_shrink"
    #: Four warp groups: two multiply, two load.
    threads: ClassVar[int] = 512
    block_m: int
    stages: int
    gather: bool
    sides: int
    top_k: int

    def options(self) -> list[str]:
        """Return the compiler's options."""
        return base_options(
            self.block_m,
            {
                "STAGES": self.stages, "GATHER": int(self.gather), "SIDES": self.sides,
                "TOP_K": self.top_k,
            },
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out, and room to align it."""
        stage, block = 4 * 64 * 128, self.block_m * 24
        records, barriers, alignment = 4 * 128, 16 * self.stages, 1024
        return self.stages * stage + block + records + barriers + alignment


class ShrinkArguments(ctypes.Structure):
    """The source's structure ``Arguments``."""

    _fields_ = (
        ("x", c_void_p), ("s", c_void_p), ("arena", c_void_p), ("row_pair", c_void_p),
        ("block_info", c_void_p), ("live_blocks", c_void_p), ("row_segment", c_void_p),
        ("group_count", c_void_p), ("a_groups", c_void_p), ("b_groups", c_void_p),
        ("ready", c_void_p), ("x_stride", c_int64), ("s_stride", c_int64),
        ("group_stride", c_int64), ("side_bytes", c_int), ("max_groups", c_int),
        ("size_k", c_int),
    )  # fmt: skip
