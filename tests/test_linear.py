"""LinearLora: the adapters' part of a dense linear or router, added to the host's own product."""

from __future__ import annotations

import pytest
import torch

from cpu_layer import DTYPES
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.linear import LinearLora, LinearLoraGroup
from moegraft.reference import linear_lora_reference
from moegraft.sites import Site, linear_site
from moegraft.testing import assert_bit_equal, assert_close, random_activations, random_factors
from moegraft.types import TokenSlots

SITE = linear_site("router", 11, 6, "router")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 80])
def test_every_row_gets_its_own_adapters_delta(
    num_tokens: int, dtype: torch.dtype, lora_method: str
) -> None:
    adapters = [random_factors(SITE, rank, seed=rank, dtype=dtype) for rank in (1, 3, 20, 3)]
    adapters.append(random_factors(SITE, 0, dtype=dtype))
    linear = LinearLora(site_table(SITE, [*adapters, None], dtype), dtype, torch.device("cpu"))
    slots = [(t % 7) - 1 for t in range(num_tokens)]
    x = random_activations(num_tokens, 11, dtype)
    base = random_activations(num_tokens, 6, dtype, seed=1)
    out = base.clone()
    linear.add_to(out, x, TokenSlots.of(slots))
    delta = linear_lora_reference(x, [*adapters, None], slots, 6, torch.float64)
    assert_close(out, base.double() + delta, dtype)
    untouched = torch.tensor([slot in (-1, 4, 5) for slot in slots], dtype=torch.bool)
    assert_bit_equal(out[untouched], base[untouched], "rows without a delta")


def test_it_knows_whether_any_live_adapter_has_a_delta_here() -> None:
    table = site_table(SITE, [None, random_factors(SITE, 0), random_factors(SITE, 2)])
    linear = LinearLora(table, torch.float32, torch.device("cpu"))
    assert not linear.has_delta(TokenSlots.of([-1, -1]))
    assert not linear.has_delta(TokenSlots.of([0, 1]))
    assert linear.has_delta(TokenSlots.of([0, 1, 2]))


def group(*sites: Site) -> tuple[LinearLoraGroup, list[LinearLora]]:
    """Return a group of linears with one adapter, and the linears."""
    linears = [
        LinearLora(site_table(site, [random_factors(site, 2)]), torch.float32, torch.device("cpu"))
        for site in sites
    ]
    return LinearLoraGroup(linears), linears


def test_a_group_adds_what_its_linears_add() -> None:
    together, linears = group(SITE, linear_site("q_proj", 11, 5))
    x, slots = random_activations(3, 11, torch.float32), TokenSlots.of([0, -1, 0])
    packed = random_activations(3, 11, torch.float32, seed=1)
    outs, alone = packed.clone().split([6, 5], 1), packed.clone().split([6, 5], 1)
    together.add_to(outs, x, slots)
    for linear, out, expected in zip(linears, outs, alone, strict=True):
        linear.add_to(expected, x, slots)
        assert_bit_equal(out, expected)


def test_a_group_refuses_what_does_not_fit_and_changes_nothing() -> None:
    together, _ = group(SITE, linear_site("q_proj", 11, 5))
    x, slots = torch.ones(3, 11), TokenSlots.of([0, 0, 0])
    first, wrong = torch.zeros(3, 6), torch.zeros(3, 4)
    with pytest.raises(MoegraftError, match=r"q_proj.*\(3, 4\)"):
        together.add_to([first, wrong], x, slots)
    with pytest.raises(MoegraftError, match="2 linears got 1 outputs"):
        together.add_to([first], x, slots)
    assert not first.any()
    with pytest.raises(MoegraftError, match=r"router, o_proj.*one input size"):
        group(SITE, linear_site("o_proj", 12, 5))
