"""From bytes of two 4-bit values, and the scales of their blocks, to values that are multiplied.

The bits of e2m1 (sign, two of exponent, one of mantissa) moved to the sign, the last two bits of
the exponent and the first of the mantissa of bfloat16 are the value times ``2**-126``: that holds
for its subnormal 0.5 too, as long as nobody flushes those of bfloat16, and the products do not.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
#: 4 bytes, and four times the same two scales -> 4 low and 4 high halves, times their scale. In
#: each half of a word lies one byte; one product moves its bits to both of their places.
_BYTES = tl.constexpr(
    """
    {
    .reg .b32 first, second, zero, t;
    mov.b32 zero, 0x80008000;
    prmt.b32 first, $4, 0, 0x4140;
    prmt.b32 second, $4, 0, 0x4342;
    and.b32 t, first, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $0, t, $5, zero;
    and.b32 t, second, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $1, t, $5, zero;
    and.b32 t, first, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $2, t, $5, zero;
    and.b32 t, second, 0x00F000F0;
    mul.lo.u32 t, t, 0x104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $3, t, $5, zero;
    }
    """
)


@triton.jit
def _of_each_byte(s, BLOCK_N: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Return scales ``[BLOCK_N, blocks]`` as ``[BLOCK_N, HALF]``, one for each byte."""
    s = tl.broadcast_to(s[:, :, None], [BLOCK_N, HALF // WIDTH, WIDTH])
    return tl.reshape(s, [BLOCK_N, HALF])


@triton.jit
def high_low_packed(w, s, NV: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return low and high halves of bytes ``[BLOCK_N, HALF]``, bfloat16, times their scales.

    Smaller than the weights by a factor of 2**7 (NVFP4, whose matrix's scale is left out too) or
    2**63 (MXFP4), so that neither the largest nor the smallest leave bfloat16.
    """
    s = s.to(tl.uint32)
    if NV:
        s = tl.inline_asm_elementwise(_E4M3, "=r,r", [s], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        s = tl.inline_asm_elementwise(_E8M0, "=r,r", [s], dtype=tl.uint32, is_pure=True, pack=1)
    s = _of_each_byte(s, BLOCK_N, HALF, 8 if NV else 16)
    return tl.inline_asm_elementwise(
        _BYTES, "=r,=r,=r,=r,r,r,r,r,r", [w, s], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@triton.jit
def high_low_exact(w, s, dtype, NV: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return the same in another dtype, the weights themselves but for the matrix's scale."""
    s = s.to(tl.uint32)
    if NV:
        s = (s << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    else:
        s = (s << 23).to(tl.float32, bitcast=True)
    s = _of_each_byte(s, BLOCK_N, HALF, 8 if NV else 16)
    w = w.to(tl.uint32)
    low = ((w & 7) << 22) | ((w & 8) << 28)
    high = ((w & 0x70) << 18) | ((w & 0x80) << 24)
    largest: tl.constexpr = 85070591730234615865843651857942052864.0  # 2**126
    low = low.to(tl.float32, bitcast=True) * largest * s
    high = high.to(tl.float32, bitcast=True) * largest * s
    return low.to(dtype), high.to(dtype)
