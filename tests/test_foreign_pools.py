"""Factor tables over an engine's slot tensors, against the reference, on both backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moegraft import ops
from moegraft.adapters.foreign import ForeignFactor, ForeignPool, packed_pool, stacked_pool
from moegraft.errors import AdapterError
from moegraft.sites import Site, expert_site
from moegraft.testing import LayerCase, assert_bit_equal, assert_close, assert_delta_close
from moegraft.types import LoraFactor, SiteFactors, TokenSlots, WeightLayout
from ops_cases import BACKENDS, SIZES, interpreted, ops_case

E, H, WIDTH, R, S = SIZES["num_experts"], SIZES["hidden"], SIZES["intermediate"], 8, 4
RANKS = (3, 8, 0, 1)
on_both = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted)])


@dataclass
class Slots:
    """An engine's slot tensors with random values; what lies past a slot's rank is NaN."""

    gate_a: torch.Tensor
    up_a: torch.Tensor
    gate_b: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor

    def adapter(self, slot: int, rank: int, scale: float) -> SiteFactors | None:
        """Return what a slot holds, as the reference takes it."""
        if not rank:
            return None

        def factor(a: torch.Tensor, b: torch.Tensor) -> LoraFactor:
            return LoraFactor(a[slot, :, :rank].clone(), b[slot, :, :, :rank].clone(), scale)

        return SiteFactors(
            {
                "gate": factor(self.gate_a, self.gate_b),
                "up": factor(self.up_a, self.up_b),
                "down": factor(self.down_a, self.down_b),
            }
        )


def random_slots(
    outer: bool = False, shared: bool = False, dtype: torch.dtype = torch.float32
) -> Slots:
    """Fill slots; ``outer`` gives A of gate and up and B of down one entry for all experts."""
    generator = torch.Generator().manual_seed(7)

    def fill(entries: int, *sizes: int, rank_dim: int) -> torch.Tensor:
        values = torch.randn(S, entries, *sizes, generator=generator) / 4
        for slot, rank in enumerate(RANKS):
            values[slot].narrow(rank_dim, rank, R - rank).fill_(torch.nan)
        return values.to(dtype)

    one = 1 if outer else E
    gate_a = fill(one, R, H, rank_dim=1)
    up_a = gate_a if shared else fill(one, R, H, rank_dim=1)
    gate_b, up_b = fill(E, WIDTH, R, rank_dim=2), fill(E, WIDTH, R, rank_dim=2)
    return Slots(
        gate_a, up_a, gate_b, up_b, fill(E, R, WIDTH, rank_dim=1), fill(one, H, R, rank_dim=2)
    )


def case_of(slots: Slots, scale: float, layout: WeightLayout | None = None) -> LayerCase:
    """A case whose adapters are what the slots hold."""
    adapters = [slots.adapter(s, RANKS[s], scale) for s in range(S)]
    case = ops_case(9, layout=layout, adapters=adapters, dtype=slots.gate_a.dtype)
    return replace(case, token_slots=(0, 1, -1, 2, 3, 1, 0, 3, 1))


def load_all(pool: ForeignPool, scale: float) -> None:
    """Say what each slot holds."""
    for slot, rank in enumerate(RANKS):
        if rank:
            pool.load(slot, rank, scale)


def check(case: LayerCase, pool: ForeignPool, backend: str) -> None:
    """Compare output, base rows and delta with the reference."""
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, pool.table)
    found = ops.moe_lora(*args, case.slots(), backend=backend)
    base = ops.moe_lora(*args, None, backend=backend)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    assert_close(found, ref_with, case.x.dtype)
    assert_delta_close(found, base, ref_with, ref_base)
    rows = torch.tensor([s < 0 or not RANKS[s] for s in case.token_slots])
    assert_bit_equal(found[rows], base[rows])


def site(layout: WeightLayout | None = None) -> Site:
    """The experts site of the cases."""
    return expert_site("experts", E, H, WIDTH, layout)


def columns(slots: Slots, layout: WeightLayout) -> torch.Tensor:
    """Gate's and up's B in the host's columns, ``[S, E, 2I, R]``."""
    packed = torch.empty(S, E, 2 * WIDTH, R, dtype=slots.gate_b.dtype)
    packed[:, :, layout.columns("gate", WIDTH)] = slots.gate_b
    packed[:, :, layout.columns("up", WIDTH)] = slots.up_b
    return packed


