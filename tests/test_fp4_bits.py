"""The PTX that widens 4-bit weights, which no interpreter of Triton runs: executed here as text."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moegraft.backends.triton.weights import fp4_bits
from moegraft.quant.elements import E2M1, E4M3

WORD = 0xFFFFFFFF


def bf16(bits: int) -> float:
    """The value of 16 bits."""
    word = bits << 16
    return (
        torch.tensor([word - (1 << 32) * (word >> 31)], dtype=torch.int32)
        .view(torch.float32)
        .item()
    )


def bits_of(value: float) -> int:
    """Round to bfloat16, subnormals too; a double holds every product of two exactly."""
    rounded = torch.tensor([value], dtype=torch.float64).to(torch.bfloat16)
    return int(rounded.view(torch.int16).item()) & 0xFFFF


def fused_multiply_add(a: int, b: int, c: int) -> int:
    return sum(
        bits_of(bf16(a >> h & 0xFFFF) * bf16(b >> h & 0xFFFF) + bf16(c >> h & 0xFFFF)) << h
        for h in (0, 16)
    )


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "min.u32": min,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "shr.u32": lambda a, b: a >> b,
    "fma.rn.bf16x2": fused_multiply_add,
}


def execute(text: str, outputs: int, *inputs: int) -> list[int]:
    """Run a block of PTX whose operands are first outputs, then inputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in text.strip().splitlines():
        operation, _, operands = line.strip().rstrip(";").partition(" ")
        if operation in ("{", "}", ".reg"):
            continue
        if operands.startswith("{"):  # the two halves of a word
            low, high, word = (name.strip(" {}") for name in operands.split(","))
            registers[low], registers[high] = registers[word] & 0xFFFF, registers[word] >> 16
            continue
        target, *sources = (name.strip() for name in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = OPERATIONS[operation](*values)  # type: ignore[operator]
    return [registers[f"${i}"] for i in range(outputs)]


def scale_word(kind: str, byte: int) -> int:
    text = fp4_bits._E4M3.value if kind == "e4m3" else fp4_bits._E8M0.value
    (word,) = execute(text, 1, byte)
    assert word >> 16 == word & 0xFFFF
    return word


def test_every_scale_is_exact() -> None:
    values = E4M3.decode(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)).double()
    for byte, value in enumerate(values.tolist()):
        assert bf16(scale_word("e4m3", byte) & 0xFFFF) == value * 2.0**119
    for byte in range(192):
        assert bf16(scale_word("e8m0", byte) & 0xFFFF) == (2.0 ** (byte - 64) if byte + 63 else 0)
    assert bf16(scale_word("e8m0", 255) & 0xFFFF) == float("inf")


@pytest.mark.parametrize(
    ("kind", "byte"),
    [("e4m3", b) for b in (1, 7, 8, 9, 60, 126)] + [("e8m0", b) for b in (58, 64, 127, 150, 191)],
)
def test_every_value_times_a_scale_is_exact(kind: str, byte: int) -> None:
    stored_scale = torch.tensor([byte], dtype=torch.uint8)
    if kind == "e4m3":
        scale, left_out = E4M3.decode(stored_scale.view(torch.float8_e4m3fn)).item(), 2.0**-7
    else:
        scale, left_out = 2.0 ** (byte - 127), 2.0**-63
    s = scale_word(kind, byte)
    both = E2M1.decode(torch.arange(256, dtype=torch.uint8)[:, None]).double()
    for first in range(256):
        stored = [first, (first * 7 + 3) & 255, (first * 13 + 5) & 255, 255 - first]
        word = sum(value << 8 * i for i, value in enumerate(stored))
        found = [bf16(bits) for bits in execute(fp4_bits._WORD.value, 8, word, s)]
        wanted = (both[stored].flatten() * scale * left_out).tolist()
        assert [found[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)] == wanted
