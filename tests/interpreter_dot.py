"""Products of Triton's interpreter whose rows do not depend on where they lie in a tile.

The interpreter multiplies with numpy's BLAS, and on some processors a BLAS rounds a row in another
order when it is the third of a tile in place of the first. A matrix unit does not, and the kernels
promise equal bits wherever a row lands, so tests of that promise need a product that keeps it too.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def install() -> None:
    """Replace the interpreter's ``tl.dot`` by a sum in the order of K, element by element."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = (np.ascontiguousarray(side.data) for side in (a, b))
        assert a.dtype.primitive_bitwidth > 8, "no kernel here needs more"
        product = np.einsum("...mk,...kn->...mn", left, right, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
