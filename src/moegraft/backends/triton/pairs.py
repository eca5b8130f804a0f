"""Small launches over pairs: unpack the routing, number the rows of a call without finalize."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.backends.triton.listed import listed

#: Pairs of one program.
BLOCK = 256


@triton.jit(do_not_specialize=["num_pairs"])
def unpack_kernel(
    packed_ptr,  # [P] int32
    ids_ptr,  # [P] int32 out
    weights_ptr,  # [P] fp32 out
    num_pairs,
    BLOCK: tl.constexpr,
):
    """``(expert id << 16) | bf16 bits`` -> id and weight."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    packed = tl.load(packed_ptr + pair, mask=mask, other=0)
    tl.store(ids_ptr + pair, packed >> 16, mask=mask)
    tl.store(weights_ptr + pair, (packed << 16).to(tl.float32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "first_pair"])
def number_rows_kernel(
    pair_row_ptr,  # [P] int32, -1 = not local
    pair_to_row_ptr,  # [P] int32 out
    num_pairs,
    first_pair,
    BLOCK: tl.constexpr,
):
    """A local pair's row lies at the pair's number, counted from ``first_pair``; others have -1."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    local = tl.load(pair_row_ptr + pair, mask=mask, other=-1) >= 0
    tl.store(pair_to_row_ptr + pair, tl.where(local, first_pair + pair, -1), mask=mask)


def run_unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 and weights fp32 of a contiguous packed tensor, in one launch."""
    ids = torch.empty_like(packed)
    weights = torch.empty_like(packed, dtype=torch.float32)
    count = packed.numel()
    if count:
        listed(unpack_kernel)[(triton.cdiv(count, BLOCK),)](
            packed, ids, weights, count, BLOCK=BLOCK
        )
    return ids, weights


def run_number_rows(pair_row: torch.Tensor, pair_to_row: torch.Tensor, first_pair: int) -> None:
    """Launch :func:`number_rows_kernel`."""
    count = pair_row.shape[0]
    listed(number_rows_kernel)[(triton.cdiv(count, BLOCK),)](
        pair_row, pair_to_row, count, first_pair, BLOCK=BLOCK
    )
