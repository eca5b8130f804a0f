"""What one slot of an engine's tensors may hold by itself: shared factors, one A, one linear."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft.adapters.foreign import ForeignPool, linear_pool, stacked_pool
from moegraft.errors import AdapterError
from moegraft.factors import SHARED_A_I32
from moegraft.linear import LinearLora
from moegraft.reference import linear_lora_reference
from moegraft.sites import linear_site
from moegraft.testing import assert_bit_equal, assert_close, assert_delta_close
from moegraft.types import LoraFactor, SiteFactors, TokenSlots
from ops_cases import BACKENDS
from test_foreign_pools import (
    RANKS,
    E,
    R,
    S,
    Slots,
    case_of,
    check,
    load_all,
    pool_of,
    random_slots,
)

on_both = pytest.mark.parametrize("backend", BACKENDS)


@on_both
def test_one_slot_shares_its_outer_factors_and_the_others_have_one_per_expert(backend: str) -> None:
    slots = random_slots()
    held = replace(slots, **{name: value.clone() for name, value in vars(slots).items()})
    for name in ("gate_a", "up_a", "down_b"):
        getattr(held, name)[1] = getattr(slots, name)[1, :1]  # what all experts then read
        getattr(slots, name)[1, 1:] = torch.nan  # never read
    pool = pool_of(slots)
    load_all(pool, 1.0)
    pool.load(1, RANKS[1], shared=[("gate", "A"), ("up", "A"), ("down", "B")])
    check(case_of(held, 1.0), pool, backend)


@on_both
@pytest.mark.parametrize("shared", [False, True])
def test_ups_own_a_is_not_read_when_a_slot_has_one_a(shared: bool, backend: str) -> None:
    slots = random_slots()
    held = replace(slots, up_a=slots.up_a.clone(), gate_a=slots.gate_a.clone())
    if shared:
        held.gate_a[0] = slots.gate_a[0, :1]
        slots.gate_a[0, 1:] = torch.nan
    held.up_a[0] = held.gate_a[0]
    slots.up_a[0] = torch.nan
    pool = pool_of(slots)
    load_all(pool, 1.0)
    pool.load(0, RANKS[0], shared=[("gate", "A")] if shared else [], one_a=True)
    assert pool.table.records[0].view(torch.int32)[:, SHARED_A_I32].tolist() == [0, 1, 0]
    check(case_of(held, 1.0), pool, backend)


def test_one_a_needs_one_rank_and_a_gate() -> None:
    slots = random_slots()
    pool = pool_of(slots)
    with pytest.raises(AdapterError, match="gate has rank 2 and up 3, but they share one A"):
        pool.load(0, {"gate": 2, "up": 3}, one_a=True)
    down = ForeignPool(pool.site, {"down": pool._factors["down"]})
    with pytest.raises(AdapterError, match="one_a needs factors of gate and of up"):
        down.load(0, 2, one_a=True)
    assert not bool(pool.table.ranks.any()) and not bool(down.table.ranks.any())


@on_both
@pytest.mark.parametrize("rank_major", [False, True])
def test_a_linears_slot_tensors(rank_major: bool, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(S, 1, R, 48, generator=generator) / 4
    b = torch.randn(S, 1, 64, R, generator=generator) / 4
    if rank_major:
        b = b.transpose(2, 3).contiguous().transpose(2, 3)
    pool = linear_pool(linear_site("q_proj", 48, 64), a, b)
    assert (pool.copied_bytes == 0) == rank_major
    held: list[SiteFactors | None] = []
    for slot, rank in enumerate(RANKS):
        if rank:
            pool.load(slot, rank)
        factor = LoraFactor(a[slot, :, :rank], b[slot, :, :, :rank], 1.0)
        held.append(SiteFactors({"linear": factor}) if rank else None)
    slots = TokenSlots.of([0, 1, -1, 2, 3, 1])
    x = torch.randn(6, 48, generator=generator)
    out = torch.randn(6, 64, generator=generator)
    wanted = out + linear_lora_reference(x, held, slots.slots.tolist(), 64)
    found = out.clone()
    LinearLora(pool.table, torch.float32, x.device, backend).add_to(found, x, slots)
    assert_close(found, wanted, torch.float32)
    assert_delta_close(found, out, wanted, out)
    assert_bit_equal(found[[2, 3]], out[[2, 3]])


def test_shared_slots_of_a_pool_of_three_dimensional_experts() -> None:
    slots = random_slots(shared=True)
    packed = torch.cat([slots.gate_b, slots.up_b], dim=2)
    site = pool_of(slots).site
    pool = stacked_pool(site, (slots.gate_a,), (packed,), slots.down_a, slots.down_b)
    held: Slots = replace(slots, gate_a=slots.gate_a.clone())
    held.gate_a[1] = slots.gate_a[1, :1]
    held.up_a = held.gate_a
    load_all(pool, 1.0)
    pool.load(1, RANKS[1], shared=[("gate", "A"), ("up", "A")])
    assert pool.site.num_experts == E
    check(case_of(held, 1.0), pool, "cpu")
