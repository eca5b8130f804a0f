"""The reference against an independent formulation: dense weights with the adapters merged in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from moegraft.reference import linear_lora_reference, lora_delta, moe_lora_reference
from moegraft.sites import expert_site, linear_site
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_close,
    layer_case,
    random_factors,
)
from moegraft.types import LoraFactor, SiteFactors

Glu = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: name -> h from gate and up; written out here, not taken from the package.
PLAIN: dict[str, Glu] = {
    "silu": lambda g, u: F.silu(g) * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "relu": lambda g, u: g.clamp(min=0) * u,
    "relu2": lambda g, u: g.clamp(min=0) ** 2 * u,
    "clamped": lambda g, u: (
        (u.clamp(-0.7, 0.7) + 1) * g.clamp(max=0.7) / (1 + torch.exp(-1.702 * g.clamp(max=0.7)))
    ),
    "custom": lambda g, u: g.tanh() * u,
}
PLAIN_NO_GATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": lambda u: u.clamp(min=0) ** 2,
    "silu": F.silu,
}


def _column_numbers(order: str, intermediate: int) -> tuple[list[int], list[int]]:
    """Where gate's and up's columns lie, by counting."""
    first, second = list(range(intermediate)), list(range(intermediate, 2 * intermediate))
    if order == "interleaved":
        return list(range(0, 2 * intermediate, 2)), list(range(1, 2 * intermediate, 2))
    return {"gate_first": (first, second), "up_first": (second, first), "no_gate": ([], first)}[
        order
    ]


def _merged(case: LayerCase, adapter: SiteFactors | None) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 ``[E, 2I, H]`` and ``[E, H, I]`` with ``scale * B @ A`` added expert by expert."""
    w = case.weights
    gate_up, down = w.gate_up.double(), w.down.double()
    if not w.layout.out_major:
        gate_up, down = gate_up.mT, down.mT
    gate_up, down = gate_up.clone(), down.clone()
    gate_columns, up_columns = _column_numbers(w.layout.gate_up_order, w.intermediate)
    places = {"gate": (gate_up, gate_columns), "up": (gate_up, up_columns)}
    places["down"] = (down, list(range(w.hidden)))
    for name, factor in ({} if adapter is None else adapter.projections).items():
        for expert in range(w.num_experts):
            entry = expert
            if adapter is not None and adapter.expert_map is not None:
                entry = int(adapter.expert_map[expert])
            if entry < 0:
                continue
            a = factor.lora_A.double().expand(factor.num_entries, -1, -1)[entry]
            b = factor.lora_B.double().expand(factor.num_entries, -1, -1)[entry]
            target, columns = places[name]
            target[expert, columns] += factor.scale * b @ a
    return gate_up, down


def _plain_layer(case: LayerCase, activation: str) -> torch.Tensor:
    """The layer with merged weights, all experts at once, in fp64."""
    w, (num_tokens, top_k) = case.weights, case.routing.topk_ids.shape
    gate_columns, up_columns = _column_numbers(w.layout.gate_up_order, w.intermediate)
    out = torch.zeros(num_tokens, w.hidden, dtype=torch.float64)
    for t in range(num_tokens):
        slot = case.token_slots[t]
        gate_up, down = _merged(case, case.adapters[slot] if slot >= 0 else None)
        shares = torch.zeros(w.num_experts, dtype=torch.float64)
        for k in range(top_k):
            expert = int(case.routing.topk_ids[t, k]) - case.expert_offset
            if 0 <= expert < w.num_experts:
                shares[expert] += case.routing.topk_weights[t, k].double()
        z = gate_up @ case.x[t].double()
        z = z if w.gate_up_bias is None else z + w.gate_up_bias.double()
        if gate_columns:
            h = PLAIN[activation](z[:, gate_columns], z[:, up_columns])
        else:
            h = PLAIN_NO_GATE[activation](z)
        y = torch.einsum("ehi,ei->eh", down, h)
        y = y if w.down_bias is None else y + w.down_bias.double()
        out[t] = case.scale * shares @ y
    return out


