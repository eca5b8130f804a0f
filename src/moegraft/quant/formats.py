"""The weight formats, as data: the only place that knows bits, blocks and types of scales.

A new format is one entry of :data:`FORMATS`. Its tests are those of every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moegraft.errors import UnsupportedError
from moegraft.quant.elements import E2M1, E4M3, Element
from moegraft.quant.scales import E4M3_AND_FP32, E8M0, FP32, ScaleKind

#: Name of weights that are stored as they are multiplied.
UNQUANTIZED = "unquantized"


@dataclass(frozen=True)
class WeightFormat:
    """How one matrix ``[out, in]`` of an expert is stored.

    Attributes:
        name: what ``ExpertWeights.weight_format`` and ``--format`` call it.
        title: one line for people.
        element: type of the values.
        block: rows and columns of one scale; 0 = all of them. Gate and up are matrices of their
            own: no block reaches over both.
        scale: type of the scales.
        activation_group: the base product reads activations rounded to e4m3, with one fp32 scale
            per token and so many columns; None = as they are. LoRA always reads them as they are.

    Example: NVFP4 of ``[1536, 2048]`` is values uint8 ``[1536, 1024]``, scales e4m3
    ``[1536, 128]`` and one fp32.
    """

    name: str
    title: str
    element: Element
    block: tuple[int, int]
    scale: ScaleKind
    activation_group: int | None = None

    @property
    def bits(self) -> int:
        """Of one value, without scales."""
        return self.element.bits

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many scales a matrix of these sizes has, down and across."""
        down, across = self.block
        return -(-rows // down) if down else 1, -(-columns // across) if across else 1

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix, scales included."""
        down, across = self.grid(rows, columns)
        scales = down * across * self.scale.storage.itemsize + 4 * self.scale.has_global
        return rows * columns * self.bits // 8 + scales


_ALL = (
    WeightFormat(
        "fp8-block",
        "FP8 e4m3, one scale per 128 x 128; activations FP8 per token and 128 columns (W8A8)",
        E4M3,
        (128, 128),
        FP32,
        activation_group=128,
    ),
    WeightFormat(
        "fp8-block-w8a16",
        "FP8 e4m3, one scale per 128 x 128; 16-bit activations (W8A16)",
        E4M3,
        (128, 128),
        FP32,
    ),
    WeightFormat(
        "fp8-channel", "FP8 e4m3, one scale per row; 16-bit activations", E4M3, (1, 0), FP32
    ),
    WeightFormat(
        "fp8-tensor", "FP8 e4m3, one scale per matrix; 16-bit activations", E4M3, (0, 0), FP32
    ),
    WeightFormat(
        "nvfp4",
        "FP4 e2m1, one e4m3 scale per 16 columns and one fp32 per matrix; 16-bit activations",
        E2M1,
        (1, 16),
        E4M3_AND_FP32,
    ),
    WeightFormat(
        "mxfp4",
        "FP4 e2m1, one power of two per 32 columns; 16-bit activations",
        E2M1,
        (1, 32),
        E8M0,
    ),
)
#: Name -> format.
FORMATS: Mapping[str, WeightFormat] = {found.name: found for found in _ALL}
#: Formats that are known and refused, with the reason.
REFUSED: Mapping[str, str] = {
    "nvfp4-w4a4": (
        "native FP4 products need a Blackwell GPU, and none has proved them here yet; "
        "'nvfp4' runs the same weights with 16-bit activations"
    ),
}


def why_no_format(name: str) -> str | None:
    """Say why weights of this format can't be; None for one that can, or for unquantised ones."""
    if name in REFUSED:
        return f"weight format {name!r} is refused: {REFUSED[name]}"
    if name != UNQUANTIZED and name not in FORMATS:
        return f"there is no weight format {name!r}; there are {', '.join(FORMATS)}"
    return None


def format_of(name: str) -> WeightFormat:
    """Return a format by its name.

    Raises:
        UnsupportedError: there is none of that name, or it is refused; says why.
    """
    reason = why_no_format(name)
    if reason is not None:
        raise UnsupportedError(f"{reason[0].upper()}{reason[1:]}.")
    return FORMATS[name]
