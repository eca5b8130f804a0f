"""The slot tensors of engines as factor tables: one function per engine's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moegraft.adapters.foreign_pool import ForeignFactor, ForeignPool
from moegraft.errors import AdapterError
from moegraft.sites import Site

__all__ = ["ForeignFactor", "ForeignPool", "packed_pool", "stacked_pool"]


def stacked_pool(
    site: Site,
    w13_a: Sequence[torch.Tensor],
    w13_b: Sequence[torch.Tensor],
    w2_a: torch.Tensor | Sequence[torch.Tensor],
    w2_b: torch.Tensor | Sequence[torch.Tensor],
) -> ForeignPool:
    """Make a pool of vLLM's slot tensors.

    Args:
        site: the experts site.
        w13_a: one ``[S, E or 1, R, H]`` that gate and up share, or two: gate's and up's.
        w13_b: as many: ``[S, E or 1, 2I, R]`` in the host's columns, or ``[S, E or 1, I, R]``.
        w2_a: ``[S, E or 1, R, I]``.
        w2_b: ``[S, E or 1, H, R]``.

    vLLM folds the scale into B: ``load`` with scale 1.
    """
    if len(w13_a) != len(w13_b) or len(w13_a) not in (1, 2):
        raise AdapterError(
            f"{site.name}: {len(w13_a)} slices of A and {len(w13_b)} of B; expected one or two of "
            "each."
        )
    for tensor in w13_b:
        _check_dims(site, "w13_b", tensor)
    width = site.projection("up").out_features
    factors = {"down": ForeignFactor(_one(w2_a, "w2_a"), _one(w2_b, "w2_b"))}
    sides = ("gate", "up") if site.gated else ("up",)
    if len(w13_a) == 2 and not site.gated:
        raise AdapterError(f"{site.name}: two slices, but the experts have no gate.")
    for i, side in enumerate(sides):
        if len(w13_a) == 2:
            factors[side] = ForeignFactor(w13_a[i], w13_b[i])
        else:
            factors[side] = ForeignFactor(
                w13_a[0], w13_b[0][:, :, site.layout.columns(side, width)]
            )
    return ForeignPool(site, factors)


def packed_pool(
    site: Site,
    gate_up_a: torch.Tensor,
    gate_up_b: torch.Tensor,
    down_a: torch.Tensor,
    down_b: torch.Tensor,
) -> ForeignPool:
    """Make a pool of SGLang's slot tensors.

    Args:
        site: the experts site.
        gate_up_a: ``[S, E or 1, 2R, H]``: an adapter of rank r has gate's A in rows 0 to r and
            up's behind them; or ``[S, E or 1, R, H]``, shared by both.
        gate_up_b: ``[S, E or 1, 2I, R]`` in the host's columns.
        down_a: ``[S, E or 1, R, I]``.
        down_b: ``[S, E or 1, H, R]``.
    """
    _check_dims(site, "gate_up_a", gate_up_a)
    _check_dims(site, "gate_up_b", gate_up_b)
    width, rank = site.projection("up").out_features, gate_up_b.shape[-1]
    separate = site.gated and gate_up_a.shape[2] == 2 * rank
    if gate_up_a.shape[2] != rank and not separate:
        raise AdapterError(
            f"{site.name}: gate_up_a has {gate_up_a.shape[2]} rows and gate_up_b rank {rank}; "
            f"expected {rank} rows{f', or {2 * rank}' if site.gated else ''}."
        )
    factors = {"down": ForeignFactor(down_a, down_b)}
    for side in ("gate", "up") if site.gated else ("up",):
        columns = gate_up_b[:, :, site.layout.columns(side, width)]
        factors[side] = ForeignFactor(gate_up_a, columns, behind=int(separate and side == "up"))
    return ForeignPool(site, factors)


def _check_dims(site: Site, what: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 4:
        raise AdapterError(
            f"{site.name}: {what} has shape {tuple(tensor.shape)}; it must be [S, E or 1, .., ..]."
        )


def _one(tensor: torch.Tensor | Sequence[torch.Tensor], what: str) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    if len(tensor) != 1:
        raise AdapterError(f"{what} has {len(tensor)} slices; expected one tensor.")
    return tensor[0]