def _case(layout: str, activation: str, biases: bool, **sizes: int) -> LayerCase:
    site = expert_site("experts", 5, 9, 7, LAYOUTS[layout])
    adapters = [
        random_factors(site, 3, "fused", seed=1),
        random_factors(site, 5, "separate", experts=[3, 0, 2], scale=0.5, seed=2),
        None,
        random_factors(site, 2, "shared_outer", seed=3),
        random_factors(site, 4, projections=["down"], seed=4),
        random_factors(site, 4, projections=["up"], seed=5),
    ]
    return layer_case(
        14,
        adapters,
        [-1, 0, 1, 2, 3, 4, 5],
        hidden=9,
        intermediate=7,
        top_k=3,
        layout=LAYOUTS[layout],
        activation=ACTIVATIONS[activation],
        biases=biases,
        minus_ones=0.2,
        scale=1.7,
        dtype=torch.float64,
        **sizes,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biases", [False, True])
def test_reference_equals_merged_weights_for_every_layout(layout: str, biases: bool) -> None:
    activation = "relu2" if layout.startswith("no_gate") else "silu"
    case = _case(layout, activation, biases)
    assert_close(case.reference(), _plain_layer(case, activation), torch.float64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_equals_merged_weights_for_every_activation(activation: str) -> None:
    case = _case("gate_first", activation, biases=True)
    assert_close(case.reference(), _plain_layer(case, activation), torch.float64)


def test_reference_with_an_expert_offset_counts_local_pairs_only() -> None:
    case = _case("gate_first", "silu", biases=True, expert_offset=3)
    case.routing.topk_ids[0] = torch.tensor([1, 4, 8], dtype=torch.int32)  # only 4 is local
    case.routing.topk_weights[0] = torch.tensor([float("nan"), 0.5, float("inf")])
    expected = _plain_layer(case, "silu")
    assert bool((expected[0] != 0).all())
    assert_close(case.reference(), expected, torch.float64)


def test_reference_of_base_ignores_the_adapters() -> None:
    case = _case("gate_first", "silu", biases=False)
    bare = moe_lora_reference(
        case.x,
        case.routing.topk_ids,
        case.routing.topk_weights,
        case.weights,
        scale=1.7,
        compute_dtype=torch.float64,
    )
    assert torch.equal(case.reference(base=True), bare)
    assert torch.equal(case.reference()[::7], bare[::7])  # tokens without an adapter
    assert torch.equal(case.reference()[3::7], bare[3::7])  # tokens of an empty slot


def test_reference_rounds_h_to_the_activations_dtype_and_only_when_asked() -> None:
    case = layer_case(4, [], [-1], dtype=torch.bfloat16, top_k=1)
    x, ids, weights = case.x, case.routing.topk_ids, case.routing.topk_weights
    w = case.weights
    e = int(ids[0, 0])
    gate, up = (w.gate_up[e].double() @ x[0].double()).chunk(2)
    h = F.silu(gate) * up
    exact = weights[0, 0].double() * (w.down[e].double() @ h)
    rounded = weights[0, 0].double() * (w.down[e].double() @ h.bfloat16().double())
    found = {
        flag: moe_lora_reference(x, ids, weights, w, compute_dtype=torch.float64, round_h=flag)[0]
        for flag in (True, False)
    }
    assert_close(found[True], rounded, torch.float64)
    assert_close(found[False], exact, torch.float64)
    assert not torch.allclose(rounded, exact, rtol=1e-6)


def test_lora_delta_multiplies_the_scale_once() -> None:
    a, b = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0], [5.0]]])
    x = torch.tensor([10.0, 1.0])
    delta = lora_delta(LoraFactor(a, b, 0.5), 0, x)
    assert isinstance(delta, torch.Tensor) and delta.tolist() == [18.0, 30.0]
    assert lora_delta(LoraFactor(a, b, 0.5), -1, x) == 0.0
    assert lora_delta(None, 0, x) == 0.0


def test_linear_reference_equals_merged_weights() -> None:
    site = linear_site("q_proj", 6, 5)
    adapters = [random_factors(site, r, seed=r, dtype=torch.float64) for r in (1, 4)]
    x = torch.randn(5, 6, dtype=torch.float64)
    slots = [0, -1, 1, 1, 0]
    delta = linear_lora_reference(x, adapters, slots, 5, torch.float64)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for t, slot in enumerate(slots):
        if slot >= 0:
            f = adapters[slot].projections["linear"]
            expected[t] = F.linear(x[t], f.scale * f.lora_B[0] @ f.lora_A[0])
    assert_close(delta, expected, torch.float64)
    assert not bool(delta[1].any())
