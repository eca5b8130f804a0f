"""``fp4_decode`` of ``source/fp4_decode.cu``: its specialisations and arguments."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch

from moegraft.backends.cuda.products import DTYPES, base_options, epilogue_macros

#: Rows of an expert's weights that one warp multiplies.
WARP_ROWS = 32
#: Columns of one step of the K loop.
STEP = 128


@dataclass(frozen=True)
class Fp4Spec:
    """One specialisation; the macros of the source, in lower case.

    Attributes:
        block_m: rows of a block at most: 8, 16, 32 or 64.
        size_k: columns of the weights, a multiple of 32.
        stages: K steps in flight.
        programs: how many should find room on one multiprocessor.
        nv: NVFP4, else MXFP4.
        down: x by pair, after it was made; multiplies by routing weights. Else x by token.
        starts: rows of gate and of up in an expert's weights, ``step`` rows from one to the next.
        global_index: of the whole scales of gate and up.
        delta: dtype of the deltas that are added; None = none.
        bias, weight: dtypes, None = none.
        parts: groups of warps that share a program's K loop, with stages of their own.
        warps: of a group; more than four only with one part.
    """

    name: ClassVar[str] = "fp4_decode"
    block_m: int
    size_k: int
    stages: int
    programs: int
    nv: bool
    down: bool
    gated: bool
    top_k: int
    starts: tuple[int, int] = (0, 0)
    step: int = 1
    global_index: tuple[int, int] = (0, 0)
    delta: torch.dtype | None = None
    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    bias: torch.dtype | None = None
    weight: torch.dtype = torch.float32
    parts: int = 1
    warps: int = 4

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps * self.parts

    @property
    def tile_rows(self) -> int:
        """Rows of an expert's weights that one program multiplies."""
        return WARP_ROWS * self.warps

    def options(self) -> list[str]:
        """Return the compiler's options: no sum may be rounded otherwise in another kernel."""
        macros: dict[str, object] = {
            "SIZE_K": self.size_k, "PARTS": self.parts, "WARPS": self.warps, "STAGES": self.stages,
            "PROGRAMS": self.programs, "NV": int(self.nv), "DOWN": int(self.down),
            "GATED": int(self.gated),
            "LORA": int(self.delta is not None), "DELTA": DTYPES[self.delta] if self.delta else 0,
            "TOP_K": self.top_k, "GATE_START": self.starts[0], "UP_START": self.starts[1],
            "COLUMN_STEP": self.step, "GATE_GLOBAL": self.global_index[0],
            "UP_GLOBAL": self.global_index[1], **epilogue_macros(self),
        }  # fmt: skip
        return [*base_options(self.block_m, macros), "--fmad=false"]

    @property
    def columns(self) -> int:
        """Columns of the output that one program makes."""
        return self.tile_rows // 2 if self.gated else self.tile_rows

    @property
    def stages_bytes(self) -> int:
        """Shared memory of a program's stages."""
        return self.parts * self.stages * (self.tile_rows * STEP // 2 + self.block_m * STEP * 2)

    @property
    def sum_bytes(self) -> int:
        """Shared memory of a program's sums, which take the stages' place."""
        return self.parts * self.block_m * (self.tile_rows * 4 + 16)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        across = self.size_k // (16 if self.nv else 32)
        pitch = across if across % 16 else (across // 16 | 1) * 16
        return self.stages_bytes + self.tile_rows * pitch + self.block_m * 8


class Fp4Arguments(ctypes.Structure):
    """The source's structure ``Arguments``."""

    _fields_ = (
        ("x", c_void_p), ("weight", c_void_p), ("scales", c_void_p), ("globals", c_void_p),
        ("bias", c_void_p), ("topk_weights", c_void_p), ("row_pair", c_void_p),
        ("block_info", c_void_p), ("slots", c_void_p), ("states", c_void_p), ("delta", c_void_p),
        ("h_counter", c_void_p), ("h", c_void_p), ("out", c_void_p), ("x_stride", c_int64),
        ("weight_stride_e", c_int64), ("scale_stride_e", c_int64), ("out_stride", c_int64),
        ("global_stride", c_int), ("bias_stride", c_int),
        ("size_n", c_int), ("num_tiles", c_int), ("num_pairs", c_int), ("h_tiles", c_int),
        ("splits", c_int),
    )  # fmt: skip
