"""Peers' figures as data: microseconds of the layer without and with LoRA; needs no torch.

Measured on one H200 whose copy rate was 4.3 TB/s, bf16 unless said, from routing ids to the summed
output, CUDA-graph replay, 8 slots. A run on another device scales them by its own copy rate: right
where memory is the limit (decode), a rough guide elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes per second, read plus written, of the device that the figures are from.
COPY_RATE = 4.3e12


@dataclass(frozen=True)
class PeerFigure:
    """One measurement of another system.

    Attributes:
        system: name and version.
        model: name of a shape.
        tokens, rank, adapters: T, rank, and adapters that the batch used.
        kind: of the adapters, as in :mod:`moegraft.bench.options`, or ``unknown``.
        weights: ``bf16``, or ``fp8``: blocks of 128 x 128.
        base_us, lora_us: microseconds; None = not measured.
    """

    system: str
    model: str
    tokens: int
    rank: int
    adapters: int
    kind: str
    weights: str
    base_us: float | None
    lora_us: float | None


VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
SGLANG_VIRTUAL = "SGLang 0.5.23 virtual experts"
GROUPED_MM = "torch._grouped_mm, products only"

#: system, model, rank, adapters, kind, weights -> {tokens: (base, LoRA)}
_Row = tuple[str, str, int, int, str, str, dict[int, tuple[float | None, float | None]]]
_ROWS: tuple[_Row, ...] = (
    (VLLM, "q30", 16, 8, "separate", "bf16", {
        1: (31, 71), 4: (77, 123), 16: (200, 248), 32: (259, 331), 64: (301, 397),
        128: (304, 455), 256: (329, 547), 512: (328, 667), 1024: (381, 960), 2048: (495, 1132),
        8192: (1541, 2376), 32768: (5566, 8354),
    }),
    (VLLM, "q35", 16, 8, "fused", "bf16", {
        1: (25, 62), 4: (66, 107), 16: (170, 228), 64: (346, 436), 128: (406, 617),
        256: (421, 721), 2048: (544, 1393), 8192: (1303, 2363),
    }),
    (SGLANG, "q30", 16, 8, "separate", "bf16", {
        1: (28, 38), 4: (75, 88), 16: (197, 214), 32: (253, 274), 64: (298, 332),
        128: (301, 367), 256: (325, 405), 512: (328, 473), 1024: (381, 529), 2048: (495, 666),
        8192: (1431, 1871), 32768: (5514, 6596),
    }),
    (SGLANG, "q35", 16, 8, "separate", "bf16", {
        1: (32, 35), 4: (57, 71), 16: (168, 183), 32: (247, 273), 64: (341, 374),
        128: (384, 452), 256: (396, 511), 512: (402, 616), 1024: (431, 664), 2048: (520, 777),
        8192: (1279, 1679), 32768: (4610, 5163),
    }),
    (SGLANG_VIRTUAL, "q30", 16, 8, "separate", "bf16", {
        1: (28, 47), 4: (73, 101), 16: (197, 256), 64: (295, 444), 128: (299, 534),
        256: (323, 618), 2048: (496, 844), 8192: (1447, 2081),
    }),
    (VLLM, "q30", 64, 8, "separate", "bf16", {
        1: (30, 99), 16: (199, 296), 64: (300, 551), 256: (330, 962), 2048: (496, 1694),
        8192: (1594, 2994),
    }),
    (SGLANG, "q30", 64, 8, "separate", "bf16", {
        1: (None, 42), 16: (None, 236), 64: (None, 417), 256: (None, 598), 2048: (None, 886),
        8192: (None, 2309),
    }),
    (SGLANG, "q30", 16, 1, "separate", "bf16", {
        1: (None, 38), 16: (None, 206), 64: (None, 311), 256: (None, 364), 2048: (None, 595),
        8192: (None, 1791),
    }),
    (VLLM, "q30", 16, 8, "unknown", "fp8", {
        1: (25, 66), 16: (115, 165), 64: (166, 265), 256: (212, 433), 2048: (502, 1152),
        8192: (1672, 2696),
    }),
    (VLLM, "q35", 16, 8, "unknown", "fp8", {
        1: (24, 60), 16: (99, 158), 64: (191, 280), 256: (230, 530), 2048: (434, 1295),
        8192: (1289, 2499),
    }),
    (GROUPED_MM, "q30", 16, 8, "separate", "bf16", {
        64: (414, None), 256: (428, None), 8192: (1286, None),
    }),
    (GROUPED_MM, "q35", 16, 8, "separate", "bf16", {
        64: (517, None), 256: (545, None), 8192: (1058, None),
    }),
)  # fmt: skip

FIGURES: tuple[PeerFigure, ...] = tuple(
    PeerFigure(system, model, tokens, rank, adapters, kind, weights, base, lora)
    for system, model, rank, adapters, kind, weights, cells in _ROWS
    for tokens, (base, lora) in cells.items()
)

#: Output tokens per second of vLLM 0.26 serving a Qwen3-30B-A3B shape on one H200: 48 layers,
#: random weights, 256 tokens in and 256 out, rank 16 on attention and experts. By concurrency.
VLLM_END_TO_END: dict[str, dict[int, int]] = {
    "no LoRA": {16: 1268, 32: 1997, 64: 3405, 128: 6116},
    "base rows on the LoRA engine": {16: 1243, 32: 1964, 64: 3347, 128: 5900},
    "1 adapter": {16: 985, 32: 1566, 64: 2705, 128: 4646},
    "8 adapters": {16: 921, 32: 1457, 64: 2421, 128: 3997},
}
