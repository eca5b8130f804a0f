"""What one slot of an engine's tensors may hold by itself: shared factors, one A, one linear."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraft.adapters.foreign import ForeignPool, stacked_pool
from moegraft.adapters.foreign_linear import LinearPool
from moegraft.errors import AdapterError
from moegraft.factors import SHARED_A_I32
from moegraft.linear import LinearLora, LinearLoraGroup
from moegraft.reference import linear_lora_reference
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
def test_slices_of_a_merged_linear_are_one_group(rank_major: bool, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    widths, ranks = (64, 16), ((3, 0), (8, 5), (0, 0), (0, 1))
    a = [torch.randn(S, 1, R, 48, generator=generator) / 4 for _ in widths]
    b = [torch.randn(S, 1, width, R, generator=generator) / 4 for width in widths]
    if rank_major:
        b = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in b]
    pool = LinearPool("qk_proj", a, b)
    assert (pool.pool.copied_bytes == 0) == rank_major
    for slot, of_slot in enumerate(ranks):
        pool.load(slot, of_slot)
    slots = TokenSlots.of([0, 1, -1, 2, 3, 1])
    x = torch.randn(6, 48, generator=generator)
    base = torch.randn(6, 80, generator=generator)
    found = base.clone()
    linears = [LinearLora(table, torch.float32, x.device, backend) for table in pool.tables]
    LinearLoraGroup(linears).add_to(found.split(widths, dim=1), x, slots)
    wanted = base.clone()
    for i, part in enumerate(wanted.split(widths, dim=1)):
        held: list[SiteFactors | None] = [None] * S
        for slot, of_slot in enumerate(ranks):
            rank = of_slot[i]
            if rank:
                factor = LoraFactor(a[i][slot, :, :rank], b[i][slot, :, :, :rank], 1.0)
                held[slot] = SiteFactors({"linear": factor})
        part += linear_lora_reference(x, held, slots.slots.tolist(), widths[i])
    assert_close(found, wanted, torch.float32)
    assert_delta_close(found, base, wanted, base)
    assert_bit_equal(found[[2, 3]], base[[2, 3]])
    assert_bit_equal(found[0, 64:], base[0, 64:])
    pool.clear(1)
    pool.clear(0)
    pool.clear(3)
    cleared = base.clone()
    LinearLoraGroup(linears).add_to(cleared.split(widths, dim=1), x, slots)
    assert_bit_equal(cleared, base)


@on_both
def test_slices_whose_rows_of_a_lie_behind_one_another(backend: str) -> None:
    generator = torch.Generator().manual_seed(4)
    widths, ranks, scale = (32, 16, 16), (3, 8, 0, 1), 0.5
    a = torch.randn(S, 1, 3 * R, 48, generator=generator) / 4
    b = torch.randn(S, 1, R, sum(widths), generator=generator).transpose(2, 3) / 4
    for slot, rank in enumerate(ranks):
        a[slot, :, 3 * rank :] = torch.nan  # what another adapter left
    pool = LinearPool("qkv_proj", [a] * 3, b.split(widths, dim=2), packed=True)
    assert pool.pool.copied_bytes == 0
    for slot, rank in enumerate(ranks):
        pool.load(slot, [rank] * 3, scale)
    slots = TokenSlots.of([0, 1, -1, 2, 3, 1])
    x = torch.randn(6, 48, generator=generator)
    base = torch.randn(6, sum(widths), generator=generator)
    found, wanted = base.clone(), base.clone()
    linears = [LinearLora(table, torch.float32, x.device, backend) for table in pool.tables]
    LinearLoraGroup(linears).add_to(found.split(widths, dim=1), x, slots)
    for i, part in enumerate(wanted.split(widths, dim=1)):
        held: list[SiteFactors | None] = [None] * S
        for slot, rank in enumerate(ranks):
            if rank:
                rows = a[slot, :, i * rank : (i + 1) * rank]
                columns = b.split(widths, dim=2)[i][slot, :, :, :rank]
                held[slot] = SiteFactors({"linear": LoraFactor(rows, columns, scale)})
        part += linear_lora_reference(x, held, slots.slots.tolist(), widths[i])
    assert_close(found, wanted, torch.float32)
    assert_delta_close(found, base, wanted, base)
    with pytest.raises(AdapterError, match=r"ranks \[2, 3, 0\], but .* by one rank"):
        pool.load(0, (2, 3, 0))


def test_slot_tensors_of_linears_that_do_not_fit_are_refused() -> None:
    a, b = torch.zeros(S, 1, R, 48), torch.zeros(S, 1, 64, R)
    with pytest.raises(AdapterError, match="2 slices of A and 1 of B"):
        LinearPool("q_proj", (a, a), (b,))
    with pytest.raises(AdapterError, match="0 slices of A"):
        LinearPool("q_proj", (), ())
    with pytest.raises(AdapterError, match="must be"):
        LinearPool("q_proj", (a[0],), (b,))
    with pytest.raises(AdapterError, match="don't fit"):
        LinearPool("q_proj", (a,), (b[:2],))
    with pytest.raises(AdapterError, match="rank 9 is not in 0 to 8"):
        LinearPool("q_proj", (a,), (b,)).load(0, (9,))


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


def test_a_pool_that_expects_adapters_counts_as_used_only_where_a_graph_is_captured() -> None:
    pool = pool_of(random_slots())
    captured, live = TokenSlots.captured(torch.zeros(3, dtype=torch.int32)), TokenSlots.of([0])
    assert not pool.table.has_delta(captured)
    pool.expect_adapters()
    assert pool.table.has_delta(captured) and not pool.table.has_delta(live)
