"""A whole layer call with its reference: what every backend and fused kernel is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moegraft.call import Mode
from moegraft.factor_table import Arena, SiteTable, site_table
from moegraft.layer import MoeLoraLayer
from moegraft.quant.experts import quantise_experts
from moegraft.reference import moe_lora_reference
from moegraft.sites import Site, expert_site
from moegraft.testing.compare import assert_close, assert_delta_close
from moegraft.testing.generate import (
    Device,
    Routing,
    random_activations,
    random_routing,
    random_weights,
)
from moegraft.testing.unrounded import unrounded_weights
from moegraft.types import (
    Activation,
    ExpertWeights,
    LoraFactor,
    SiteFactors,
    TokenSlots,
    WeightLayout,
)


@dataclass(frozen=True)
class LayerCase:
    """One layer call.

    Attributes:
        x: ``[T, H]`` activations.
        routing: ids and weights ``[T, K]``.
        weights: base weights.
        adapters: what each slot holds; None = empty slot.
        token_slots: slot per token, -1 = base.
        expert_offset, scale: as of :class:`moegraft.layer.MoeLoraLayer`.
    """

    x: torch.Tensor
    routing: Routing
    weights: ExpertWeights
    adapters: tuple[SiteFactors | None, ...]
    token_slots: tuple[int, ...]
    expert_offset: int = 0
    scale: float = 1.0

    @property
    def site(self) -> Site:
        """The experts site of the weights."""
        w = self.weights
        return expert_site("experts", w.num_experts, w.hidden, w.intermediate, w.layout)

    def slots(self) -> TokenSlots:
        """The slots on the device of x."""
        return TokenSlots.of(list(self.token_slots), self.x.device)

    def table(self) -> SiteTable:
        """A factor table in x's dtype on x's device."""
        return table_on(site_table(self.site, self.adapters, self.x.dtype), self.x.device)

    def layer(self, backend: str | None = None, mode: Mode | None = None) -> MoeLoraLayer:
        """A layer over the weights and :meth:`table`."""
        return MoeLoraLayer(
            self.weights,
            self.table(),
            expert_offset=self.expert_offset,
            routed_scaling_factor=self.scale,
            backend=backend,
            mode=mode,
        )

    def run(self, layer: MoeLoraLayer | None = None, base: bool = False) -> torch.Tensor:
        """Run a layer (default: a fresh one) on this case; ``base`` leaves the adapters out."""
        layer = layer or self.layer()
        slots = None if base else self.slots()
        return layer(self.x, self.routing.topk_ids, self.routing.topk_weights, slots)

    def reference(
        self, base: bool = False, compute_dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """Return the reference on the CPU, ``[T, H]``; ``base`` leaves the adapters out."""
        w = self.weights
        on_cpu = replace(
            w,
            gate_up=w.gate_up.cpu(),
            down=w.down.cpu(),
            gate_up_bias=None if w.gate_up_bias is None else w.gate_up_bias.cpu(),
            down_bias=None if w.down_bias is None else w.down_bias.cpu(),
            scales=None if w.scales is None else w.scales.to("cpu"),
        )
        return moe_lora_reference(
            self.x.cpu(),
            self.routing.topk_ids.cpu(),
            self.routing.topk_weights.cpu(),
            on_cpu,
            [None if a is None else _factors_on_cpu(a) for a in self.adapters],
            None if base else self.token_slots,
            expert_offset=self.expert_offset,
            scale=self.scale,
            compute_dtype=compute_dtype,
        )

    def unrounded(self, base: bool = False) -> torch.Tensor | None:
        """Return :meth:`reference` without rounding activations; None where nothing is rounded.

        None in fp32 as well: there sums agree so closely that no value of so few falls otherwise.
        """
        weights = unrounded_weights(self.weights)
        if weights is None or self.x.dtype.itemsize > 2:
            return None
        return replace(self, weights=weights).reference(base)


def layer_case(
    num_tokens: int,
    adapters: Sequence[SiteFactors | None],
    token_slots: Sequence[int],
    *,
    num_experts: int = 5,
    hidden: int = 24,
    intermediate: int = 20,
    top_k: int = 2,
    layout: WeightLayout | None = None,
    activation: Activation | None = None,
    biases: bool = False,
    minus_ones: float = 0.0,
    expert_offset: int = 0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: Device = "cpu",
    weight_format: str | None = None,
) -> LayerCase:
    """Make a case with random x, weights and routing; ``token_slots`` is repeated over T tokens.

    ``weight_format``: quantise the weights; None = leave them in ``dtype``.
    """
    weights = random_weights(
        num_experts, hidden, intermediate, layout, activation, biases, dtype, seed, device
    )
    if weight_format is not None:
        weights = quantise_experts(weights, weight_format)
    routing = random_routing(
        num_tokens, top_k, num_experts, seed + 1, minus_ones=minus_ones, device=device
    )
    if expert_offset:
        ids = routing.topk_ids
        routing = replace(routing, topk_ids=torch.where(ids < 0, ids, ids + expert_offset))
    return LayerCase(
        random_activations(num_tokens, hidden, dtype, seed + 2, device),
        routing,
        weights,
        tuple(adapters),
        tuple(token_slots[t % len(token_slots)] for t in range(num_tokens)),
        expert_offset,
        scale,
    )


def assert_case(case: LayerCase, layer: MoeLoraLayer | None = None) -> None:
    """Assert that a layer (default: a fresh one) gets output, base and delta alone right."""
    layer = layer or case.layer()
    ref_with, ref_base = case.reference(), case.reference(base=True)
    with_lora, base = case.run(layer), case.run(layer, base=True)
    unrounded, unrounded_base = case.unrounded(), case.unrounded(base=True)
    assert_close(base, ref_base, case.x.dtype, unrounded_base)
    assert_close(with_lora, ref_with, case.x.dtype, unrounded)
    assert_delta_close(with_lora, base, ref_with, ref_base, w8a8=unrounded is not None)


def table_on(table: SiteTable, device: Device) -> SiteTable:
    """Return a copy of a stand-alone table on another device; the table itself when there."""
    if table.records.device == torch.device(device):
        return table
    expert_map = None if table.expert_map is None else table.expert_map.to(device)
    arena = Arena(table.arena.data.to(device))
    return SiteTable(table.site, arena, table.records.to(device), expert_map, table.max_rank)


def _factors_on_cpu(factors: SiteFactors) -> SiteFactors:
    projections = {
        name: LoraFactor(f.lora_A.cpu(), f.lora_B.cpu(), f.scale)
        for name, f in factors.projections.items()
    }
    expert_map = None if factors.expert_map is None else factors.expert_map.cpu()
    return SiteFactors(projections, expert_map)
