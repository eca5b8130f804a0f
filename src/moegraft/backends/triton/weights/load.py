"""A tile of weights, with a mask or without: what the K loops of all formats share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(ptrs, mask, EVEN: tl.constexpr):
    """Load a tile; EVEN: all of it is there, whatever the mask; else 0 where it is not."""
    if EVEN:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile
