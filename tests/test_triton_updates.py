"""The launch that copies an update into the arena, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from moegraft.adapters import ModelSpec, bind
from moegraft.adapters.checksum import SiteSums, checksum_of
from moegraft.adapters.update_copies import UpdateCopies
from moegraft.adapters.update_plan import TensorKinds, UpdatePlan, make_plan
from moegraft.factors import PackedAdapter, TableLayout
from moegraft.sites import expert_site, linear_site
from update_kinds import (
    CONFIG,
    FORMS,
    KINDS,
    ODD_SIZES,
    Tensors,
    experts_of,
    experts_plan,
    new_bank,
    plan_of,
    shifted,
    shuffled,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def in_order(plan: UpdatePlan, tensors: Tensors) -> list[torch.Tensor]:
    return [tensors[name] for name in plan.kinds.names]


def poisoned(plan: UpdatePlan) -> torch.Tensor:
    return torch.full((plan.pack.elements,), torch.nan, dtype=plan.dtype)


#: Programs of the interpreter are slow: one dtype for all kinds of tensors, all for one of them.
CASES = [*((kind, torch.float16) for kind in KINDS), *(("fused", dtype) for dtype in DTYPES)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_launches_copy_what_the_plan_says(kind: str, dtype: torch.dtype) -> None:
    plan = plan_of(KINDS[kind](0), new_bank(dtype))
    assert plan.copies is not None
    tensors = in_order(plan, shuffled(KINDS[kind](1)))
    wanted, data = poisoned(plan), poisoned(plan)
    plan.fill(tensors, wanted)
    assert plan.copies.run(tensors, data), "finite values were called not finite"
    if dtype == torch.bfloat16:  # the interpreter does not round
        torch.testing.assert_close(data, wanted, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(data, wanted)


def make_large(dtype: torch.dtype) -> tuple[UpdatePlan, Tensors]:
    """Sizes over one tile each way; rank rows and columns at multiples of 16 bytes."""
    sites = (expert_site("layers.0.experts", 3, 304, 272), linear_site("layers.0.q", 520, 40))
    sizes = {"gate_proj": (304, 272), "up_proj": (304, 272), "down_proj": (272, 304)}
    tensors = {
        f"layers.0.experts.{name}.lora_{leaf}.weight": torch.randn(
            3, *((40, num_in) if leaf == "A" else (num_out, 40))
        ).to(dtype)
        for name, (num_in, num_out) in sizes.items()
        for leaf in "AB"
    }
    tensors["layers.0.q.lora_A.weight"] = torch.randn(24, 520).to(dtype)
    tensors["layers.0.q.lora_B.weight"] = torch.randn(40, 24).to(dtype)
    kinds = TensorKinds.of(tensors)
    assert kinds is not None
    spec, layout = ModelSpec(sites), TableLayout.of(sites)
    plan = make_plan(kinds, CONFIG, None, lambda s, o: bind(s, spec, o), layout, dtype)
    assert plan is not None
    return plan, tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_many_tiles_and_tensors_that_are_not_aligned(dtype: torch.dtype, offset: int) -> None:
    plan, tensors = make_large(dtype)
    assert plan.copies is not None
    flat = torch.cat([torch.zeros(offset, dtype=dtype), *(t.flatten() for t in tensors.values())])
    views, begin = [], offset
    for tensor in tensors.values():
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    wanted, data = poisoned(plan), poisoned(plan)
    plan.fill(views, wanted)
    assert plan.copies.run(views, data)
    assert torch.equal(data, wanted)


@pytest.mark.parametrize(("rank", "num_in", "num_out"), ODD_SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", DTYPES)
def test_odd_ranks_counts_and_offsets_are_copied_to_the_last_value(
    given: torch.dtype, form: str, rank: int, num_in: int, num_out: int
) -> None:
    for i, dtype in enumerate((given, torch.float16 if given == torch.float32 else torch.float32)):
        tensors = experts_of(rank, num_in, num_out, given, form)
        plan = experts_plan(tensors, num_in, num_out, dtype)
        assert plan.copies is not None
        for offset in (0, 1 + i, 4):
            views = in_order(plan, shifted(tensors, offset))
            wanted = poisoned(plan)
            plan.fill(views, wanted)
            around = torch.full((len(wanted) + 256,), 7, dtype=dtype)
            assert plan.copies.run(views, around[128:-128])
            assert torch.equal(around[128:-128], wanted), f"offset {offset}"
            assert bool((around[:128] == 7).all() and (around[-128:] == 7).all()), "beside it"


@pytest.mark.parametrize(("rank", "num_in", "num_out"), ODD_SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", DTYPES)
def test_what_a_launch_promises_the_compiler_holds_for_all_its_tiles(
    given: torch.dtype, form: str, rank: int, num_in: int, num_out: int
) -> None:
    """The interpreter looks at no hint, so a false one shows in wrong values on a GPU alone."""
    plan = experts_plan(experts_of(rank, num_in, num_out, given, form), num_in, num_out, given)
    copies = UpdateCopies.of(plan)
    assert copies is not None
    for kind, _, tiles in copies._launches:
        _, source, step, target, target_step, count_f, count_w, width = tiles.T
        along = count_f if kind.columns else count_w
        for promised in (source, step, along):
            assert not bool((promised % kind.unit).any())
        for promised in (target, target_step, width):
            assert not bool((promised % (16 // given.itemsize)).any())
        assert int(count_f.max()) <= kind.block_f and int(width.max()) <= kind.block_w
        assert bool((count_w <= width).all() and (count_f > 0).all() and (count_w >= 0).all())


def test_aligned_factors_of_one_rank_take_two_launches_of_16_bytes_per_access() -> None:
    tensors = experts_of(16, 64, 48, torch.bfloat16, "per projection", experts=3)
    copies = experts_plan(tensors, 64, 48, torch.bfloat16).copies
    assert copies is not None
    found = {(kind.columns, kind.unit, kind.block_f): tiles for kind, _, tiles in copies._launches}
    assert found.keys() == {(False, 8, 1), (True, 8, 16)}
    assert len(found[False, 8, 1]) == 1, "A of all experts is one row"
    assert len(found[True, 8, 16]) == 3, "one tile per expert"


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_anywhere_is_seen(dtype: torch.dtype, given: torch.dtype) -> None:
    tensors = KINDS["linear"](0)
    tensors = {name: tensor.to(given) for name, tensor in tensors.items()}
    plan = plan_of(tensors, new_bank(dtype))
    assert plan.copies is not None
    largest = 60000.0  # in range of all dtypes
    for i, name in enumerate(plan.kinds.names):
        values = (torch.nan, torch.inf, -torch.inf)
        for value in (*values[i:], largest, -largest):
            changed = dict(tensors)
            changed[name] = tensors[name].clone()
            changed[name].view(-1)[-1 - i] = value
            finite = plan.copies.run(in_order(plan, changed), poisoned(plan))
            assert finite == (abs(value) == largest), (name, value)


def test_values_beyond_the_range_of_the_target_are_bad() -> None:
    tensors = KINDS["linear"](0)
    plan = plan_of(tensors, new_bank(torch.float16))
    assert plan.copies is not None
    tensors["layers.0.self_attn.q_proj.lora_B.weight"][5, 1] = 1e5
    assert not plan.copies.run(in_order(plan, tensors), poisoned(plan))


@pytest.mark.parametrize("num_words", [32868, 32869, 65636, 70000, 100])
def test_sums_of_blocks_give_the_checksum(num_words: int) -> None:
    site = linear_site("q", 8, 8)
    layout = TableLayout.of([site])
    row = torch.zeros(layout.row_words, dtype=torch.int64)
    data = torch.randn(4 * num_words, generator=torch.Generator().manual_seed(1)).half()
    packed = PackedAdapter(data, row, 1, {"p": (0, 400), "q": (400, 4 * num_words)})
    sums = SiteSums(packed.spans, 2).of(data)
    assert checksum_of(packed, layout, sums) == checksum_of(packed, layout)
    assert len(sums) == (0 if num_words - 100 < 32768 else (num_words - 100) // 32768 + 1)
