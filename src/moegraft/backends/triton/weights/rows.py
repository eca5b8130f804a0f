"""Activations as a base product reads them, beside those that LoRA reads.

For W8A8 weights they are e4m3 with one fp32 scale per row and 128 columns, exactly as
:func:`moegraft.quant.activations.rounded_activations` has them. For 4-bit weights they are as they
are, but in the order that :mod:`.fp4_bits` brings those in, or the kernels of backends/cuda. x gets
its copy in route's launch, h where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed
from moegraft.backends.triton.weights.fp4_bits import COLUMNS, place, place_in_eight
from moegraft.quant.formats import UNQUANTIZED, format_of

#: Columns of one group, and of a program up to how many groups.
GROUP, MAX_GROUPS = 128, 16
#: Rows start at multiples of so many columns, and end with zeros: columns change places in those.
ALIGNMENT = COLUMNS.value


@dataclass(frozen=True)
class BaseRows:
    """A copy of activations ``[rows, columns]``, made for the base product.

    Attributes:
        values: ``[rows, columns or more]``, e4m3; or in the activations' dtype, in another order.
        scales: fp32 ``[rows, ceil(columns / 128)]`` of e4m3 values; None = of another order.
        eights: columns change places among 8, as ``fp4_decode`` of backends/cuda reads them; else
            among 32.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    eights: bool = False


def make_base_rows(
    weight_format: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    eights: bool = False,
) -> BaseRows | None:
    """Allocate the copy that a format's base product reads; None where it reads x or h itself."""
    if weight_format == UNQUANTIZED:
        return None
    found = format_of(weight_format)
    width = triton.cdiv(columns, ALIGNMENT) * ALIGNMENT
    if found.activation_group is not None:
        values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
        groups = triton.cdiv(columns, GROUP)
        return BaseRows(values, torch.empty(rows, groups, dtype=torch.float32, device=device))
    if found.element.per_item == 2:
        return BaseRows(torch.empty(rows, width, dtype=dtype, device=device), None, eights)
    return None


def copy_arguments(
    source: torch.Tensor | None, rows: BaseRows | None
) -> tuple[dict[str, Any], int]:
    """Return what a launch passes to :func:`write_rows`, and the programs it takes; 0 for None."""
    if rows is None or source is None:
        names = ("source_ptr", "base_ptr", "base_scales_ptr", "source_columns", "source_stride")
        return {**dict.fromkeys((*names, "base_stride")), "GROUPS": 0, "EIGHTS": False}, 0
    num_rows, columns = source.shape
    groups = min(triton.next_power_of_2(triton.cdiv(columns, GROUP)), MAX_GROUPS)
    return {
        "source_ptr": source,
        "base_ptr": rows.values,
        "base_scales_ptr": rows.scales,
        "source_columns": columns,
        "source_stride": source.stride(0),
        "base_stride": rows.values.stride(0),
        "GROUPS": groups,
        "EIGHTS": rows.eights,
    }, num_rows * triton.cdiv(columns, groups * GROUP)


def run_base_rows(source: torch.Tensor, rows: BaseRows | None) -> None:
    """Launch the copy of ``source`` ``[rows, columns]`` on its own; nothing for None."""
    arguments, programs = copy_arguments(source, rows)
    if programs:
        listed(base_rows_kernel)[(programs,)](**arguments, num_warps=4)


@triton.jit
def rounded(values):
    """Return fp32 ``[.., 128]`` as e4m3 and fp32 scales: the largest absolute value over 448."""
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 1), 448.0), 1e-10)
    whole = tl.broadcast_to(scales[:, None], values.shape)
    return tl.div_rn(values, whole).to(tl.float8e4nv), scales


@triton.jit
def write_rows(
    program, source_ptr, base_ptr, base_scales_ptr, source_columns, source_stride, base_stride,
    GROUPS: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """Copy up to GROUPS groups of one row; see :func:`copy_arguments`."""
    across = tl.cdiv(source_columns, GROUPS * 128)
    row = (program // across).to(tl.int64)
    group = program % across * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = columns < source_columns
    values = tl.load(source_ptr + row * source_stride + columns, mask=mask, other=0.0)
    if base_scales_ptr is None:
        places = place_in_eight(columns) if EIGHTS else place(columns)
        ptrs = base_ptr + row * base_stride + places
        tl.store(ptrs, values, mask=columns < base_stride)
    else:
        values, scales = rounded(values.to(tl.float32))
        groups = tl.cdiv(source_columns, 128)
        tl.store(base_ptr + row * base_stride + columns, values, mask=mask)
        tl.store(base_scales_ptr + row * groups + group, scales, mask=group < groups)


@triton.jit
def base_rows_kernel(
    source_ptr, base_ptr, base_scales_ptr, source_columns, source_stride, base_stride,
    GROUPS: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """See :func:`run_base_rows`."""
    write_rows(
        tl.program_id(0), source_ptr, base_ptr, base_scales_ptr, source_columns, source_stride,
        base_stride, GROUPS, EIGHTS,
    )  # fmt: skip


@triton.jit
def store_rows(
    values, base_ptr, base_stride, base_scales_ptr, rows, row_mask, first_column, size_k,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile ``[BLOCK_M, BLOCK_N]`` of h, rounded to its dtype, for the next product."""
    columns = first_column + tl.arange(0, BLOCK_N)
    mask = row_mask[:, None] & (columns < size_k)[None, :]
    ptrs = base_ptr + rows[:, None] * base_stride
    if base_scales_ptr is None:
        tl.static_assert(BLOCK_N % 32 == 0, "columns change places among 32")
        values = tl.where(mask, values, 0.0)
        mask = row_mask[:, None] & (columns < base_stride)[None, :]
        ptrs += place(columns)[None, :]
        tl.store(ptrs, values, mask=mask, eviction_policy="evict_last")
    else:
        tl.static_assert(BLOCK_N == 128, "a tile is one group of columns")
        values, scales = rounded(tl.where(mask, values.to(tl.float32), 0.0))
        tl.store(ptrs + columns[None, :], values, mask=mask, eviction_policy="evict_last")
        scale_ptrs = base_scales_ptr + rows * tl.cdiv(size_k, 128) + first_column // 128
        tl.store(scale_ptrs, scales, mask=row_mask, eviction_policy="evict_last")