def behind_one_another(slots: Slots) -> torch.Tensor:
    """``[S, E or 1, 2R, H]``: gate's rows of the live rank, up's behind them."""
    packed = torch.full((S, slots.gate_a.shape[1], 2 * R, H), torch.nan, dtype=slots.gate_a.dtype)
    for s, rank in enumerate(RANKS):
        packed[s, :, :rank] = slots.gate_a[s, :, :rank]
        packed[s, :, rank : 2 * rank] = slots.up_a[s, :, :rank]
    return packed


@on_both
@pytest.mark.parametrize("outer", [False, True])
def test_two_slices_per_projection_are_read_in_the_engines_memory(
    outer: bool, backend: str
) -> None:
    slots = random_slots(outer)
    pool = stacked_pool(
        site(),
        (slots.gate_a, slots.up_a),
        (slots.gate_b, slots.up_b),
        (slots.down_a,),
        slots.down_b,
    )
    load_all(pool, 1.0)
    check(case_of(slots, 1.0), pool, backend)


@on_both
@pytest.mark.parametrize("layout", [WeightLayout(), WeightLayout("interleaved")], ids=str)
def test_one_slice_shares_a_and_has_the_hosts_columns(layout: WeightLayout, backend: str) -> None:
    slots = random_slots(shared=True)
    packed = columns(slots, layout)
    pool = stacked_pool(site(layout), (slots.gate_a,), (packed,), slots.down_a, slots.down_b)
    load_all(pool, 1.0)
    check(case_of(slots, 1.0, layout), pool, backend)
    factors = pool.table.factors(0)
    assert factors is not None
    assert factors.projections["gate"].lora_A is factors.projections["up"].lora_A


@on_both
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gates_and_ups_rows_behind_one_another_with_ranks_and_scales_of_the_slots(
    shared: bool, outer: bool, backend: str
) -> None:
    slots = random_slots(outer, shared)
    a = slots.gate_a if shared else behind_one_another(slots)
    pool = packed_pool(site(), a, columns(slots, WeightLayout()), slots.down_a, slots.down_b)
    load_all(pool, 2.0)
    check(case_of(slots, 2.0), pool, backend)


@on_both
def test_rank_major_storage_is_read_without_any_copy(backend: str) -> None:
    slots = random_slots()
    for name in ("gate_b", "up_b", "down_b"):
        rows = getattr(slots, name).transpose(2, 3).contiguous()
        setattr(slots, name, rows.transpose(2, 3))
    pool = stacked_pool(
        site(), (slots.gate_a, slots.up_a), (slots.gate_b, slots.up_b), slots.down_a, slots.down_b
    )
    assert pool.copied_bytes == 0
    load_all(pool, 1.0)
    case = case_of(slots, 1.0)
    check(case, pool, backend)
    slots.down_b.mul_(2)
    pool.table.arena.version += 1
    changed = replace(case, adapters=tuple(slots.adapter(s, RANKS[s], 1.0) for s in range(S)))
    check(changed, pool, backend)


@on_kernels
def test_half_precision_pools(backend: str) -> None:
    slots = random_slots(dtype=torch.float16)
    pool = stacked_pool(
        site(), (slots.gate_a, slots.up_a), (slots.gate_b, slots.up_b), slots.down_a, slots.down_b
    )
    assert pool.copied_bytes == S * E * R * 2 * (WIDTH + WIDTH + H)
    load_all(pool, 1.0)
    check(case_of(slots, 1.0), pool, backend)


@on_both
def test_a_slot_that_is_cleared_or_replaced_takes_effect_at_once(backend: str) -> None:
    slots = random_slots()
    pool = stacked_pool(
        site(), (slots.gate_a, slots.up_a), (slots.gate_b, slots.up_b), slots.down_a, slots.down_b
    )
    load_all(pool, 1.0)
    case = case_of(slots, 1.0)
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, pool.table)
    token_slots = TokenSlots.of([1] * 9)
    assert pool.table.has_delta(token_slots)
    base = ops.moe_lora(*args, None, backend=backend)
    first = ops.moe_lora(*args, token_slots, backend=backend)
    pool.clear(1)
    assert not pool.table.has_delta(token_slots)
    assert_bit_equal(ops.moe_lora(*args, token_slots, backend=backend), base)
    slots.gate_b[1] = 0.5
    pool.load(1, {"gate": 5})
    second = ops.moe_lora(*args, token_slots, backend=backend)
    assert not torch.equal(second, base) and not torch.equal(second, first)
    adapter = slots.adapter(1, 5, 1.0)
    assert adapter is not None
    only = SiteFactors({"gate": adapter.projections["gate"]})
    wanted = replace(case, adapters=(None, only, None, None), token_slots=(1,) * 9)
    assert_close(second, wanted.reference(), torch.float32)


