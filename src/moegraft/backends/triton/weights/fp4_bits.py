"""From words of eight 4-bit values, and the scales of their blocks, to values that are multiplied.

The bits of e2m1 (sign, two of exponent, one of mantissa) moved to the sign, the last two bits of
the exponent and the first of the mantissa of bfloat16 are the value times ``2**-126``: that holds
for its subnormal 0.5 too, as long as nobody flushes those of bfloat16, and the products do not.

Values stay where a thread's registers have them, so a row comes out in another order than it is
stored in: :func:`place` says where each of 32 columns goes, and rows of x are put in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Columns whose order changes among themselves: 4 words.
COLUMNS = tl.constexpr(32)

#: e4m3 without sign -> two bfloat16, each ``2**119`` times it. Its bits moved are it times 2**-120;
#: the rest takes two steps, for no bfloat16 is that large.
_E4M3 = tl.constexpr(
    """
    {
    .reg .b32 t, zero;
    mov.b32 zero, 0x80008000;
    mul.lo.u32 $0, $1, 0x00100010;
    mov.b32 t, 0x7B807B80;
    fma.rn.bf16x2 $0, $0, t, zero;
    mov.b32 t, 0x7B007B00;
    fma.rn.bf16x2 $0, $0, t, zero;
    }
    """
)
#: e8m0 -> two bfloat16, each ``2**63`` times it; infinite from 2**65 on.
_E8M0 = tl.constexpr(
    """
    {
    min.u32 $0, $1, 192;
    mad.lo.u32 $0, $0, 0x00800080, 0x1F801F80;
    }
    """
)
#: A word, and its two scales -> values 0 and 4, 1 and 5, 2 and 6, 3 and 7 times the scale. Each
#: half of the word has one of a pair at the same place; a product moves its bits to both of theirs.
_WORD = tl.constexpr(
    """
    {
    .reg .b32 zero, shifted, t;
    mov.b32 zero, 0x80008000;
    and.b32 t, $8, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 t, t, $9, zero;
    mov.b32 {$0, $1}, t;
    and.b32 t, $8, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 t, t, $9, zero;
    mov.b32 {$2, $3}, t;
    shr.u32 shifted, $8, 8;
    and.b32 t, shifted, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 t, t, $9, zero;
    mov.b32 {$4, $5}, t;
    and.b32 t, shifted, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 t, t, $9, zero;
    mov.b32 {$6, $7}, t;
    }
    """
)


@triton.jit
def place(column):
    """Return where a column is after :func:`widened`, and so in the rows that it meets."""
    word = column % 32 // 8
    return column // 32 * 32 + column % 4 // 2 * 16 + column % 2 * 8 + word * 2 + column % 8 // 4


@triton.jit
def place_in_eight(column):
    """Return the same for ``widen`` of backends/cuda: a word's pairs 0 4, 1 5, 2 6, 3 7."""
    return column // 8 * 8 + column % 4 * 2 + column % 8 // 4


@triton.jit
def widened(w, s, dtype, NV: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """Return words ``[BLOCK_N, WORDS]`` times the scales of their blocks: ``[BLOCK_N, 8 * WORDS]``.

    NVFP4 (NV) leaves out the scale of the matrix. In bfloat16 all are smaller than the weights, by
    a factor of 2**7 (NVFP4) or 2**63 (MXFP4), so that neither large nor small ones leave its range.
    """
    s = s.to(tl.uint32)
    if dtype == tl.bfloat16:
        if NV:
            s = tl.inline_asm_elementwise(_E4M3, "=r,r", [s], tl.uint32, is_pure=True, pack=1)
        else:
            s = tl.inline_asm_elementwise(_E8M0, "=r,r", [s], tl.uint32, is_pure=True, pack=1)
        v0, v4, v1, v5, v2, v6, v3, v7 = tl.inline_asm_elementwise(
            _WORD, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [w, _of_each_word(s, NV, BLOCK_N, WORDS)],
            (tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        if NV:
            s = (s << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        else:
            s = (s << 23).to(tl.float32, bitcast=True)
        s = _of_each_word(s, NV, BLOCK_N, WORDS)
        w = w.to(tl.uint32, bitcast=True)
        v0, v1 = _exact(w, s, dtype), _exact(w >> 4, s, dtype)
        v2, v3 = _exact(w >> 8, s, dtype), _exact(w >> 12, s, dtype)
        v4, v5 = _exact(w >> 16, s, dtype), _exact(w >> 20, s, dtype)
        v6, v7 = _exact(w >> 24, s, dtype), _exact(w >> 28, s, dtype)
    first = tl.join(tl.join(v0, v4), tl.join(v1, v5))
    second = tl.join(tl.join(v2, v6), tl.join(v3, v7))
    # Per 4 words: word, half of the word, odd, third or fourth of a half.
    values = tl.reshape(tl.join(first, second), [BLOCK_N, WORDS // 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(values, [0, 1, 5, 4, 2, 3]), [BLOCK_N, WORDS * 8])


@triton.jit
def _of_each_word(s, NV: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """Return scales of blocks of 2 (NVFP4) or 4 words as ``[BLOCK_N, WORDS]``."""
    width: tl.constexpr = 2 if NV else 4
    s = tl.broadcast_to(s[:, :, None], [BLOCK_N, WORDS // width, width])
    return tl.reshape(s, [BLOCK_N, WORDS])


@triton.jit
def _exact(w, s, dtype):
    """Return the value in the last 4 bits, times the scale, in fp32 and then in ``dtype``."""
    bits = ((w & 7) << 22) | ((w & 8) << 28)
    largest: tl.constexpr = 85070591730234615865843651857942052864.0  # 2**126
    return (bits.to(tl.float32, bitcast=True) * largest * s).to(dtype)
