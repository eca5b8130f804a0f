"""The check of all rows of a large batch, on its own device.

The reference goes pair by pair and can take a few rows only. Here the same maths runs expert by
expert in fp32, so that a wrong tile anywhere in the batch shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moegraft.activations import apply_activation
from moegraft.bench.cases import DecodeCase
from moegraft.bench.layer_runs import Expected
from moegraft.quant.activations import rounded_activations
from moegraft.quant.experts import Side, expert_matrix, weight_format_of
from moegraft.testing.compare import ROW_FACTOR, tolerance_of
from moegraft.testing.unrounded import unrounded_weights
from moegraft.types import ExpertWeights, SiteFactors


class EveryRow(Expected):
    """Some rows against the reference, and all rows against fp32 products expert by expert."""

    def __init__(self, case: DecodeCase) -> None:
        super().__init__(case)
        self._all_base, self._all_lora = layer_by_expert(case)
        weights = unrounded_weights(case.weights)
        self._all_unrounded: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if weights is not None:
            self._all_unrounded = layer_by_expert(replace(case, weights=weights))

    def check_base(self, base: torch.Tensor) -> dict[str, Any]:
        """Compare the base alone; AssertionError when it is wrong."""
        found = super().check_base(base)
        error = _output_error(base, self._all_base, self._all_unrounded[0], "all rows, base")
        return {**found, "all_rows": base.shape[0], "all_output_error": error}

    def check(self, lora: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
        """Compare output, base and the delta alone; AssertionError when one is wrong."""
        found = super().check(lora, base)
        unrounded = self._all_unrounded[1]
        output = _output_error(lora, self._all_lora, unrounded, "all rows, output")
        allowed = tolerance_of(lora.dtype, None if unrounded is None else 0.0)
        expected = self._all_lora - self._all_base
        delta = rows_error(lora.float() - base.float(), expected, allowed.delta, "all rows, delta")
        return {
            **found,
            "all_rows": lora.shape[0],
            "all_output_error": output,
            "all_delta_error": delta,
        }


def _output_error(
    actual: torch.Tensor, expected: torch.Tensor, unrounded: torch.Tensor | None, what: str
) -> float:
    """As :func:`rows_error` with the tolerance of an output, as ``assert_close`` has it."""
    if unrounded is None:
        return rows_error(actual, expected, tolerance_of(actual.dtype).output, what)
    own_error = rows_error(expected, unrounded, float("inf"), f"{what}, the references")
    allowed = tolerance_of(actual.dtype, own_error, actual.shape[0])
    assert allowed.unrounded is not None
    rows_error(actual, unrounded, allowed.unrounded, f"{what}, against activations as they are")
    return rows_error(actual, expected, allowed.output, what)


def rows_error(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> float:
    """Return ``||a - e|| / ||e||`` of ``[T, H]`` results, compared on their device.

    As :func:`moegraft.testing.compare.assert_close`: the whole may be off by ``tolerance``, a row
    by :data:`ROW_FACTOR` times as much, of its own size or the typical one, whichever is larger.

    Raises:
        AssertionError: more than that, or NaN or Inf; names the worst row and counts the bad ones.
    """
    row_errors, row_sizes = (
        torch.linalg.vector_norm(t, dim=1).double()
        for t in (actual.float() - expected, expected.float())
    )
    size = row_sizes.norm()
    if not bool(size > 0):
        assert not bool(row_errors.any()), f"{what}: not exactly zero, as it should be"
        return 0.0
    typical = row_sizes[row_sizes > 0].square().mean().sqrt()
    ratios = row_errors / row_sizes.clamp(min=float(typical))
    bad = ~(ratios <= ROW_FACTOR * tolerance)  # NaN is bad
    error = float(row_errors.norm() / size)
    if error <= tolerance and not bool(bad.any()):
        return error
    worst = int(ratios.nan_to_num(nan=float("inf")).argmax())
    raise AssertionError(
        f"{what}: ||a-e||/||e|| = {error:.3e}, allowed {tolerance:.1e}; {int(bad.sum())} of "
        f"{len(bad)} rows are off by more than {ROW_FACTOR * tolerance:.1e}, worst row {worst}: "
        f"{float(ratios[worst]):.3e}"
    )


def layer_by_expert(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a case's first set without and with the adapters: fp32 ``[T, H]`` each."""
    inputs, weights = case.sets[0], case.weights
    top_k = inputs.topk_ids.shape[1]
    ids = inputs.topk_ids.reshape(-1).long()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=weights.num_experts).tolist()
    routing = inputs.topk_weights.reshape(-1)
    adapters = {slot: case.table.factors(slot) for slot in case.live}
    base = torch.zeros_like(inputs.x, dtype=torch.float32)
    lora = torch.zeros_like(base)
    sides = ("gate", "up") if weights.layout.gated else ("up",)
    end = 0
    for expert, count in enumerate(counts):
        start, end = end, end + count
        if not count:
            continue
        pairs = order[start:end]
        tokens = pairs // top_k
        rows = _Rows(weights, adapters, expert, case.slots[tokens])
        scale = routing[pairs, None].float()
        gate_up = rows.base("gate_up", inputs.x[tokens].float())
        plain, grafted = (
            rows.activate(wide, inputs.x.dtype)
            for wide in (gate_up, rows.with_delta(sides, inputs.x[tokens], gate_up))
        )
        base.index_add_(0, tokens, scale * rows.base("down", plain))
        y = rows.with_delta(("down",), grafted, rows.base("down", grafted))
        lora.index_add_(0, tokens, scale * y)
    return base, lora if case.live else base