def test_what_does_not_fit_is_refused_by_name() -> None:
    slots = random_slots()
    a, b = (slots.gate_a, slots.up_a), (slots.gate_b, slots.up_b)
    good = (slots.down_a, slots.down_b)

    def refuses(match: str, *args: Sequence[torch.Tensor] | torch.Tensor) -> None:
        with pytest.raises(AdapterError, match=match):
            stacked_pool(site(), *args)  # type: ignore[arg-type]

    refuses("2 slices of A and 1 of B", a, b[:1], *good)
    refuses("don't fit S=4 slots, E=5 experts", a, (slots.gate_b[:, :4], slots.up_b), *good)
    refuses("B is torch.float16", a, b, slots.down_a, slots.down_b.half())
    refuses("must be", a, (slots.gate_b[0], slots.up_b), *good)
    refuses("w2_a has 2 slices", a, b, (slots.down_a, slots.down_a), slots.down_b)
    odd = torch.randn(S, E, R, H + 1)[..., :H]
    refuses("rows must be adjacent and begin at multiples of 16 bytes", (odd, slots.up_a), b, *good)
    with pytest.raises(AdapterError, match="at least one projection"):
        ForeignPool(site(), {})
    with pytest.raises(AdapterError, match="the site has only"):
        ForeignPool(site(), {"q": ForeignFactor(slots.gate_a, slots.gate_b)})
    whole = columns(slots, WeightLayout())
    refuses("w13_b has shape", a[:1], (whole[0],), *good)
    bytes_ = [tensor.to(torch.int8) for tensor in (*a, *b, *good)]
    refuses("served: float32", bytes_[:2], bytes_[2:4], *bytes_[4:])
    refuses("don't fit S=0", [t[:0] for t in a], [t[:0] for t in b], *(t[:0] for t in good))
    with pytest.raises(AdapterError, match="gate_up_a has 15 rows and gate_up_b rank 8"):
        packed_pool(site(), torch.zeros(S, E, 2 * R - 1, H), whole, *good)
    with pytest.raises(AdapterError, match="gate_up_a has shape"):
        packed_pool(site(), slots.gate_a[0], whole, *good)
    shared = stacked_pool(site(), a[:1], (whole,), *good)
    with pytest.raises(AdapterError, match="gate has rank 2 and up 3, but they share one A"):
        shared.load(0, {"gate": 2, "up": 3})
    assert not bool(shared.table.ranks.any())


def pool_of(slots: Slots) -> ForeignPool:
    """Make a pool of two slices per projection."""
    a, b = (slots.gate_a, slots.up_a), (slots.gate_b, slots.up_b)
    return stacked_pool(site(), a, b, slots.down_a, slots.down_b)


@pytest.mark.parametrize(
    ("slot", "rank", "scale", "match"),
    [
        (0, 2, {"gate": 1.0, "up": 1.0}, "down: scale None is no finite number"),
        (0, 2, {"gate": 1.0, "up": 1.0, "down": 1.0, "q": 1.0}, "the pool has no 'q'"),
        (0, 2, float("nan"), "scale nan"),
        (0, 2, None, "scale None"),
        (0, 2.0, 1.0, r"rank 2\.0 is not in 0 to 8"),
        (0, {"gate": 2, "up": 2.5}, 1.0, r"up: rank 2\.5"),
        (0, None, 1.0, "rank None"),
        (0.5, 2, 1.0, r"slot 0\.5 is not one of 4"),
        (True, 2, 1.0, "slot True"),
        (-1, 2, 1.0, "slot -1"),
        (4, 1, 1.0, "slot 4 is not one of 4"),
        (0, 9, 1.0, "rank 9 is not in 0 to 8"),
        (0, {"router": 1}, 1.0, "the pool has no 'router'"),
    ],
)
def test_a_load_that_is_refused_changes_nothing(
    slot: Any, rank: Any, scale: Any, match: str
) -> None:
    slots = random_slots()
    pool = pool_of(slots)
    pool.load(0, 3, 2.0)
    case = replace(case_of(slots, 2.0), token_slots=(0,) * 9)
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights, pool.table)
    before = ops.moe_lora(*args, case.slots(), backend="cpu")
    slots.gate_b[0, :, :, :3] += 1  # what a copy would show
    with pytest.raises(AdapterError, match=match):
        pool.load(slot, rank, scale)
    assert_bit_equal(ops.moe_lora(*args, case.slots(), backend="cpu"), before)


def test_numbers_of_other_libraries_are_ranks_and_slots() -> None:
    pool, number = pool_of(random_slots()), torch.tensor(1)
    pool.load(number, number)
    assert pool.table.ranks.amax(1).tolist() == [0, 1, 0, 0]
