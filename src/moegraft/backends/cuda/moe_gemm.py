"""``moe_gemm`` of ``source/moe_gemm.cu``: its specialisations and arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch

from moegraft.backends.cuda.products import base_options, epilogue_macros


@dataclass(frozen=True)
class Spec:
    """One specialisation; the macros of the source, in lower case.

    Attributes:
        block_m: rows of a block at most, a multiple of 16, at most 192.
        stages: K steps in flight.
        bias, weight: dtypes, None = none.
        fp8: e4m3 weights and rows, with scales per 128 x 128 and per row and 128 columns; blocks
            of at most 128 rows.
    """

    name: ClassVar[str] = "moe_gemm"
    #: Three warp groups: two multiply, one loads.
    threads: ClassVar[int] = 384
    block_m: int
    stages: int
    gather: bool
    gated: bool
    weighted: bool
    lora: bool
    top_k: int
    starts: tuple[int, int]
    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    bias: torch.dtype | None = None
    weight: torch.dtype = torch.float32
    fp8: bool = False

    def options(self) -> list[str]:
        """Return the compiler's options."""
        macros: dict[str, object] = {
            "STAGES": self.stages, "GATHER": int(self.gather), "GATED": int(self.gated),
            "WEIGHTED": int(self.weighted), "LORA": int(self.lora), "TOP_K": self.top_k,
            "START0": self.starts[0], "START1": self.starts[1], **epilogue_macros(self),
            "FP8": int(self.fp8),
        }  # fmt: skip
        return base_options(self.block_m, macros)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out, and room to align it."""
        stage = 256 * 128 + self.block_m * 128
        part = (32 if self.fp8 else (self.block_m // 16 + 1) // 2 * 16) * 128
        scales = 2 * self.stages + 1 if self.fp8 else 4  # routing weights, and rows' scales
        scales_and_marks = (scales + 2) * self.block_m * 4
        meta = 2 * (2 * self.block_m * 4 + 512)
        records = 16 * (self.stages + 1 if self.fp8 else 4)
        barriers, alignment = 16 * self.stages + 16, 1024
        fixed = 4 * part + scales_and_marks + meta + records + barriers + alignment
        return self.stages * stage + fixed


class Arguments(ctypes.Structure):
    """The source's structure of the same name."""

    _fields_ = (
        ("x", c_void_p), ("bias", c_void_p), ("topk_weights", c_void_p), ("row_pair", c_void_p),
        ("block_info", c_void_p), ("live_blocks", c_void_p), ("s", c_void_p),
        ("row_segment", c_void_p), ("group_count", c_void_p), ("groups", c_void_p),
        ("s_ready", c_void_p), ("ticket", c_void_p), ("arena", c_void_p), ("x_stride", c_int64),
        ("s_stride", c_int64), ("group_stride", c_int64), ("side_bytes", c_int),
        ("max_groups", c_int), ("size_k", c_int), ("size_n", c_int), ("weight_rows", c_int),
        ("bias_stride", c_int), ("num_tiles", c_int),
    )  # fmt: skip


class Fp8Arguments(Arguments):
    """The same of FP8 weights."""

    _fields_ = (  # type: ignore[assignment]  # more of them, behind those of the base
        ("x_scales", c_void_p), ("weight_scales", c_void_p), ("h_values", c_void_p),
        ("h_scales", c_void_p), ("scale_rows", c_int64),
    )  # fmt: skip
