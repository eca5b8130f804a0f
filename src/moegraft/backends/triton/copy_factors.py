"""Factors from many tensors into the order of the arena, and are they finite: one launch.

Work is cut into *jobs*, each a matrix of one tensor that goes to a matrix of the target, of which
rows or columns are adjacent in the source. A table of jobs is made once for tensors of the same
shapes; only their addresses are new each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: int64 words of a job, see :func:`copy_factors_kernel`.
JOB_WORDS = 10
#: Rows and columns of what a program copies.
BLOCK_F, BLOCK_W = 16, 256
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
#: All bits of the exponent: set in NaN and infinity alone.
_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


@triton.jit
def copy_factors_kernel(
    base_ptr,  # any tensor of the sources' dtype: places count from it
    places_ptr,  # [tensors] int64, elements from base_ptr
    jobs_ptr,  # [jobs, 10] int64
    tile_jobs_ptr,  # [tiles] int32
    target_ptr,  # [elements]
    bad_ptr,  # [1] int32, 1 = some value of the target is not finite
    UNIT: tl.constexpr,  # places, steps and adjacent values of sources are multiples of it
    TARGET_UNIT: tl.constexpr,  # those of the target
    EXPONENT: tl.constexpr,  # 0 = the sources are cast, else they are copied as integers
    WORDS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """``target[to + f * target_step + w] = source[from + f * step_f + w * step_w]``, 0 in padding.

    A job: tensor, from, step_f, step_w (one of them is 1), to, target_step, count of f, count of
    w, columns with padding, first tile.
    """
    tile = tl.program_id(0)
    job_ptr = jobs_ptr + tl.load(tile_jobs_ptr + tile).to(tl.int64) * WORDS
    place = tl.load(places_ptr + tl.load(job_ptr))
    source = tl.multiple_of(place + tl.load(job_ptr + 1), UNIT)
    step_f = tl.load(job_ptr + 2)
    step_w = tl.load(job_ptr + 3)
    target = tl.multiple_of(tl.load(job_ptr + 4), TARGET_UNIT)
    target_step = tl.multiple_of(tl.load(job_ptr + 5), TARGET_UNIT)
    count_f = tl.load(job_ptr + 6)
    count_w = tl.load(job_ptr + 7)
    width = tl.multiple_of(tl.load(job_ptr + 8), TARGET_UNIT)
    tile = tile - tl.load(job_ptr + 9).to(tl.int32)
    tiles_w = tl.cdiv(width, BLOCK_W).to(tl.int32)
    f = (tile // tiles_w) * BLOCK_F + tl.arange(0, BLOCK_F)
    w = (tile % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
    f64, w64 = f.to(tl.int64), w.to(tl.int64)
    # Multiples by arithmetic, not by a hint: a hint would hold for the other kind of job as well.
    if step_w == 1:
        rows = base_ptr + source + f64[:, None] * (step_f // UNIT * UNIT) + w64[None, :]
        end = count_w // UNIT * UNIT
        values = tl.load(rows, mask=(f < count_f)[:, None] & (w < end)[None, :], other=0)
    else:
        columns = base_ptr + source + f64[:, None] + w64[None, :] * (step_w // UNIT * UNIT)
        end = count_f // UNIT * UNIT
        values = tl.load(columns, mask=(f < end)[:, None] & (w < count_w)[None, :], other=0)
    if EXPONENT == 0:
        values = values.to(target_ptr.dtype.element_ty)
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
        bad = (bits & 0x7F800000) == 0x7F800000
    else:
        bad = (values & EXPONENT) == EXPONENT
    if tl.max(tl.max(bad.to(tl.int32), 1), 0) != 0:
        tl.store(bad_ptr, 1)
    places = target_ptr + target + f64[:, None] * target_step + w64[None, :]
    tl.store(places, values, mask=(f < count_f)[:, None] & (w < width)[None, :])


def tiles_of(count_f: int, width: int) -> int:
    """Return how many programs a job of ``count_f`` rows and ``width`` columns takes."""
    return -(-count_f // BLOCK_F) * -(-width // BLOCK_W)


def run_copy_factors(
    base: torch.Tensor,
    places: torch.Tensor,
    jobs: torch.Tensor,
    tile_jobs: torch.Tensor,
    target: torch.Tensor,
    bad: torch.Tensor,
    aligned: bool,
) -> None:
    """Launch :func:`copy_factors_kernel` on the current stream.

    Args:
        base: any of the sources, fp32/bf16/fp16 as all of them.
        places: int64 ``[tensors]``, elements from ``base`` to each source.
        jobs: int64 ``[jobs, 10]``; tile_jobs: int32 ``[tiles]``, the job of each program.
        target: ``[elements]`` fp32/bf16/fp16; begins at a multiple of 16 bytes.
        bad: int32 ``[1]``; set to 1 when a value of the target is NaN or infinite.
        aligned: all sources, the steps between their rows (or columns) and the lengths of these
            are multiples of 16 bytes.
    """
    exponent = 0
    if base.dtype == target.dtype:
        exponent = _EXPONENT[base.dtype]
        base, target = base.view(_BITS[base.dtype]), target.view(_BITS[base.dtype])
    copy_factors_kernel[(len(tile_jobs),)](
        base, places, jobs, tile_jobs, target, bad,
        UNIT=16 // base.element_size() if aligned else 1, TARGET_UNIT=16 // target.element_size(),
        EXPONENT=exponent, WORDS=JOB_WORDS, BLOCK_F=BLOCK_F, BLOCK_W=BLOCK_W, num_warps=4,
    )  # fmt: skip
