"""Products and conversions of Triton's interpreter, as a GPU has them.

The interpreter multiplies with numpy's BLAS, and on some processors a BLAS rounds a row in another
order when it is the third of a tile in place of the first. A matrix unit does not, and the kernels
promise equal bits wherever a row lands, so tests of that promise need a product that keeps it too.
Its conversion to e4m3 loses the carry of a mantissa that is rounded up, and cuts small values off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def install() -> None:
    """Replace ``tl.dot`` by a sum in the order of K, element by element, and casts of e4m3."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert_float = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Go over fp32 to e4m3 and back, with torch; everything else is the interpreter's."""
        if source == tl.float32 and target == tl.float8e4nv:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv and target != tl.float8e4nv:
            values = torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn)
            exact = values.float().numpy()
            if target == tl.float16:
                return exact.astype(np.float16).view(np.uint16)
            if target == tl.float32:
                return exact.view(np.uint32)
            return convert_float(exact, tl.float32, target, rounding)
        return convert_float(data, source, target, rounding)

    interpreter._convert_float = convert

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = (
            convert(side.data, side.dtype, tl.float32, None).view(np.float32)
            if side.dtype.primitive_bitwidth == 8
            else np.ascontiguousarray(side.data)
            for side in (a, b)
        )
        product = np.einsum("...mk,...kn->...mn", left, right, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
