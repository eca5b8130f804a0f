"""LinearLora: the adapters' part of a dense linear or router, added to the host's own product."""

from __future__ import annotations

import pytest
import torch

from cpu_layer import DTYPES
from moegraft.factor_table import site_table
from moegraft.linear import LinearLora
from moegraft.reference import linear_lora_reference
from moegraft.sites import linear_site
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
