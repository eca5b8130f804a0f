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

aligned = hopper.aligned


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


def run_shrink(
    x: torch.Tensor | Fp8Rows, groups: BlockGroups, down: bool, rows: Rows, top_k: int,
    config: PrefillConfig,
) -> torch.Tensor:  # fmt: skip
    """Return ``S`` of x ``[T, H]`` or, for down, of h; see :func:`.hopper.run_shrink`."""
    if isinstance(x, Fp8Rows):
        assert x.plain is not None
        x = x.plain
    return hopper.run_shrink(x, groups, down, rows, top_k, config)


def run_gate_up(
    x: torch.Tensor, weights: ExpertWeights, groups: BlockGroups | None, s: torch.Tensor | None,
    rows: Rows, top_k: int, config: PrefillConfig,
) -> Fp8Rows:  # fmt: skip
    """Return h, in the order of the blocks; x is ``[T, H]`` in 16 bits."""
    hidden, inter, device = weights.hidden, weights.intermediate, x.device
    base = make_base_rows(weights.weight_format, x.shape[0], hidden, x.dtype, device)
    assert base is not None and base.scales is not None and weights.scales is not None
    run_base_rows(x, base)
    values = torch.empty(rows.num_rows, inter, dtype=base.values.dtype, device=device)
    scales = torch.empty(inter // GROUP, rows.num_rows, dtype=torch.float32, device=device)
    h = Fp8Rows(values, scales, None if s is None else torch.empty_like(values, dtype=x.dtype))
    launch_gemm(
        hopper.gate_up_spec(weights, s is not None, rows, top_k, config),
        Operands(
            base.values, weights.gate_up.view(-1, hidden), weights.gate_up_bias,
            values if h.plain is None else h.plain, s, None,
            Fp8Operands(weights.scales.gate_up, base.scales, values, scales),
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
