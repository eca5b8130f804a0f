"""What the GPU tests of the store share: four layers over one bank, adapters on both sides."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moegraft.adapters import AdapterBank, AdapterStore, BoundAdapter, ModelSpec
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import (
    assert_same_factors,
    bound_adapter,
    random_activations,
    random_adapter,
    random_routing,
    random_weights,
)
from moegraft.types import LoraFactor, SiteFactors, TokenSlots

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 16, 256, 128, 2
SITES = tuple(
    expert_site(f"layers.{i}.experts", EXPERTS, HIDDEN, INTERMEDIATE) for i in range(LAYERS)
)
SPEC = ModelSpec(SITES)
#: Cycles that a stream is kept busy with: some fifty milliseconds.
BUSY = 100_000_000


def make_store(num_slots: int = 3, arena_bytes: int | None = None) -> AdapterStore:
    bank = AdapterBank(
        SITES,
        num_slots=num_slots,
        max_rank=64,
        dtype=torch.bfloat16,
        device="cuda",
        arena_bytes=arena_bytes,
    )
    return AdapterStore(bank)


def bank_of(store: AdapterStore) -> AdapterBank:
    return store._bank


def adapter_of(seed: int, rank: int = 32) -> BoundAdapter:
    """An adapter in the bank's dtype, so that a slot holds its very bits."""
    return random_adapter(SITES, rank, seed=seed, dtype=torch.bfloat16)


def on_gpu(adapter: BoundAdapter) -> BoundAdapter:
    """The same factors on the GPU."""
    return bound_adapter({n: _moved(factors, "cuda") for n, factors in adapter.factors.items()})


def _moved(factors: SiteFactors, device: str) -> SiteFactors:
    """The same factors on a device; gate and up keep one A if they share it."""
    made: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return made.setdefault(tensor.data_ptr(), tensor.to(device))

    projections = {
        p: LoraFactor(move(f.lora_A), move(f.lora_B), f.scale)
        for p, f in factors.projections.items()
    }
    return SiteFactors(projections, factors.expert_map)


def assert_holds(store: AdapterStore, slot: int, adapter: BoundAdapter) -> None:
    for site in SITES:
        found = bank_of(store).site_table(site.name).factors(slot)
        assert found is not None, f"slot {slot} has nothing for {site.name}"
        assert_same_factors(_moved(found, "cpu"), adapter.factors[site.name], site)


class Model:
    """A stack of MoE layers over one store."""

    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self.layers = [
            MoeLoraLayer(
                random_weights(
                    EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="cuda", seed=i
                ),
                bank_of(store).site_table(site.name),
            )
            for i, site in enumerate(SITES)
        ]

    def step(self, inputs: Mapping[str, torch.Tensor], slots: TokenSlots | None) -> torch.Tensor:
        """Run all layers as a host does: each asks for its factors before it reads them."""
        x = inputs["x"]
        for layer in self.layers:
            assert layer.table is not None
            own = slots if slots is not None and layer.table.has_delta(slots) else None
            x = layer(x, inputs["topk_ids"], inputs["topk_weights"], own).clamp(-4, 4)
        return x


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    routing = random_routing(rows, TOP_K, EXPERTS, seed=seed, device="cuda")
    x = random_activations(rows, HIDDEN, torch.bfloat16, seed=seed, device="cuda")
    return {"x": x, "topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights}


def run(model: Model, inputs: dict[str, torch.Tensor], name: str, by_layer: bool) -> torch.Tensor:
    rows = inputs["x"].shape[0]
    with model.store.use([name], by_layer=by_layer) as slot_of:
        return model.step(inputs, TokenSlots.of([slot_of[name]] * rows, "cuda")).clone()
