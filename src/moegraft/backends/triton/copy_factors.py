"""Factors from many tensors into the order of the arena, and are they finite.

Work is cut into *tiles*, blocks of a matrix of one tensor that go to a matrix of the target. A
table of tiles is made once for tensors of the same shapes; only their addresses are new each time.
All tiles of a launch are of one :class:`CopyKind`, so that what it promises of its addresses holds
for every one of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed

#: int64 words of a tile, see :func:`copy_factors_kernel`.
TILE_WORDS = 8
#: Values of a tile: where each is a part of one row, and of several.
ROW_VALUES, MATRIX_VALUES = 8192, 4096
_MAX_BLOCK_F = 64
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_TYPES = {torch.int16: tl.int16, torch.int32: tl.int32}
_TYPES |= {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
#: All bits of the exponent: set in NaN and infinity alone.
_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


class CopyKind(NamedTuple):
    """What the tiles of one launch have in common.

    Attributes:
        dtype: of the sources, fp32/bf16/fp16.
        columns: values of one column of the target are adjacent in the source; else those of a row.
        unit: sources begin, go on and end at multiples of it, in values; a power of two.
        block_f: rows of a tile, a power of two and a multiple of ``unit`` if ``columns``.
    """

    dtype: torch.dtype
    columns: bool
    unit: int
    block_f: int

    @staticmethod
    def of(dtype: torch.dtype, columns: bool, unit: int, rows: int) -> CopyKind:
        """Return the kind for matrices of so many rows."""
        if columns:
            block_f = min(triton.next_power_of_2(rows), _MAX_BLOCK_F)
        else:
            block_f = 1 if rows == 1 else 16
        return CopyKind(dtype, columns, unit, block_f)

    @property
    def block_w(self) -> int:
        """Columns of a tile."""
        return (ROW_VALUES if self.block_f == 1 else MATRIX_VALUES) // self.block_f


@triton.jit
def copy_factors_kernel(
    addresses_ptr,  # [tensors] int64
    tiles_ptr,  # [tiles, 8] int64
    target_ptr,  # [elements]
    bad_ptr,  # [1] int32, 1 = some value of the target is not finite
    SOURCE: tl.constexpr,  # type of the sources' values
    COLUMNS: tl.constexpr,  # see CopyKind
    UNIT: tl.constexpr,  # sources and steps are multiples, and counts along what is adjacent there
    TARGET_UNIT: tl.constexpr,  # targets, their steps and widths are multiples of it
    EXPONENT: tl.constexpr,  # 0 = the sources are cast, else they are copied as integers
    WORDS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """``target[to + f * target_step + w] = source[from + f * step + w]``, 0 in padding.

    With COLUMNS ``source[from + f + w * step]``. A tile: tensor, from, step, to, target_step, how
    many f, how many w, the same with padding; no more than the block has.
    """
    tile_ptr = tiles_ptr + tl.program_id(0).to(tl.int64) * WORDS
    address = tl.load(addresses_ptr + tl.load(tile_ptr))
    source = tl.multiple_of(tl.load(tile_ptr + 1), UNIT)
    step = tl.multiple_of(tl.load(tile_ptr + 2), UNIT)
    target = tl.multiple_of(tl.load(tile_ptr + 3), TARGET_UNIT)
    target_step = tl.multiple_of(tl.load(tile_ptr + 4), TARGET_UNIT)
    count_f = tl.load(tile_ptr + 5).to(tl.int32)
    count_w = tl.load(tile_ptr + 6).to(tl.int32)
    width = tl.multiple_of(tl.load(tile_ptr + 7).to(tl.int32), TARGET_UNIT)
    UNIT_BYTES: tl.constexpr = UNIT * SOURCE.primitive_bitwidth // 8
    base_ptr = tl.multiple_of(address.to(tl.pointer_type(SOURCE)), UNIT_BYTES) + source
    first_ptr = tl.multiple_of(target_ptr + target, 16)
    f = tl.arange(0, BLOCK_F)[:, None]
    w = tl.arange(0, BLOCK_W)[None, :]
    f64, w64 = f.to(tl.int64), w.to(tl.int64)
    # Hints hold for all of the kernel, wherever they stand: COLUMNS is known when it is compiled.
    if COLUMNS:
        count_f = tl.multiple_of(count_f, UNIT)
        places = base_ptr + f + w64 * step
    else:
        count_w = tl.multiple_of(count_w, UNIT)
        places = base_ptr + f64 * step + w
    values = tl.load(places, mask=(f < count_f) & (w < count_w), other=0)
    if EXPONENT == 0:
        values = values.to(target_ptr.dtype.element_ty)
    tl.store(first_ptr + f64 * target_step + w, values, mask=(f < count_f) & (w < width))
    # One more than an exponent of ones sets the sign's bit, which was 0.
    if EXPONENT == 0:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
        carried = (bits & 0x7F800000) + 0x00800000
    else:
        carried = (values & EXPONENT) + (EXPONENT & -EXPONENT)
    if tl.min(tl.reshape(carried, [BLOCK_F * BLOCK_W], can_reorder=True), 0) < 0:
        tl.store(bad_ptr, 1)


def launch_options(kind: CopyKind, unit: int, target: torch.dtype) -> dict[str, Any]:
    """Return the constants of a launch whose sources are multiples of ``unit`` values."""
    cast = kind.dtype != target
    return {
        "SOURCE": _TYPES[kind.dtype if cast else _BITS[kind.dtype]],
        "COLUMNS": kind.columns,
        "UNIT": unit,
        "TARGET_UNIT": 16 // target.itemsize,
        "EXPONENT": 0 if cast else _EXPONENT[kind.dtype],
        "WORDS": TILE_WORDS,
        "BLOCK_F": kind.block_f,
        "BLOCK_W": kind.block_w,
        "num_warps": 4,
    }


def run_copy_factors(
    kind: CopyKind,
    alignment: int,
    addresses: torch.Tensor,
    tiles: torch.Tensor,
    target: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    """Launch :func:`copy_factors_kernel` on the current stream.

    Args:
        kind: of all tiles.
        alignment: bytes that the addresses of their tensors are multiples of; a power of two.
        addresses: int64 ``[tensors]``, of the first value of each.
        tiles: int64 ``[tiles, 8]``.
        target: ``[elements]`` fp32/bf16/fp16; begins at a multiple of 16 bytes.
        bad: int32 ``[1]``; set to 1 when a value of the target is NaN or infinite.
    """
    unit = max(1, min(kind.unit, alignment // kind.dtype.itemsize))
    options = launch_options(kind, unit, target.dtype)
    if kind.dtype == target.dtype:
        target = target.view(_BITS[target.dtype])
    listed(copy_factors_kernel)[(len(tiles),)](addresses, tiles, target, bad, **options)
