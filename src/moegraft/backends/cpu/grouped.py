"""Grouped matrix products for the CPU backend: only touched experts, one expert at a time."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from moegraft import processor
from moegraft.stages import Permutation

#: Every number of rows.
ALL_ROWS = 1 << 62
#: So many rows torch multiplies in emulated bfloat16 before widening the weights is faster.
_EMULATED_ROWS = 4


def own_dtype_rows(dtype: str) -> int:
    """Return for how many rows of an expert torch should multiply in the weights' own dtype.

    bfloat16: all where the processor has instructions for it (they are oneDNN's, AMX among them),
    else few: there a product with one row reads the weights once, as they are. Other dtypes: none,
    float32 has no other and float16 is slow in torch for any number of rows.
    """
    if dtype != "bfloat16":
        return 0
    return ALL_ROWS if processor.multiplies_bf16() else _EMULATED_ROWS


def grouped_mm(
    rows: torch.Tensor,
    weight_oi: torch.Tensor,
    bias: torch.Tensor | None,
    perm: Permutation,
    own_dtype_rows: int = 0,
) -> torch.Tensor:
    """``out[n] = W[e_n] rows[n] + b[e_n]``: fp32 ``[N, out]``.

    Args:
        rows: ``[N, in]``, sorted by expert; any float dtype.
        weight_oi: ``[E, out, in]``, any strides.
        bias: ``[E, out]`` or None.
        perm: which rows belong to which expert.
        own_dtype_rows: experts with at most so many rows are multiplied in 16 bits, if rows and
            weights both have them: their sums are fp32 but rounded once. Others are exact in fp32,
            16-bit weights through one reused buffer.
    """
    weight_io = weight_oi.transpose(1, 2)
    same = rows.dtype == weight_io.dtype
    in_16_bits = own_dtype_rows if same and rows.dtype != torch.float32 else 0
    if not in_16_bits:
        rows = rows.float()
    as_one = in_16_bits == ALL_ROWS or weight_io.dtype == torch.float32
    if rows.shape[0] and as_one and _torch_can(rows, weight_io):
        out = F.grouped_mm(rows, weight_io, offs=perm.expert_ends).float()
    else:
        out = _one_by_one(rows, weight_oi, perm.expert_offsets, in_16_bits)
    return out if bias is None else out + bias[perm.row_to_expert]


def _torch_can(rows: torch.Tensor, weight_io: torch.Tensor) -> bool:
    """torch's own loop over experts is leaner; it wants one dtype and strides of 16 bytes."""
    strides = (rows.stride(0), *weight_io.stride()[:1], max(weight_io.stride()[1:]))
    return (
        rows.dtype == weight_io.dtype
        and 1 in weight_io.stride()[1:]
        and all(stride * rows.element_size() % 16 == 0 for stride in strides)
        and rows.data_ptr() % 16 == 0
        and weight_io.data_ptr() % 16 == 0
    )


def _one_by_one(
    rows: torch.Tensor, weight_oi: torch.Tensor, expert_offsets: tuple[int, ...], in_16_bits: int
) -> torch.Tensor:
    out = torch.empty(rows.shape[0], weight_oi.shape[1], dtype=torch.float32)
    # As the weights lie: to transpose while widening costs more than the product of a few rows.
    out_major = weight_oi.stride(2) <= weight_oi.stride(1)
    stored = weight_oi if out_major else weight_oi.transpose(1, 2)
    buffer: torch.Tensor | None = None
    start = 0
    for e, end in enumerate(expert_offsets[1:]):
        if end - start > in_16_bits:
            weight = stored[e]
            if weight.dtype != torch.float32:
                if buffer is None:
                    buffer = torch.empty(weight.shape, dtype=torch.float32)
                weight = buffer.copy_(weight)
            weight_io = weight.t() if out_major else weight
            torch.mm(rows[start:end].float(), weight_io, out=out[start:end])
        elif end > start:
            out[start:end] = rows[start:end] @ weight_oi[e].t()
        start = end
    return out
