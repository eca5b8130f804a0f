"""How checkpoints of other programs store one quantised matrix: which tensors, and what they mean.

A new layout is one entry of :data:`LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moegraft.quant.formats import UNQUANTIZED, format_of
from moegraft.quant.matrices import QuantisedMatrix


class StoredShape(NamedTuple):
    """What a file's header says of a tensor: its dtype, such as ``F8_E4M3``, and its sizes."""

    dtype: str
    shape: tuple[int, ...]


Shapes = Mapping[str, StoredShape]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MatrixLayout:
    """One way to store a matrix, or a stack of them, ``[.., out, in]``.

    Attributes:
        name: for people.
        leaves: last parts of the names of its tensors; all of them must be there.
        dtype: of the values, as the file names it; None = a float dtype of 16 or 32 bits.
        weight_format: the format, by the shapes; None = none that is known.
        read: the tensors -> what they hold. The scales are as the format stores them.

    Example: ``weight`` ``F8_E4M3 [768, 2048]`` beside ``weight_scale_inv`` ``F32 [6, 16]`` is
    ``fp8-block``.
    """

    name: str
    leaves: tuple[str, ...]
    dtype: str | None
    weight_format: Callable[[Shapes], str | None]
    read: Callable[[Tensors], QuantisedMatrix]


#: Leaves of scales for static activations: a W4A16 or dynamic product has no use for them.
UNUSED_LEAVES = frozenset(("input_scale", "input_global_scale", "activation_scale"))
#: Leaves of formats that are known and have no implementation.
KNOWN_LEAVES = {
    "qweight": "AWQ or GPTQ (4-bit integers)",
    "qzeros": "AWQ or GPTQ (4-bit integers)",
    "weight_shape": "packed integers of compressed-tensors",
    "weight_zero_point": "integers with zero points",
    "absmax": "bitsandbytes",
    "quant_state": "bitsandbytes",
}
_FLOATS = ("BF16", "F16", "F32")


def find_layout(shapes: Shapes) -> MatrixLayout | None:
    """Return the layout that the leaves of one matrix have; None when there is none such."""
    used = {leaf for leaf in shapes if leaf not in UNUSED_LEAVES and leaf != "bias"}
    for layout in LAYOUTS:
        dtype = shapes[layout.leaves[0]].dtype if layout.leaves[0] in shapes else ""
        fits = dtype in _FLOATS if layout.dtype is None else dtype == layout.dtype
        if used == set(layout.leaves) and fits and layout.weight_format(shapes) is not None:
            return layout
    return None


def _always(name: str) -> Callable[[Shapes], str | None]:
    return lambda shapes: name


def _by_scales(values: str, scales: str) -> Callable[[Shapes], str | None]:
    """Tell FP8 formats apart by how many scales there are."""

    def find(shapes: Shapes) -> str | None:
        rows, columns = shapes[values].shape[-2:]
        found = shapes[scales].shape
        if found in ((), (1,), (1, 1)):
            return "fp8-tensor"
        if found in ((rows,), (rows, 1)):
            return "fp8-channel"
        block = format_of("fp8-block").grid(rows, columns)
        return "fp8-block" if found[-2:] == block else None

    return find


def _scales(values: str, scales: str) -> Callable[[Tensors], QuantisedMatrix]:
    """Values and scales in the format's own types; scales of fewer dimensions are filled up."""

    def read(tensors: Tensors) -> QuantisedMatrix:
        found = tensors[scales]
        if found.dim() < 2:
            found = found.reshape(-1, 1)
        return QuantisedMatrix(tensors[values], found.float(), None)

    return read


def _nvfp4(values: str, whole: Callable[[Tensors], torch.Tensor]) -> Callable[..., QuantisedMatrix]:
    def read(tensors: Tensors) -> QuantisedMatrix:
        stored = QuantisedMatrix(tensors[values], tensors["weight_scale"], None)
        return QuantisedMatrix(stored.values, stored.scales, whole(tensors).float().reshape(()))

    return read


LAYOUTS = (
    MatrixLayout(
        "plain",
        ("weight",),
        None,
        _always(UNQUANTIZED),
        lambda t: QuantisedMatrix(t["weight"], torch.empty(0), None),
    ),
    MatrixLayout(
        "fp8 with inverse block scales (DeepSeek, Qwen)",
        ("weight", "weight_scale_inv"),
        "F8_E4M3",
        _by_scales("weight", "weight_scale_inv"),
        _scales("weight", "weight_scale_inv"),
    ),
    MatrixLayout(
        "fp8 (compressed-tensors, ModelOpt)",
        ("weight", "weight_scale"),
        "F8_E4M3",
        _by_scales("weight", "weight_scale"),
        _scales("weight", "weight_scale"),
    ),
    MatrixLayout(
        "nvfp4 (ModelOpt)",
        ("weight", "weight_scale", "weight_scale_2"),
        "U8",
        _always("nvfp4"),
        _nvfp4("weight", lambda t: t["weight_scale_2"]),
    ),
    MatrixLayout(
        "nvfp4 (compressed-tensors)",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        "U8",
        _always("nvfp4"),
        # Theirs divides the scales, where ModelOpt's multiplies them.
        _nvfp4("weight_packed", lambda t: 1.0 / t["weight_global_scale"].float()),
    ),
    MatrixLayout(
        "mxfp4 (compressed-tensors)",
        ("weight_packed", "weight_scale"),
        "U8",
        lambda shapes: "mxfp4" if shapes["weight_scale"].dtype == "U8" else None,
        lambda t: QuantisedMatrix(t["weight_packed"], t["weight_scale"], None),
    ),
    MatrixLayout(
        "mxfp4 with inverse scales (DeepSeek)",
        ("weight", "weight_scale_inv"),
        "I8",
        lambda shapes: "mxfp4" if shapes["weight_scale_inv"].dtype == "F8_E8M0" else None,
        lambda t: QuantisedMatrix(
            t["weight"].view(torch.uint8), t["weight_scale_inv"].view(torch.uint8), None
        ),
    ),
    MatrixLayout(
        "mxfp4 blocks and scales (gpt-oss)",
        ("blocks", "scales"),
        "U8",
        lambda shapes: "mxfp4" if shapes["scales"].dtype == "U8" else None,
        lambda t: QuantisedMatrix(t["blocks"].flatten(-2), t["scales"], None),
    ),
)
