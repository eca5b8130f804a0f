"""The GEMMs of a layer with many rows and FP8 weights with block scales, on Hopper.

Both products are of e4m3 with e4m3: x gets a copy in e4m3 with a scale per token and 128 columns, h
is made so by gate_up. What adapters read stays in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.triton.prefill import hopper
from moegraft.backends.triton.prefill.block_groups import BlockGroups
from moegraft.backends.triton.prefill.config import PrefillConfig
from moegraft.backends.triton.prefill.hopper import Fp8Operands, Operands, launch_gemm
from moegraft.backends.triton.prefill.route import Rows
from moegraft.backends.triton.weights.rows import GROUP, make_base_rows, run_base_rows
from moegraft.types import ExpertWeights


@dataclass(frozen=True)
class Fp8Tokens:
    """x as gate_up's product reads it, and as adapters do.

    Attributes:
        values: ``[T, H]`` e4m3.
        scales: fp32 ``[T, H / 128]``.
        plain: ``[T, H]`` in 16 bits.
    """

    values: torch.Tensor
    scales: torch.Tensor
    plain: torch.Tensor


@dataclass(frozen=True)
class Fp8Rows:
    """h as down's product reads it, and as adapters do.

    Attributes:
        values: ``[rows, I]`` e4m3.
        scales: fp32 ``[I / 128, rows]``: those of a block's rows are neighbours.
        plain: ``[rows, I]`` in 16 bits; None = nobody reads it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    plain: torch.Tensor | None


def run_tokens(x: torch.Tensor, weights: ExpertWeights) -> Fp8Tokens:
    """Round x ``[T, H]``; ahead of the shrink, for gate_up waits for blocks of S alone."""
    base = make_base_rows(weights.weight_format, x.shape[0], weights.hidden, x.dtype, x.device)
    assert base is not None and base.scales is not None
    run_base_rows(x, base)
    return Fp8Tokens(base.values, base.scales, x)


def run_shrink(
    x: Fp8Tokens | Fp8Rows, groups: BlockGroups, down: bool, rows: Rows, top_k: int,
    config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return ``S`` of x ``[T, H]`` or, for down, of h; see :func:`.hopper.run_shrink`."""
    assert x.plain is not None
    return hopper.run_shrink(x.plain, groups, down, rows, top_k, config)


def run_gate_up(
    x: Fp8Tokens, weights: ExpertWeights, groups: BlockGroups | None, s: torch.Tensor | None,
    rows: Rows, top_k: int, config: PrefillConfig,
) -> Fp8Rows:  # fmt: skip
    """Return h, in the order of the blocks."""
    inter, device = weights.intermediate, x.values.device
    assert weights.scales is not None
    values = torch.empty(rows.num_rows, inter, dtype=x.values.dtype, device=device)
    scales = torch.empty(inter // GROUP, rows.num_rows, dtype=torch.float32, device=device)
    plain = None if s is None else torch.empty_like(values, dtype=x.plain.dtype)
    h = Fp8Rows(values, scales, plain)
    launch_gemm(
        hopper.gate_up_spec(weights, s is not None, rows, top_k, config),
        Operands(
            x.values, weights.gate_up.view(-1, weights.hidden), weights.gate_up_bias,
            values if plain is None else plain, s, None,
            Fp8Operands(weights.scales.gate_up, x.scales, values, scales),
        ),
        groups, rows,
    )  # fmt: skip
    return h


def run_down(
    h: Fp8Rows, topk_weights: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None,
    s: torch.Tensor | None, rows: Rows, config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return y ``[rows, H]`` in 16 bits, weighted, in the order of the blocks."""
    assert weights.scales is not None
    y = torch.empty(rows.num_rows, weights.hidden, dtype=weights.dtype, device=h.values.device)
    launch_gemm(
        hopper.down_spec(weights, s is not None, topk_weights, rows, config),
        Operands(
            h.values, weights.down.view(-1, weights.intermediate), weights.down_bias, y, s,
            topk_weights, Fp8Operands(weights.scales.down, h.scales),
        ),
        groups, rows,
    )  # fmt: skip
    return y