class _Rows:
    """The rows of one expert, in fp32; ``slots`` is their adapter slot, ``[n]``."""

    def __init__(
        self,
        weights: ExpertWeights,
        adapters: dict[int, SiteFactors | None],
        expert: int,
        slots: torch.Tensor,
    ) -> None:
        self._weights = weights
        self._adapters = adapters
        self._expert = expert
        self._slots = slots

    def base(self, side: Side, rows: torch.Tensor) -> torch.Tensor:
        """Return ``W rows + b`` of gate_up or down, of the rows as the weight format reads them."""
        w, e = self._weights, self._expert
        weight_format = weight_format_of(w)
        if weight_format is not None:
            rows = rounded_activations(rows, weight_format)
        bias = w.gate_up_bias if side == "gate_up" else w.down_bias
        found = rows @ expert_matrix(w, side, e).T
        return found if bias is None else found + bias[e].float()

    def activate(self, gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return h, rounded as every backend rounds it."""
        w = self._weights
        h = apply_activation(gate_up, w.activation, w.layout, w.intermediate)
        return h.to(dtype).float()

    def with_delta(
        self, names: Sequence[str], rows: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Return ``out`` with the adapters' deltas of some projections added."""
        w, found = self._weights, out.clone()
        for name in names:
            where = slice(None) if name == "down" else w.layout.columns(name, w.intermediate)
            delta = self._delta(name, rows.float())
            if delta is not None:
                found[:, where] += delta
        return found

    def _delta(self, name: str, rows: torch.Tensor) -> torch.Tensor | None:
        """Return one projection's delta: the live adapters side by side, each row picks its own."""
        downs, ups, owners = [], [], []
        for slot, adapter in self._adapters.items():
            factor = None if adapter is None else adapter.projections.get(name)
            if factor is None:
                continue
            assert adapter is not None
            entry = adapter.entry(self._expert)
            if entry < 0:
                continue
            a, b = (t[entry if t.shape[0] > 1 else 0] for t in (factor.lora_A, factor.lora_B))
            downs.append(a.float())
            ups.append(b.float() * factor.scale)
            owners += [slot] * a.shape[0]
        if not owners:
            return None
        own = self._slots[:, None] == torch.tensor(owners, device=rows.device)
        ranks = rows @ torch.cat(downs).T
        return torch.where(own, ranks, 0.0) @ torch.cat(ups, 1).T
